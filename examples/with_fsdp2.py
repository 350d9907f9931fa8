"""speedrun.optim under FSDP2, saved and resumed by torch.distributed.checkpoint, on any number of ranks.

    torchrun --standalone --nproc-per-node=2 examples/with_fsdp2.py --folder checkpoint
    torchrun --standalone --nproc-per-node=3 examples/with_fsdp2.py --folder checkpoint --resume

Ten steps, with a checkpoint after the fifth; with --resume the last five of them again, from the checkpoint.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from speedrun.optim import Adam, Combined, NorMuon, route

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="checkpoint")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

dist.init_process_group()
torch.manual_seed(0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 24))
rows = text.unfold(0, 45, 45)  # every rank takes its own, as many as the others
mine = rows[dist.get_rank() :: dist.get_world_size()][: len(rows) // dist.get_world_size()]

model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 256))
for layer in (model[0], model[1], model[3], model[4]):
    fully_shard(layer)
fully_shard(model)

plan = route(model)  # after fully_shard, which replaces the parameters
optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.003))

first, saved = 0, dict[str, Any]()
if args.resume:
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": torch.zeros((), dtype=torch.int64)}
    dcp.load(saved, checkpoint_id=args.folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    first = int(saved["step"])

for step in range(first, 10):
    loss = nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    if dist.get_rank() == 0:
        print(f"step {step + 1}  loss {loss.item() / dist.get_world_size():.6f}")
    if step == 4 and not args.resume:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": torch.tensor(step + 1)}
        dcp.save(saved, checkpoint_id=args.folder)  # type: ignore[attr-defined]

dist.barrier()  # who leaves first would take down what others still listen to
time.sleep(0.5)  # FSDP keeps gloo's threads alive; one that lets go of a tensor while Python ends aborts the process
dist.destroy_process_group()
