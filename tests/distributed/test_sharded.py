"""Parameters that FSDP2 has cut into DTensors: trained as if they were whole, with state for one's own part alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo, route
from speedrun.optim.base import NonFiniteGradient
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
    state = sum(v.numel() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
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


def exact_dtensor(rank: int, size: int) -> str:
    net = nn.Sequential(nn.Linear(8, 8, bias=False)).to(torch.bfloat16)
    fully_shard(net)
    try:
        Muon(net.parameters())
    except ValueError as e:
        return str(e)
    return "nothing was said"


def test_exact_bf16_is_refused_for_parts(tmp_path: Path) -> None:
    for said in together(tmp_path, 2, exact_dtensor):
        assert "MixedPrecisionPolicy" in said


# ---------------------------------------------------------------- checkpoints


def wrapped(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    matrices = [(name, p) for name, p in net.named_parameters() if p.ndim > 1]
    vectors = [(name, p) for name, p in net.named_parameters() if p.ndim < 2]
    if kind == "adam":
        return Adam(net.named_parameters())
    if kind in ("muon", "normuon"):
        return {"muon": Muon, "normuon": NorMuon}[kind](matrices)
    if kind == "combined":
        return Combined(torch.optim.AdamW(matrices), Adam(vectors))
    return Snoo(torch.optim.AdamW(net.named_parameters()))


def checkpoints(rank: int, size: int, placement: str) -> dict[str, list[str]]:
    """What is said by each way into and out of a checkpoint."""
    said: dict[str, list[str]] = {}
    for kind in ("adam", "muon", "normuon", "combined", "snoo"):
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        if placement == "fully_shard":
            fully_shard(net)
        else:
            mesh = init_device_mesh("cpu", (size,))
            for module in net:
                for name, p in list(module.named_parameters()):
                    setattr(module, name, nn.Parameter(distribute_tensor(p, mesh, [Replicate()])))
        optimizer = wrapped(kind, net)
        plain, by_name = ordinary(kind)
        if kind != "snoo":  # without state nothing can be lost; some libraries load what they just saved
            optimizer.load_state_dict(optimizer.state_dict())
        ways = {
            "DCP saves": lambda o=optimizer, n=net: get_optimizer_state_dict(n, o),  # it steps first, to have state
            "it saves": lambda o=optimizer: o.state_dict(),
            "it loads": lambda o=optimizer, p=plain: o.load_state_dict(p),
            "DCP loads": lambda o=optimizer, n=net, b=by_name: set_optimizer_state_dict(n, o, b),
        }
        said[kind] = []
        for way in ways.values():
            with pytest.raises(ValueError, match="cannot be saved or loaded") as e:
                way()
            said[kind].append(str(e.value))
    return said


def ordinary(kind: str) -> tuple[dict[str, Any], Any]:
    """A state of the same model that is not distributed, in the optimizer's layout and in DCP's."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = wrapped(kind, net)
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return optimizer.state_dict(), get_optimizer_state_dict(net, optimizer)


@pytest.mark.parametrize("placement", ["fully_shard", "replicated"])
def test_the_state_of_a_dtensor_stays_out_of_checkpoints(placement: str, tmp_path: Path) -> None:
    """It would be one rank's on all ranks after a resume."""
    for said in together(tmp_path, 2, checkpoints, placement):
        first = {kind: "0.bias" if kind == "combined" else "0.weight" for kind in said}
        for kind, sentences in said.items():
            for sentence in sentences:
                assert sentence.startswith(f"The state of {first[kind]} cannot be saved or loaded: it is a DTensor")
                assert "use torch.optim.AdamW for such parameters" in sentence
        assert all("Adam keeps plain tensors for this rank's part" in sentence for sentence in said["combined"])
        assert all("leaves out what Snoo keeps" in sentence for sentence in said["snoo"])


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
