"""Whether gradients are finite is agreed on by the ranks of the DTensors' meshes, and by nobody else."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from speedrun.optim import Adam, Combined, Muon, NorMuon, base, route
from speedrun.optim.finite import NonFiniteGradient
from tests.distributed.ranks import together

HANGS = 40  # seconds until a rank that waits for another ends by SIGALRM; groups of a mesh wait for half an hour


def stage(number: int) -> nn.Sequential:
    """Two stages of a pipeline with different numbers of parameters."""
    torch.manual_seed(number)
    if number == 0:
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 15, bias=False), nn.Tanh(), nn.Linear(15, 3))
    return nn.Sequential(nn.Linear(6, 9))


def optimizer_of(net: nn.Module) -> Combined:
    plan = route(net)
    return Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.01))


def backward(net: nn.Module, step: int) -> None:
    """All ranks see the same rows, so the averaged gradients are those of one process."""
    net.zero_grad()
    net(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(net, step)
        optimizer.step()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone() for p in net.parameters()]


def on(number: int) -> range:
    """Stage 0 makes more steps than stage 1, all of them alone."""
    return range(4) if number == 0 else range(2)


def pipeline(rank: int, size: int) -> dict[str, Any]:
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    number = rank // 2
    net = stage(number)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = optimizer_of(net)
    train(net, optimizer, on(number))
    trained = weights(net)
    backward(net, 9)
    if rank == 0:
        first = next(net.parameters()).grad
        assert isinstance(first, DTensor)
        first.to_local().fill_(float("nan"))
    said = "nothing"
    try:
        optimizer.step()
    except NonFiniteGradient as e:
        said = str(e)
    after = weights(net)
    dist.barrier()  # none leaves while others still talk
    return {"trained": trained, "said": said, "after": after}


def test_stages_of_a_pipeline_step_apart(tmp_path: Path) -> None:
    found = together(tmp_path, 4, pipeline)
    for rank, result in enumerate(found):
        alone = stage(rank // 2)
        train(alone, optimizer_of(alone), on(rank // 2))
        torch.testing.assert_close(result["trained"], weights(alone), rtol=1e-5, atol=1e-6)
    assert found[0]["said"].startswith("The gradient of 0.weight is not finite")
    assert found[1]["said"].startswith("A gradient on rank 0, whose error names it, is not finite")
    for result in found[:2]:
        assert all(map(torch.equal, result["trained"], result["after"]))
    for result in found[2:]:  # the other stage does not hear of it
        assert result["said"] == "nothing"
        assert not any(map(torch.equal, result["trained"], result["after"]))


# ------------------------------------------------------------------------------------- several meshes at once


def parameter(mesh: Any, placements: list[Any]) -> nn.Parameter:
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
    p.grad = distribute_tensor(torch.eye(4), mesh, placements)
    return p


def grid(rank: int, size: int) -> list[str]:
    """Muon's matrix lies on all four ranks, Adam's on pairs, and a third is not distributed at all."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    said = []
    for spoilt in ("all four", "a pair", "ordinary"):
        wide = parameter(mesh, [Shard(0), Replicate()])
        narrow = parameter(mesh["data"], [Shard(0)])
        ordinary = nn.Parameter(torch.ones(4, 4))
        ordinary.grad = torch.eye(4)
        if rank == 0:
            target = {"all four": wide, "a pair": narrow, "ordinary": ordinary}[spoilt].grad
            (target.to_local() if isinstance(target, DTensor) else target).fill_(float("inf"))
        members = Adam([narrow, ordinary]), Muon([wide])
        with pytest.raises(NonFiniteGradient) as e:
            Combined(*members).step()
        said.append(str(e.value))
        for p in (wide, narrow, ordinary):
            local = p.to_local() if isinstance(p, DTensor) else p
            assert local.eq(1).all()
        assert not any(any(state.values()) for member in members for state in member.state.values())
    dist.barrier()
    return said


def test_ranks_that_share_any_mesh_stop_together(tmp_path: Path) -> None:
    """Or Muon would wait for a part of its matrix that never comes."""
    first, *others = together(tmp_path, 4, grid)
    assert all(text.startswith("The gradient of parameter") for text in first)
    for said in others:
        assert all(text.startswith("A gradient on rank 0, whose error names it") for text in said)


# -------------------------------------------------------------------------------------- ordinary parameters


def alone(rank: int, size: int, masked: bool) -> str:
    """Rank 0 alone trains ordinary parameters, while there is a process group."""
    signal.alarm(HANGS)
    if masked:
        base.is_synchronous = lambda work: False  # as on a GPU; the masked path runs on any device
    said = "nothing"
    if rank == 0:
        net = stage(0)
        optimizer = optimizer_of(net)
        train(net, optimizer, range(2))
        before = weights(net)
        backward(net, 2)
        net[0].weight.grad[0, 0] = float("nan")
        try:
            optimizer.step()
            if masked:
                assert all(map(torch.equal, before, weights(net)))
                train(net, optimizer, range(1))
        except NonFiniteGradient as e:
            said = str(e)
        assert all(map(torch.equal, before, weights(net)))
    return said


@pytest.mark.parametrize("masked", [False, True])
def test_ordinary_parameters_are_nobody_elses_business(masked: bool, tmp_path: Path) -> None:
    first, second = together(tmp_path, 2, alone, masked)
    assert first.startswith("A gradient of the previous step" if masked else "The gradient of 0.weight is not finite")
    assert second == "nothing"


def masked_parts(rank: int, size: int) -> str:
    signal.alarm(HANGS)
    base.is_synchronous = lambda work: False
    net = stage(0)
    fully_shard(net)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2))
    before = weights(net)
    backward(net, 2)
    if rank == 1:
        net[0].weight.grad.to_local().fill_(float("nan"))
    optimizer.step()
    assert all(map(torch.equal, before, weights(net)))
    backward(net, 3)
    with pytest.raises(NonFiniteGradient) as e:
        optimizer.step()
    assert all(map(torch.equal, before, weights(net)))
    dist.barrier()
    return str(e.value)


def test_the_masked_step_of_a_gpu_is_masked_on_all_ranks_of_a_mesh(tmp_path: Path) -> None:
    for said in together(tmp_path, 2, masked_parts):
        assert said.startswith("A gradient of the previous step was not finite")
