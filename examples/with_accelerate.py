"""speedrun.optim under accelerate: gradient accumulation, a schedule, and a checkpoint to go on from.

    pip install accelerate
    python examples/with_accelerate.py --folder state           # also under `accelerate launch`

The second epoch is trained twice, from the same checkpoint.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from speedrun.optim import Adam, Combined, NorMuon, route

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="state")
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40))
rows: DataLoader[torch.Tensor] = DataLoader(text.unfold(0, 33, 9), batch_size=8)  # type: ignore[arg-type]
model: nn.Module = nn.Sequential(
    nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 256)
)

plan = route(model)  # before `prepare`, which may wrap the model
optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.003))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, rows, scheduler = accelerator.prepare(model, optimizer, rows, scheduler)


def epoch() -> float:
    for batch in rows:
        with accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return loss.item()


print(f"after one epoch    loss {epoch():.6f}")
accelerator.save_state(args.folder)
print(f"after two epochs   loss {epoch():.6f}")
accelerator.load_state(args.folder)  # weights, the state of both optimizers, the schedule
print(f"the second, again  loss {epoch():.6f}")
