"""Optimizers under FSDP2 through torch.distributed.checkpoint: saved by some ranks, resumed by as many or by others."""

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo
from tests.distributed.ranks import together

HANGS = 240  # seconds until a rank that waits for another ends by SIGALRM
SAVED, LAST = 5, 10


def network(seed: int = 0) -> nn.Sequential:
    """12 rows are cut evenly by 2, 3 and 4 ranks, 11 by none."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 11))


def build(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    matrices = [(name, p) for name, p in net.named_parameters() if p.ndim > 1]
    vectors = [(name, p) for name, p in net.named_parameters() if p.ndim < 2]
    make: dict[str, Any] = {
        "adam": lambda: Adam(net.named_parameters(), lr=0.01),
        "muon": lambda: Muon(matrices, update_ema=0.2),
        "normuon": lambda: NorMuon(matrices, weight_decay=0.1),
        "combined": lambda: Combined(NorMuon(matrices[:1]), Adam(matrices[1:]), Adam(vectors, lr=0.01, every=2)),
        "snoo": lambda: Snoo(Combined(NorMuon(matrices), Adam(vectors, lr=0.01, every=2)), k=3),
        "snoo of another package's": lambda: Snoo(torch.optim.AdamW(net.parameters(), lr=0.01), k=3),
    }
    return make[kind]()  # type: ignore[no-any-return]


KINDS = ("adam", "muon", "normuon", "combined", "snoo", "snoo of another package's")


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """The loss before each step. All ranks see the same rows, so averaged gradients are those of one process."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


Pair = tuple[nn.Module, torch.optim.Optimizer]
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def pairs(seed: int, *, sharded: bool = True) -> dict[str, Pair]:
    found = {}
    for kind in KINDS:
        net = network(seed)
        found[kind] = (net, build(kind, fully_shard(net) if sharded else net))
    return found


def saved(of: dict[str, Pair], options: StateDictOptions | None = None) -> dict[str, Any]:
    return {
        kind: {
            "model": get_model_state_dict(net, options=options),
            "optim": get_optimizer_state_dict(net, optimizer, options=options),
        }
        for kind, (net, optimizer) in of.items()
    }


def load(into: dict[str, Pair], states: dict[str, Any], options: StateDictOptions | None = None) -> None:
    for kind, (net, optimizer) in into.items():
        set_model_state_dict(net, states[kind]["model"], options=options)
        set_optimizer_state_dict(net, optimizer, states[kind]["optim"], options=options)


def train_all(of: dict[str, Pair], first: int, last: int) -> dict[str, list[float]]:
    return {kind: train(net, optimizer, first, last) for kind, (net, optimizer) in of.items()}


def resumed(folder: str) -> dict[str, list[float]]:
    """Losses after the fifth step, from a checkpoint of whatever number of ranks."""
    fresh = pairs(1)
    states = saved(fresh)
    dcp.load(states, checkpoint_id=folder)
    load(fresh, states)
    return train_all(fresh, SAVED, LAST)


def session(rank: int, size: int, here: str, other: str) -> dict[str, Any]:
    signal.alarm(HANGS)
    trained = pairs(0)
    train_all(trained, 0, SAVED)
    dcp.save(saved(trained), checkpoint_id=here)
    full = copy.deepcopy(saved(trained, FULL))
    sent = pairs(2)
    load(sent, copy.deepcopy(full) if rank == 0 else {kind: {"model": {}, "optim": {}} for kind in KINDS}, BROADCAST)
    return {
        "straight": train_all(trained, SAVED, LAST),
        "resumed": resumed(here),
        "broadcast": train_all(sent, SAVED, LAST),
        "elsewhere": resumed(other) if Path(other).exists() else None,
        "full": full,
    }


def test_a_checkpoint_of_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    alone = pairs(0, sharded=False)
    expected = {kind: pytest.approx(losses[SAVED:], rel=1e-5) for kind, losses in train_all(alone, 0, LAST).items()}
    for size, other in ((2, None), (3, 2), (4, 3)):
        for found in together(tmp_path, size, session, f"{tmp_path}/saved-by-{size}", f"{tmp_path}/saved-by-{other}"):
            assert found["straight"] == expected
            assert found["straight"] == found["resumed"] == found["broadcast"]
            assert other is None or found["elsewhere"] == expected
            one = pairs(3, sharded=False)
            load(one, found["full"])
            assert train_all(one, SAVED, LAST) == expected


# ------------------------------------------------------------------------------------------------ what must not work


def trained(p: Any) -> Adam:
    optimizer = Adam([("w", p)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def spread(mesh: Any, *placements: Any, rows: int = 11) -> nn.Parameter:
    whole = torch.arange(rows * 6.0).view(rows, 6)
    return nn.Parameter(distribute_tensor(whole, mesh, placements) if mesh else whole)


def said_by(function: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as e:  # noqa: PT011 the caller compares what it says
        function()
    return str(e.value)


def exact(rank: int) -> list[str]:
    """Of exact bfloat16 weights, which rank 0 sends to all: 16-bit integers could not be sent."""
    net = network(rank).bfloat16()
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.3)
    optimizer = Adam(net.named_parameters(), lr=0.1)
    optimizer.step()
    net.zero_grad()
    both = {"it": (net, optimizer)}
    full = copy.deepcopy(saved(both, FULL)) if rank == 0 else {"it": {"model": {}, "optim": {}}}
    load(both, full, BROADCAST)
    return [optimizer.master(p).numpy().tobytes().hex() for p in net.parameters()]


def misfits(rank: int, size: int) -> dict[str, Any]:
    """Each of two pairs of ranks has a mesh of its own."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    shard = mesh["shard"]
    state = trained(spread(shard, Shard(0))).state_dict()
    whole = trained(spread(None)).state_dict()
    kept: Any = Adam([("w", spread(shard, Shard(0)))])
    said = {
        "plain": said_by(lambda: Adam([("w", spread(None))]).load_state_dict(state)),
        "mesh": said_by(lambda: Adam([("w", spread(mesh["stage"], Shard(0)))]).load_state_dict(state)),
        "rows": said_by(lambda: kept.load_state_dict(trained(spread(None, rows=12)).state_dict())),
    }
    assert not kept.state
    for other in (Shard(1), Replicate()):  # the same mesh, otherwise laid out
        p = spread(shard, other)
        optimizer = Adam([("w", p)])
        optimizer.load_state_dict(state)
        assert optimizer.state[p]["exp_avg"].to_local().shape == p.to_local().shape  # type: ignore[attr-defined]
        again = optimizer.state_dict()["state"][0]["exp_avg"]
        assert again.placements == (other,)
        assert torch.equal(again.full_tensor(), whole["state"][0]["exp_avg"])
    said["exact"] = exact(rank)
    p = spread(shard, Shard(0))
    p.grad = distribute_tensor(torch.ones(11, 6), mesh["stage"], [Shard(0)])  # type: ignore[assignment]
    said["gradient"] = said_by(Adam([("w", p)]).step)
    dist.barrier()  # none leaves while others still talk
    return said


def test_a_state_that_lies_otherwise_is_moved_or_refused(tmp_path: Path) -> None:
    first, *others = together(tmp_path, 4, misfits)
    assert all(said["exact"] == first["exact"] for said in others)
    for said in (first, *others):
        assert said["plain"].startswith(
            "The state 'exp_avg' of w is a DTensor, and the parameter is not. Save the whole"
        )
        assert "The state 'exp_avg' of w is on DeviceMesh" in said["mesh"]
        assert "Load it with torch.distributed.checkpoint" in said["mesh"]
        assert said["rows"] == "The state 'exp_avg' of w has shape (12, 6), but this model's needs (11, 6)."
        assert said["gradient"].startswith("The gradient of w is not cut as the parameter is")


def frozen(rank: int, size: int) -> bool:
    """Of two stages of a pipeline one is frozen, and steps more often; of its members one has a gradient."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    moved = []
    for kind in ("adam", "normuon", "combined", "snoo"):
        net = network()
        net.requires_grad_(rank > 1)
        optimizer = build(kind, fully_shard(net, mesh=mesh))
        before = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        before = {name: p.clone() for name, p in before.items()}
        if rank < 2:
            for _ in range(3):
                optimizer.step()
            assert not any(optimizer.state.values())
        else:
            train(net, optimizer, 0, 2)
        set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(net, optimizer))
        after = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        moved.append(not all(torch.equal(after[name], before[name]) for name in before))
    dist.barrier()
    assert len(set(moved)) == 1
    return moved[0]


def test_a_frozen_stage_does_not_hang(tmp_path: Path) -> None:
    assert together(tmp_path, 4, frozen) == [False, False, True, True]
