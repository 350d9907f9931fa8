"""Parameters that FSDP2 has cut into DTensors: trained as if they were whole, with state for one's own part alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from speedrun.optim import Adam, Combined, Muon, NorMuon, route
from speedrun.optim.dtensor import local_of
from speedrun.optim.finite import NonFiniteGradient
from tests.distributed.ranks import together

STEPS = 4


def build(kind: str) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 15, bias=False), nn.Tanh(), nn.Linear(15, 3))
    return net, {"muon": Muon, "normuon": NorMuon}[kind]


def optimizer_of(net: nn.Module, muon: Any) -> Combined:
    plan = route(net)
    decay = {"weight_decay": 0.1, "decay": "cautious"}
    return Combined(muon(plan.muon, lr=0.02, **decay), Adam(plan.adam, lr=0.01, **decay))


def train(net: nn.Module, muon: Any, rank: int) -> Combined:
    """Every rank sees the same rows, so the averaged gradients are those of one process."""
    optimizer = optimizer_of(net, muon)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.full_tensor().clone() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in net.named_parameters()
    }


def with_fsdp(rank: int, size: int, kind: str) -> dict[str, Any]:
    net, muon = build(kind)
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer)
    fully_shard(net)
    optimizer = train(net, muon, rank)
    state = sum(local_of(v).numel() for s in optimizer.state.values() for v in s.values())
    kept = optimizer.state[net[2].weight]
    assert isinstance(kept["momentum_buffer"], DTensor)
    assert kept["momentum_buffer"].placements == net[2].weight.placements
    found = whole(net)
    net[2].weight.grad = torch.zeros_like(net[2].weight)
    if rank == 0:
        net[2].weight.grad.to_local().fill_(float("nan"))
    with pytest.raises(NonFiniteGradient):  # on all ranks, or the others would wait for ever
        optimizer.step()
    return {"weights": found, "state": state}


@pytest.mark.parametrize("kind", ["muon", "normuon"])
@pytest.mark.parametrize("size", [2, 3])
def test_fsdp_trains_what_one_process_would(kind: str, size: int, tmp_path: Path) -> None:
    """Rows do not divide by three; one rank has none of the last matrix's."""
    net, muon = build(kind)
    optimizer = train(net, muon, 0)
    total = sum(v.numel() for o in optimizer.optimizers for s in o.state.values() for v in s.values())
    expected = whole(net)
    found = together(tmp_path, size, with_fsdp, kind)
    for rank in found:
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    assert max(rank["state"] for rank in found) < 0.8 * total


def foreign_member(rank: int, size: int) -> bool:
    """torch's AdamW keeps DTensors, so as a member it may be saved."""
    net = nn.Sequential(nn.Linear(4, 6))
    fully_shard(net)
    optimizer = Combined(torch.optim.AdamW(net.parameters()))
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(net, optimizer)["state"]["0.weight"]["exp_avg"]
    return torch.equal(saved.full_tensor(), optimizer.state[net[0].weight]["exp_avg"].full_tensor())


def test_a_member_that_keeps_dtensors_is_saved(tmp_path: Path) -> None:
    assert together(tmp_path, 2, foreign_member) == [True, True]
