"""speedrun.optim in the Trainer of Hugging Face's transformers, on a small GPT-2 with random weights.

    pip install transformers accelerate
    python examples/with_trainer.py --folder run                # 40 steps, a checkpoint every 20
    python examples/with_trainer.py --folder run --resume run/checkpoint-20

Trainer takes an optimizer and a schedule in place of its own.
"""

import argparse
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from speedrun.optim import Adam, Combined, Muon, route

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="run")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--resume", help="a checkpoint to go on from")
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40))
rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, 32, 9)]
sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

# GPT-2's Conv1D stores inputs x outputs, which route sees. Query, key and value of c_attn are orthogonalised apart.
plan = route(model, blocks={"*.c_attn.weight": 3})
# With this scale Muon takes the learning rate and the weight decay that AdamW had.
muon = Muon(plan.muon, lr=1e-3, weight_decay=0.1, scale="match-rms-adamw")
optimizer = Combined(muon, Adam(plan.adam, lr=1e-3))
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=args.steps)

settings = TrainingArguments(
    args.folder,
    max_steps=args.steps,
    per_device_train_batch_size=8,
    max_grad_norm=0.0,  # nothing to clip: see docs/optimizers.md
    save_steps=20,
    logging_steps=10,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, schedule))
trainer.train(resume_from_checkpoint=args.resume)
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}  loss {float(entry['loss']):.4f}")
