"""speedrun.optim in your own training loop, with a schedule, clipping, and a checkpoint to go on from.

    python examples/loop.py                    # 60 steps; saves loop.pt
    python examples/loop.py --steps 90         # goes on from loop.pt

NorMuon and Adam are one optimizer to everything else.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from speedrun.optim import Adam, Combined, NorMuon, route

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--checkpoint", type=Path, default=Path("loop.pt"))
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 20))
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 256))

plan = route(model)  # hidden matrices to NorMuon; tables, head and vectors to Adam
print(plan)
optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.003))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 120)

first = 0
if args.checkpoint.exists():
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["step"]

for step in range(first, args.steps):
    loss = nn.functional.cross_entropy(model(text[:-1]), text[1:])
    loss.backward()
    # Clipping is for Adam's parameters: the size of Muon's update does not depend on that of the gradient.
    nn.utils.clip_grad_norm_([p for group in plan.adam for _, p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 9:
        print(f"step {step + 1}  loss {loss.item():.6f}")

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
torch.save({"step": args.steps} | state, args.checkpoint)
