"""Gradients that lie on the ranks otherwise than their DTensor, as under SequenceParallel, are exchanged first."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo, base
from speedrun.optim.finite import NonFiniteGradient
from tests.distributed.ranks import together

HANGS = 40  # seconds until a rank that waits for another ends by SIGALRM; groups of a mesh wait for half an hour
STEPS = 5


# ------------------------------------------------------------------------------------------ SequenceParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.down(self.up(x).tanh())))
        return out


def parallel(size: int) -> Net:
    """The norm works on parts of the sequence: its gradients are shares of a sum."""
    net = Net()
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, init_device_mesh("cpu", (size,)), plan)
    return net


def build(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    named = list(net.named_parameters())
    matrices, vectors = [(n, p) for n, p in named if p.ndim > 1], [(n, p) for n, p in named if p.ndim < 2]
    adam = {"lr": 0.1, "weight_decay": 0.1}
    if kind == "torch":
        return torch.optim.AdamW(named, **adam)
    if kind in ("adam", "masked adam"):
        return Adam(named, **adam)
    if kind == "plain adam":  # without torch's fused kernel
        return Adam(named, **adam, decay="cautious", every=2)
    return Combined({"muon": Muon, "normuon": NorMuon}[kind](matrices), Combined(Adam(vectors, **adam)))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(4, 6, 8, generator=generator), torch.randn(4, 6, 6, generator=generator)
        (net(x) - y).square().mean().backward()
        optimizer.step()


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in net.named_parameters()}


def sequence_parallel(rank: int, size: int, kind: str) -> dict[str, Any]:
    signal.alarm(HANGS)
    if kind == "masked adam":
        base.is_synchronous = lambda work: False  # as on a GPU; the masked path runs on any device
    net = parallel(size)
    moved: list[int] = []
    redistribute = base.redistribute
    base.redistribute = lambda grad, p: moved.append(1) or redistribute(grad, p)
    train(net, build(kind, net))
    found: dict[str, Any] = {"weights": weights(net), "moved": len(moved), "norm": net.norm.weight.to_local()}
    found["still partial"] = [n for n, p in net.named_parameters() if p.grad.placements == (Partial(),)]
    theirs = parallel(size)
    train(theirs, build("torch", theirs))
    found["torch"] = weights(theirs)
    return found


@pytest.mark.parametrize("kind", ["adam", "plain adam", "masked adam", "muon", "normuon"])
def test_sequence_parallel_trains_what_one_process_would(kind: str, tmp_path: Path) -> None:
    alone = Net()
    train(alone, build(kind, alone))
    first, second = found = together(tmp_path, 2, sequence_parallel, kind)
    assert torch.equal(first["norm"], second["norm"])
    for result in found:
        torch.testing.assert_close(result["weights"], weights(alone), rtol=1e-4, atol=1e-5)
        if kind in ("adam", "masked adam"):
            torch.testing.assert_close(result["weights"], result["torch"], rtol=1e-4, atol=1e-5)
        assert result["still partial"] == ["norm.weight", "norm.bias"]
        assert result["moved"] == 2 * STEPS  # each once per step


# --------------------------------------------------------------------------------------------------- by hand


def whole_gradient(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


CASES: list[tuple[Any, Any]] = [(Replicate(), Partial()), (Shard(0), Partial()), (Shard(0), Shard(1))]


def give(p: Any, mesh: Any, lies: Any, whole: Tensor) -> None:
    """A gradient of which a rank has a part, or a share that grows with the rank."""
    if lies == Partial():
        share = (mesh.get_local_rank() + 1) / sum(range(1, mesh.size() + 1))
        p.grad = DTensor.from_local(whole * share, mesh, [lies], run_check=False)
    else:
        p.grad = distribute_tensor(whole, mesh, [lies])


def members(a: Any, b: Any, c: Any) -> list[torch.optim.Optimizer]:
    return [Muon([("a", a)]), NorMuon([("b", b)]), Adam([("c", c)], lr=0.1)]


def by_hand(rank: int, size: int) -> list[list[Tensor]]:
    """Two pairs of ranks step apart: the first makes two steps, the second five."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    found = []
    for placement, lies in CASES:
        params = [nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [placement])) for _ in range(3)]
        optimizer = Combined(*members(*params))
        for step in range(2 if rank < 2 else STEPS):
            for k, p in enumerate(params):
                give(p, mesh, lies, whole_gradient(10 * k + step))
            optimizer.step()
        found.append([p.full_tensor() for p in params])
    dist.barrier()  # none leaves while others still talk
    return found


def test_any_placement_on_the_ranks_of_the_mesh_alone(tmp_path: Path) -> None:
    for rank, found in enumerate(together(tmp_path, 4, by_hand)):
        plain = [nn.Parameter(torch.ones(4, 6)) for _ in range(3)]
        optimizer = Combined(*members(*plain))
        for step in range(2 if rank < 2 else STEPS):
            for k, p in enumerate(plain):
                p.grad = whole_gradient(10 * k + step)
            optimizer.step()
        for case in found:
            torch.testing.assert_close(case, [p.detach() for p in plain], rtol=1e-4, atol=1e-5)


def finite(rank: int, size: int) -> list[str]:
    """Shares that are finite and have a sum that is not, and a share that is not; in the first member and the last."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (size,))
    said = []
    wraps: list[Callable[..., Any]] = [Combined, lambda a, b, c: Combined(a, Combined(b, Snoo(c)))]
    for bad, value in ((0, 3e38), (2, 3e38), (2, float("nan") if rank else 1.0)):
        for wrap in wraps:
            params = [nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])) for _ in range(3)]
            inner = members(*params)
            optimizer = wrap(*inner)
            for p in params:
                give(p, mesh, Partial(), whole_gradient(0))
            held: Any = params[bad].grad
            held.to_local().fill_(value)
            with pytest.raises(NonFiniteGradient) as e:
                optimizer.step()
            said.append(str(e.value).split(" is not")[0])
            assert all(p.to_local().eq(1).all() for p in params)  # type: ignore[attr-defined]
            assert not any(any(state.values()) for member in inner for state in member.state.values())
            assert not any(member._redistributed for member in inner)  # type: ignore[attr-defined]
    return said


def test_the_exchanged_gradient_is_what_must_be_finite(tmp_path: Path) -> None:
    for said in together(tmp_path, 2, finite):
        assert said == [f"The gradient of {name}" for name in "aacccc"]


def hooked(rank: int, size: int) -> list[Tensor]:
    """A member's hook comes after the check and changes the gradient in each of the ways there are."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (size,))
    found = []
    for way in ("replaced", "in place", "the local part"):
        p: Any = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]))
        give(p, mesh, Partial(), whole_gradient(0))
        member = Adam([p], lr=0.1)

        @torch.no_grad()
        def negated(*_: Any, p: Any = p, way: str = way) -> None:
            if way == "replaced":
                p.grad = -p.grad
            else:
                (p.grad if way == "in place" else p.grad.to_local()).neg_()

        member.register_step_pre_hook(negated)
        Combined(member).step()
        found.append(p.to_local())
    return found


def test_a_hook_of_a_member_is_not_too_late(tmp_path: Path) -> None:
    for found in together(tmp_path, 2, hooked):
        for weight in found:
            torch.testing.assert_close(weight, 1 + 0.1 * whole_gradient(0).sign())


def foreign(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    cut = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    cut.grad = torch.ones(4, 6)
    plain, shared = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6))
    plain.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    shared.grad = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()], run_check=False)
    said = []
    for p in (cut, plain, shared):
        for kind in (Adam, Muon):
            with pytest.raises(ValueError, match=r"Let backward\(\) make the gradient") as e:
                kind([("a.weight", p)]).step()
            said.append(str(e.value))
    return said


def test_a_dtensor_and_an_ordinary_tensor_do_not_fit(tmp_path: Path) -> None:
    """Adam's fused kernel would read rows of other ranks, or beyond the end."""
    for said in together(tmp_path, 2, foreign):
        assert all(text.startswith("The gradient of a.weight is not cut as the parameter is") for text in said)
