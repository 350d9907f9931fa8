"""Matrices that are DTensors are orthogonalised once, spread over the ranks of their mesh, as in one process."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo, base
from speedrun.optim.exact_bf16 import checksum
from speedrun.optim.spread import Spread, assign, chunk_sizes, group_by_mesh
from tests.distributed.ranks import together

HANGS = 50  # seconds until a rank that waits for another ends by SIGALRM; groups of a mesh wait for half an hour
STEPS = 4

# ------------------------------------------------------------------------------------ one process and several


class Net(nn.Module):
    """Rows that 2 and 4 ranks share evenly, rows that they do not, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even, self.uneven = nn.Linear(6, 24, bias=False), nn.Linear(24, 10)
        self.few, self.wide = nn.Linear(10, 3, bias=False), nn.Linear(3, 18)
        self.bank = nn.Parameter(torch.randn(5, 18, 4) / 4)
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.wide(self.few(self.uneven(self.even(x).tanh()).tanh())).tanh()
        return torch.einsum("bi,eio->beo", out, self.bank).clone()  # FSDP does not like views


def kinds(net: nn.Module) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    matrices = [(n, p) for n, p in net.named_parameters() if p.ndim > 1]
    vectors = [(n, p) for n, p in net.named_parameters() if p.ndim < 2]
    how = ["batch" if p.ndim > 2 else "flatten" for _, p in matrices]
    blocks = [(1, 2) if p.shape[-1] % 2 == 0 else 3 if len(p) % 3 == 0 else 1 for _, p in matrices]
    whole: dict[str, Any] = {"lr": 0.02, "matrix": how}
    return {
        "adam": lambda: Adam(net.named_parameters(), lr=0.01, weight_decay=0.1),
        "muon": lambda: Muon(matrices, **whole),
        "normuon": lambda: NorMuon(matrices, **whole),
        "normuon by columns": lambda: NorMuon(matrices, **whole, axis=-2, blocks=blocks, update_ema=0.5),
        "newton-schulz": lambda: Muon(matrices, **whole, method="newton-schulz", momentum_form="classical", steps=6),
        "svd": lambda: Muon(matrices, **whole, method="svd", weight_decay=0.1, decay="cautious", blocks=blocks),
        "decay": lambda: Muon(matrices, **whole, nesterov=False, weight_decay=0.9, decay_by="lr-squared"),
        "lists": lambda: NorMuon(matrices, 0.02, lr_mul=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], scale="match-rms-adamw"),
        "combined": lambda: Combined(NorMuon(matrices, **whole), Adam(vectors, lr=0.01)),
        "snoo": lambda: Snoo(Combined(Muon(matrices, **whole), Adam(vectors, lr=0.01)), k=2),
    }


NAMES = tuple(kinds(Net()))


def train(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Each rank has the same rows. In one step half of the matrices have no gradient, in another none has one."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        net.zero_grad()
        net(torch.randn(8, 6, generator=generator).to(net.bank.dtype)).square().mean().backward()
        if step == 1:
            net.even.weight.grad = net.few.weight.grad = None
        optimizer.step()
    net.zero_grad()
    optimizer.step()


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def learned(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and states; those that are cut are put together."""
    found: dict[str, Any] = {}
    for name, p in net.named_parameters():
        found[name] = whole(p)
        state = optimizer.state.get(p, {}) if p.requires_grad else {}
        found |= {f"{name} {key}": whole(value) if torch.is_tensor(value) else value for key, value in state.items()}
    return found


def sharded(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    signal.alarm(HANGS)
    if size == 3:
        base.is_synchronous = lambda work: not work  # as on a GPU; the masked path runs on any device
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    found = {}
    for name in NAMES:
        net = Net().to(dtype)
        fully_shard(net.uneven, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = kinds(net)[name]()
        train(net, optimizer)
        found[name] = learned(net, optimizer)
    return found


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_fully_sharded_as_in_one_process(shape: tuple[int, ...], tmp_path: Path) -> None:
    size = torch.Size(shape).numel()
    dtype = torch.float32 if size == 2 or shape == (2, 2) else torch.float64
    near = {"rtol": 1e-7, "atol": 1e-9} if shape == (4,) else {"rtol": 1e-4, "atol": 1e-5}  # masked rates are float32
    first, *others = together(tmp_path, size, sharded, shape, dtype)
    for name in NAMES:
        net = Net().to(dtype)
        optimizer = kinds(net)[name]()
        train(net, optimizer)
        torch.testing.assert_close(first[name], learned(net, optimizer), **near)
        for other in others:
            torch.testing.assert_close(other[name], first[name], rtol=0, atol=0)


# ------------------------------------------------------------------------------------- placements and meshes


def matrix(seed: int, rows: int = 7, cols: int = 5) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def step_by_step(params: list[nn.Parameter], gradients: Callable[[nn.Parameter, int], Any]) -> list[Any]:
    optimizer = NorMuon(params, lr=0.1)
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = gradients(p, 10 * k + step)
        optimizer.step()
    return [optimizer.state[p].get("second_moment") for p in params]


LAYS: list[tuple[str, list[Any]]] = [
    ("both", [Shard(0), Shard(1)]),
    ("both", [Shard(1), Shard(0)]),
    ("both", [Shard(0), Shard(0)]),
    ("both", [Replicate(), Shard(1)]),
    ("both", [Shard(0), Replicate()]),
    ("both", [Replicate(), Replicate()]),
    ("a", [Shard(0)]),
    ("b", [Shard(1)]),
    ("b", [Replicate()]),
    ("middle", [Shard(0)]),
]


def lay(rank: int, size: int) -> list[tuple[Any, Any]]:
    """One optimizer for all of them, and for an ordinary parameter that only rank 3 trains."""
    signal.alarm(HANGS)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes = {"both": both, "a": both["a"], "b": both["b"], "middle": DeviceMesh("cpu", [1, 2])}
    params = [nn.Parameter(distribute_tensor(matrix(k), meshes[on], cut)) for k, (on, cut) in enumerate(LAYS)]
    ordinary = [nn.Parameter(matrix(0))] if rank == 3 else []

    def gradient(p: Any, seed: int) -> Tensor:
        return distribute_tensor(matrix(seed), p.device_mesh, p.placements) if isinstance(p, DTensor) else matrix(seed)

    seconds = step_by_step([*params, *ordinary], gradient)
    on_mesh = [p.device_mesh.get_coordinate() is not None for p in params]  # type: ignore[attr-defined]
    found = [(whole(p) if here else None, v) for p, here, v in zip(params, on_mesh, seconds, strict=False)]
    dist.barrier()  # none leaves while others still talk
    return found


def test_any_placements_on_several_meshes(tmp_path: Path) -> None:
    params = [nn.Parameter(matrix(k)) for k in range(len(LAYS))]
    seconds = step_by_step(params, lambda p, seed: matrix(seed))
    for rank, found in enumerate(together(tmp_path, 4, lay)):
        for (on, _), expected, second, (p, v) in zip(LAYS, params, seconds, found, strict=True):
            if on == "middle" and rank in (0, 3):
                assert p is None
                assert v is None
            else:
                torch.testing.assert_close((p, v), (expected.detach(), second), rtol=1e-3, atol=1e-4)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(12, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


def train_pair(net: nn.Module) -> list[Tensor]:
    optimizer = NorMuon(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(matrix(step, 8, 6).double()).square().mean().backward()
        optimizer.step()
    return [whole(p) for p in net.parameters()]


def in_two_ways(rank: int, size: int) -> tuple[list[str], list[Tensor]]:
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = Pair().double()
    parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    placements: list[Any] = [p.placements for p in net.parameters()]  # type: ignore[attr-defined]
    return [type(placed[0]).__name__ for placed in placements], train_pair(net)


def test_fsdp_and_tensor_parallelism(tmp_path: Path) -> None:
    """Rows that both cut are cut in an order of their own."""
    alone = train_pair(Pair().double())
    for first_placements, trained in together(tmp_path, 4, in_two_ways):
        assert first_placements == ["_StridedShard", "Shard"]
        torch.testing.assert_close(trained, alone, rtol=1e-7, atol=1e-9)


def frozen(rank: int, size: int) -> list[Tensor]:
    """All matrices of the first two ranks' stage are frozen; the others train theirs."""
    signal.alarm(HANGS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    net = Pair().requires_grad_(rank > 1)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = Combined(Muon([net.up.weight], lr=0.1), NorMuon([net.down.weight], lr=0.1))
    before = [whole(p) for p in net.parameters()]
    if rank > 1:
        net(matrix(0, 8, 6)).square().mean().backward()
    optimizer.step()
    after = [whole(p) for p in net.parameters()]
    dist.barrier()
    return [a - b for a, b in zip(after, before, strict=True)]


def test_a_stage_that_is_all_frozen(tmp_path: Path) -> None:
    for rank, moved in enumerate(together(tmp_path, 4, frozen)):
        assert all(bool(x.any()) == (rank > 1) for x in moved)


# -------------------------------------------------------------------------------------------- exact bfloat16


def exact(rank: int, size: int) -> dict[str, Any]:
    """A model in bfloat16, and beside it one process that gets the same gradients."""
    signal.alarm(HANGS)
    found: dict[str, Any] = {}
    for name in ("adam", "normuon", "snoo"):
        net, alone = Net().bfloat16(), Net().bfloat16()
        fully_shard(net)
        optimizer, plain = kinds(net)[name](), kinds(alone)[name]()
        for step in range(STEPS):
            net(matrix(step, 8, 6).bfloat16()).square().mean().backward()
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                q.grad = None if p.grad is None else whole(p.grad)
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
        optimizer, plain = optimizer.members()[0], plain.members()[0]  # type: ignore[attr-defined]
        p, q = net.uneven.weight, alone.uneven.weight
        found[name] = whole(optimizer.master(p)), plain.master(q)
        found[f"{name} checksums"] = [checksum(p), checksum(whole(p))]
        with torch.no_grad():
            (p if name == "adam" else p.to_local()).fill_(2.0)  # type: ignore[attr-defined]
        found[f"{name} written"] = whole(optimizer.master(p))
        optimizer.set_master(p, optimizer.master(p) + 1e-6)
        found[f"{name} set"] = whole(optimizer.master(p))
    return found


def test_bfloat16_weights_are_exact_in_parts(tmp_path: Path) -> None:
    for found in together(tmp_path, 3, exact):
        for name in ("adam", "normuon", "snoo"):
            parts, alone = found[name]
            assert parts.dtype == torch.float32
            assert not torch.equal(parts, parts.bfloat16().float())
            torch.testing.assert_close(parts, alone, rtol=1e-5, atol=1e-6)
            assert len(set(found[f"{name} checksums"])) == 1, "the same for any number of ranks"
            assert found[f"{name} written"].eq(2.0).all(), "the mantissa belonged to what was there before"
            assert found[f"{name} set"].eq(torch.tensor(2.0) + 1e-6).all()


# ------------------------------------------------------------------------------------------------ arithmetic


def transformer(layers: int = 3, width: int = 64) -> list[Tensor]:
    """QKV, O, MLP up and down of each layer."""
    return [
        torch.ones(shape) for shape in [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    ] * layers


class Asking(TorchDispatchMode):
    """Fails when a value is read, for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def products(params: list[nn.Parameter]) -> int:
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = NorMuon(params)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    for work in group_by_mesh(optimizer._work()):
        spread = Spread(work, [1.0] * len(work))
        with Asking():
            spread.to_owners([w.grad for w in work])
            spread.to_all([optimizer._whole_shapes(w) for w in work])
    return int(counter.get_total_flops())


def flops(rank: int, size: int) -> list[int]:
    signal.alarm(HANGS)
    found = []
    for shape, placements in (((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])):
        mesh = init_device_mesh("cpu", shape)
        found.append(products([nn.Parameter(distribute_tensor(x, mesh, placements)) for x in transformer()]))
    return found


def test_each_rank_does_its_share_of_the_arithmetic(tmp_path: Path) -> None:
    """Of FSDP2's and HSDP's ranks alike; nothing is done twice, and no value is read on the way."""
    alone = products([nn.Parameter(x) for x in transformer()])
    for ranks in zip(*together(tmp_path, 4, flops), strict=True):
        assert sum(ranks) == alone
        assert max(ranks) < 0.3 * alone


def test_the_largest_is_dealt_first_to_whom_has_least() -> None:
    assert assign([1, 5, 3, 3], 2) == [0, 0, 1, 1]
    assert assign([1, 1], 4) == [0, 1]


@pytest.mark.parametrize(("size", "parts"), [(10, 4), (3, 4), (9, 8), (8, 4), (0, 2)])
def test_cut_as_torch_cuts(size: int, parts: int) -> None:
    sizes = [len(x) for x in torch.ones(size).chunk(parts)]
    assert chunk_sizes(size, parts) == sizes + [0] * (parts - len(sizes))
