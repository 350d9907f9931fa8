"""The sharded step of speedrun.optim in place of DDP: each rank trains its share, and sends while it computes.

    torchrun --standalone --nproc-per-node=2 examples/with_interleaved.py --checkpoint interleaved.pt
    torchrun --standalone --nproc-per-node=3 examples/with_interleaved.py --checkpoint interleaved.pt --resume

Ten steps, with a checkpoint after the fifth; with --resume the last five of them again, from the checkpoint.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from speedrun.optim import Adam, Interleaved, NorMuon, route

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="interleaved.pt")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

dist.init_process_group()
torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 24))
rows = text.unfold(0, 45, 45)
mine = rows[dist.get_rank() :: dist.get_world_size()]  # not always as many as the others have

model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 256))
plan = route(model)
# Losses below are divided by the tokens of all ranks, so gradients are added up and not averaged.
optimizer = Interleaved(model, [NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.003)], average="sum")

first = 0
if args.resume:
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_full_state_dict(saved["optimizer"])
    first = saved["step"]

for step in range(first, 10):
    losses: list[float] = []
    for part in mine.tensor_split(2):  # micro-batches
        with optimizer.no_sync() if not losses else nullcontext():  # gradients are sent during the last one
            logits = model(part[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / rows[:, 1:].numel()
            loss.backward()
        losses.append(loss.item())
    (total,) = optimizer.agree([sum(losses)])  # over all ranks, in a message that the step needs anyway
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1}  loss {total:.6f}")
    if step == 4 and not args.resume:
        state = optimizer.full_state_dict()  # called by all ranks; the first one has it
        if dist.get_rank() == 0:
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": state}, args.checkpoint)

dist.barrier()  # who leaves first would take down what others still listen to
dist.destroy_process_group()
