"""Weights and gradients lie in the buckets' memory, whatever users of PyTorch do with them; buckets sit out steps."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from speedrun.optim import Adam, Interleaved, Muon, NorMuon
from speedrun.optim.sharded import Comm
from tests.distributed.ranks import together
from tests.distributed.test_interleave import Net, alone, backward, batch, digest, members

COUNTED = 7 * 8


def train(net: Any, optimizer: Any, steps: int, rank: int, size: int) -> None:
    for step in range(steps):
        backward(net, batch(step).tensor_split(size)[rank], COUNTED)
        optimizer.step()
        optimizer.zero_grad()


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def memory(rank: int, size: int) -> dict[str, Any]:
    net, before = Net(torch.bfloat16), Net(torch.bfloat16)
    optimizer = Interleaved(net, members(net), average="sum")
    named = dict(net.named_parameters())
    owned = [p for name, p in named.items() if name.startswith(("square", "up", "down"))]
    found: dict[str, Any] = {
        "same values": all(map(torch.equal, net.parameters(), before.parameters())),
        "owned buffers": len({storage(p) for p in owned}),
        "offsets": [p.storage_offset() * p.itemsize % 64 for p in owned],
        "addresses": [p.data_ptr() % 64 for p in owned],
    }
    for row in batch(0)[:2]:  # the first one accumulates
        with optimizer.no_sync():
            backward(net, row[None], COUNTED)
    fresh = named["up"].grad
    optimizer.agree()
    found["packed"] = named["up"].grad is not fresh and torch.equal(named["up"].grad, fresh)
    grads = {name: storage(p.grad) for name, p in named.items() if p.grad is not None}
    found["gradient buffers"] = len({grads[name] for name in grads if name.startswith(("square", "up", "down"))})
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    losses = [named[name].square().sum() for name in ("embed", "head", "up", "down", "square.0")]  # embed's rows divide
    backward(net, batch(1), COUNTED)
    found["stays"] = all(storage(named[name].grad) == place for name, place in grads.items())
    optimizer.step()
    sums = [
        t.nbytes
        for bucket in optimizer.buckets
        for key, t in vars(bucket).items()
        if key in ("full_grad", "local_grad")
    ]
    flat = {storage(p): p.untyped_storage().nbytes() for p in net.parameters()}
    planned = sum(bucket.plan.buffer_bytes() for bucket in optimizer.buckets if bucket.label != "unused")
    found["not foreseen"] = sum(sums) + sum(flat.values()) - sum(p.nbytes for p in net.parameters()) - planned
    for loss in losses:
        with optimizer.no_sync(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # autograd knows that weights have arrived
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_weights_and_gradients_are_views_of_flat_buffers(size: int, tmp_path: Path) -> None:
    for found in together(tmp_path, size, memory):
        assert found["same values"]
        assert found["owned buffers"] == found["gradient buffers"] == 2, "as many as there are buckets"
        assert set(found["offsets"]) == set(found["addresses"]) == {0}
        assert found["packed"]
        assert found["not foreseen"] == (2 * 24 * 4 if size == 3 else 0), "two rows of `unused`, which has no gradient"
        assert found["stays"], "the next backward pass accumulates in place"


class Counting(Comm):
    """A rank that counts what it launches."""

    counts: ClassVar[Counter[str]] = Counter()

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Any:
        self.counts["reduce"] += 1
        return super().reduce_scatter(out, whole)

    def all_gather(self, whole: Tensor, part: Tensor) -> Any:
        self.counts["gather"] += 1
        return super().all_gather(whole, part)


def sitting_out(rank: int, size: int, order: str) -> list[dict[str, int]]:
    net = Net()
    comm = Counting(None, rank, size)
    optimizer = Interleaved(net, members(net), order=order, average="sum", process_group=comm)
    found = []
    for step in range(4):
        if step == 2:
            optimizer.load_full_state_dict(optimizer.full_state_dict() if size == 1 else share(optimizer, comm))
        comm.counts.clear()
        if rank < 2:  # the third one has no rows
            backward(net, batch(step).tensor_split(min(2, size))[rank], COUNTED)
        optimizer.step()
        optimizer.zero_grad()
        found.append(dict(comm.counts))
    return found


def share(optimizer: Interleaved, comm: Comm) -> Any:
    return comm.all_gather_object(optimizer.full_state_dict())[0]


@pytest.mark.parametrize("order", ["sequential", "interleaved", "eager"])
def test_a_bucket_sits_out_what_would_change_nothing(order: str, tmp_path: Path) -> None:
    """Four of five sharded buckets have gradients; Adam, which has two of them, steps every second time."""
    for found in together(tmp_path, 3, sitting_out, order):
        assert found == [{"reduce": 4, "gather": 2}, {"reduce": 4, "gather": 4}] * 2


def replaced(rank: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    net = Net(dtype)
    optimizer = Interleaved(net, members(net), average="sum")
    train(net, optimizer, 2, rank, size)
    with torch.no_grad():
        for p in net.parameters():
            p.data = (p * 0.5).clone()
    assert net.up.untyped_storage().nbytes() == net.up.nbytes, "it has memory of its own again"
    with torch.no_grad():
        masters = [optimizer.master(p) for p in net.parameters()]
    train(net, optimizer, 2, rank, size)
    return masters, digest(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_were_replaced_are_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    first, *others = together(tmp_path, 2, replaced, dtype)
    for masters, weights in others:
        assert all(map(torch.equal, weights, first[1]))
        assert all(map(torch.equal, masters, first[0]))
    for master, weight in zip(*first, strict=True):
        assert weight.dtype == torch.float32 or torch.equal(master, master.bfloat16().float()), "no old mantissa"
        moved = (weight.float() - master.float()).abs().max()
        assert moved < 0.2
        assert moved > 0 or weight.shape == (70, 24), "the one without gradients"


def converted(rank: int, size: int) -> list[str]:
    net = Net()
    optimizer = Interleaved(net, members(net))
    backward(net, batch(0), COUNTED)
    before = digest(net)
    net.to(torch.float64)
    said = []
    for attempt in (optimizer.step, lambda: optimizer.master(net.embed)):
        with pytest.raises(ValueError, match="Change the model first") as e:
            attempt()
        said.append(str(e.value))
    assert all(torch.equal(a, b.float()) for a, b in zip(before, digest(net), strict=True))
    return said


def test_a_model_that_was_converted_is_refused_by_name(tmp_path: Path) -> None:
    for said in together(tmp_path, 2, converted):
        for sentence in said:
            assert sentence.startswith(
                "embed was (60, 24) of torch.float32 on cpu when Interleaved was made, and is (60,"
            )


class Odd(nn.Module):
    """Memory that is not in rows: a transposed matrix and table, a channels-last kernel, every other row; tied."""

    def __init__(self) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen) * 0.3

        self.embed = nn.Parameter(drawn(12, 40).T)
        self.head = self.embed
        self.turned = nn.Parameter(drawn(7, 12).T)
        self.sparse = nn.Parameter(drawn(20, 24)[::2, ::2])
        self.conv = nn.Conv2d(3, 5, 2)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed[ids] @ self.turned
        image = self.conv((x @ torch.ones(7, 12)).reshape(-1, 3, 2, 2).to(memory_format=torch.channels_last))
        y = image.flatten(1) @ torch.ones(5, 10) @ self.sparse
        return (self.embed[ids].reshape(-1, 12) + y) @ self.head.T


def odd_members(net: Odd) -> list[Any]:
    return [
        Muon([("turned", net.turned), ("sparse", net.sparse), ("conv", net.conv.weight)], lr=0.02),
        Adam([("embed", net.embed), ("bias", net.conv.bias)], lr=0.01, eps=1e-3),
    ]


def train_odd(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Odd()
    strides = {name: p.stride() for name, p in net.named_parameters()}
    optimizer = Interleaved(net, odd_members(net), average="sum", replicate_below=100)
    for step in range(3):
        ids = torch.randint(40, (6,), generator=torch.Generator().manual_seed(step)).tensor_split(size)[rank]
        if len(ids):
            net(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {name: p.stride() for name, p in net.named_parameters()}
    return {"weights": digest(net), "before": strides, "after": after}


def test_weights_that_do_not_lie_in_rows(tmp_path: Path) -> None:
    one = together(tmp_path, 1, train_odd)[0]
    for found in together(tmp_path, 3, train_odd):
        torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-4, atol=1e-5)
        for name in ("turned", "conv.weight"):
            assert found["after"][name] == found["before"][name], "the order in memory that products were chosen for"


def copied_and_loaded(rank: int, size: int) -> list[Tensor]:
    net, other = Net(), Net()
    optimizer = Interleaved(net, members(net), average="sum")
    train(net, optimizer, 2, rank, size)
    twin = copy.deepcopy(net)
    assert storage(twin.up) != storage(net.up)
    assert all(map(torch.equal, twin.parameters(), net.parameters()))
    optimizer.reset()
    net.load_state_dict(other.state_dict())
    train(net, optimizer, 6, rank, size)
    assert not torch.equal(twin.up, net.up)
    return digest(net)


def test_a_model_is_copied_and_loaded_as_ever(tmp_path: Path) -> None:
    first, second = together(tmp_path, 2, copied_and_loaded)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, alone(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------ optimizers of other packages


class Three(nn.Module):
    """A matrix for NorMuon, a table for Adam, and the rest, of two dtypes, for somebody else."""

    def __init__(self) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(40, 32, generator=gen))
        self.up = nn.Parameter(torch.randn(48, 32, generator=gen) * 0.2)
        self.down = nn.Parameter(torch.randn(32, 48, generator=gen) * 0.2)
        self.head = nn.Parameter(torch.randn(40, 32, generator=gen).double() * 0.2)
        self.bias, self.unused = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed[ids]
        x = x + (x @ self.up.T).relu() @ self.down.T
        return (x.double() @ self.head.T).float() + self.bias


def foreign(kind: str, net: Three) -> list[Any]:
    rest = [("head", net.head), ("bias", net.bias), ("unused", net.unused)]
    theirs = {
        "adamw": lambda: torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(rest, lr=0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.05}], lr=0.1),
    }[kind]()
    return [NorMuon([("up", net.up), ("down", net.down)], lr=0.02), theirs, Adam([("embed", net.embed)], lr=0.01)]


def step_on(net: Three, ids: Tensor) -> None:
    if len(ids):
        (nn.functional.cross_entropy(net(ids[:, :-1].flatten()), ids[:, 1:].flatten(), reduction="sum") / 40).backward()


def train_foreign(rank: int, size: int, kind: str, saved: Any, steps: int) -> dict[str, Any]:
    net = Three()
    optimizers = foreign(kind, net)
    optimizer = Interleaved(net, optimizers, average="sum", replicate_below=10)
    done = 0
    if saved is not None:
        done = saved["done"]
        net.load_state_dict(dict(zip(net.state_dict(), saved["weights"], strict=True)))
        optimizer.load_full_state_dict(saved["state"])
    hooked: list[int] = []
    optimizers[1].register_step_post_hook(lambda *_: hooked.append(1))
    norms = []
    for step in range(done, done + steps):
        ids = torch.randint(40, (5, 9), generator=torch.Generator().manual_seed(step)).tensor_split(size)[rank]
        step_on(net, ids)
        before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        norms.append(float(optimizer.clip_grad_norm_(0.2)))
        optimizer.step()
        assert all(map(torch.equal, before, [p.grad for p in net.parameters() if p.grad is not None]))
        optimizer.zero_grad()
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(own)
    return {
        "weights": digest(net), "norms": norms, "state": optimizer.full_state_dict(), "done": done + steps,
        "hooked": len(hooked), "plan": {plan.label: plan.kind for plan in optimizer.plan},
    }  # fmt: skip


def without_us(kind: str, steps: int) -> dict[str, Any]:
    net = Three()
    optimizers = foreign(kind, net)
    norms = []
    for step in range(steps):
        step_on(net, torch.randint(40, (5, 9), generator=torch.Generator().manual_seed(step)))
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.2)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": digest(net), "norms": norms, "theirs": optimizers[1].state[net.head]}


@pytest.mark.parametrize(("kind", "size"), [("adamw", 1), ("adamw", 2), ("adamw", 3), ("sgd", 3), ("adagrad", 2)])
def test_any_optimizer_of_torch_trains_what_it_would_alone(kind: str, size: int, tmp_path: Path) -> None:
    expected = without_us(kind, 5)
    first, *others = together(tmp_path, size, train_foreign, kind, None, 5)
    torch.testing.assert_close(first["weights"], expected["weights"], rtol=1e-4, atol=1e-5)
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert first["hooked"] == 5, "it steps once, whatever the dtypes"
    label = {"adamw": "AdamW 0", "sgd": "SGD 0", "adagrad": "Adagrad 0"}[kind]
    assert first["plan"] == {"embed": "rows", label: "replicated", "matrices 0": "owned", "matrices 1": "owned"}
    torch.testing.assert_close(dict(first["state"]["head"]), dict(expected["theirs"]), rtol=1e-4, atol=1e-5)
    for other in others:
        assert all(map(torch.equal, other["weights"], first["weights"]))


@pytest.mark.parametrize(("kind", "size"), [("adamw", 1), ("sgd", 3)])
def test_the_state_of_other_packages_goes_to_another_number_of_ranks(kind: str, size: int, tmp_path: Path) -> None:
    early = together(tmp_path, size, train_foreign, kind, None, 3)[0]
    late = together(tmp_path, 4 - size, train_foreign, kind, early, 2)[0]
    torch.testing.assert_close(late["weights"], without_us(kind, 5)["weights"], rtol=1e-4, atol=1e-5)


def bad_foreign(rank: int, size: int) -> tuple[str, bool]:
    net = Three()
    optimizer = Interleaved(net, foreign("sgd", net))
    step_on(net, torch.arange(9)[None])
    if rank == 1:
        net.bias.grad[2] = float("inf")
    before = digest(net)
    with pytest.raises(ValueError, match="not finite") as e:
        optimizer.step()
    return str(e.value), all(map(torch.equal, before, digest(net)))


def test_a_gradient_that_is_not_finite_stops_other_packages_too(tmp_path: Path) -> None:
    for said, unchanged in together(tmp_path, 2, bad_foreign):
        assert said.startswith("The gradient of bias is not finite (NaN or infinite) on rank 1")
        assert unchanged
