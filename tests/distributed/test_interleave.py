"""The sharded step: any number of ranks trains what one process would, in any order of operations."""

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from speedrun.optim import Adam, Combined, Interleaved, Muon, NorMuon, Snoo
from speedrun.optim.sharded import Comm
from speedrun.optim.sharded.order import OPS, eager, interleaved, sequential
from speedrun.optim.sharded.plan import param_refs, plan_buckets, state_bytes
from speedrun.training.trace import spans
from tests.distributed.ranks import together

STEPS = 6


class Net(nn.Module):
    """Tables of rows that divide and that do not, matrices of three shapes, vectors, and a part without gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=gen) * 0.3)

        self.embed, self.head = drawn(60, 24), drawn(61, 24)
        self.square = nn.ParameterList([nn.Parameter(drawn(24, 24).data.to(dtype)) for _ in range(3)])
        self.up, self.down = nn.Parameter(drawn(40, 24).data.to(dtype)), nn.Parameter(drawn(24, 40).data.to(dtype))
        self.scale, self.bias, self.unused = drawn(24), drawn(61), drawn(70, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed[ids] * self.scale
        for square in self.square:
            x = x + F.relu(x @ square.float().T)
        x = x + F.relu(x @ self.up.float().T) @ self.down.float().T
        return F.rms_norm(x, (24,)) @ self.head.T + self.bias


def members(net: Net) -> list[Any]:
    matrices = [(n, p) for n, p in net.named_parameters() if n.startswith(("square", "up", "down"))]
    rest = [(n, p) for n, p in net.named_parameters() if not n.startswith(("square", "up", "down"))]
    return [
        NorMuon([{"params": matrices, "lr_mul": [1.0, 2.0, 1.0, 1.0, 0.5]}], lr=0.02, weight_decay=0.1, update_ema=0.2),
        Adam([{"params": rest[:1], "betas": (0.5, 0.9)}, {"params": rest[1:]}], lr=0.01, eps=1e-3, every=2,
             weight_decay=0.01, decay="cautious"),
    ]  # fmt: skip


def batch(step: int) -> Tensor:
    return torch.randint(60, (7, 9), generator=torch.Generator().manual_seed(step))


def backward(net: Net, rows: Tensor, counted: int) -> None:
    logits = net(rows[:, :-1]).flatten(0, 1)
    (F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum") / counted).backward()


def digest(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def alone(dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[Tensor]:
    net = Net(dtype)
    optimizer = Combined(*members(net))
    for step in range(steps):
        backward(net, batch(step), 7 * 8)
        optimizer.step()
        optimizer.zero_grad()
    return digest(net)


def train(rank: int, size: int, order: str, dtype: torch.dtype, snoo: bool = False) -> dict[str, Any]:
    net = Net(dtype)
    if rank:
        with torch.no_grad():
            net.embed.zero_()  # the constructor makes everybody equal to rank 0
    optimizer: Any = Interleaved(net, members(net), order=order, average="sum")  # type: ignore[arg-type]
    inner, after = optimizer, []
    if snoo:
        optimizer = Snoo(optimizer, k=2)
    for step in range(STEPS):
        mine = batch(step).tensor_split(size)[rank]
        for row in mine[:-1]:
            with inner.no_sync():
                backward(net, row[None], 7 * 8)
        with profile(activities=[ProfilerActivity.CPU]) if step == STEPS - 1 else nullcontext() as profiled:
            if len(mine):
                backward(net, mine[-1:], 7 * 8)
            optimizer.step()
        optimizer.zero_grad()
        after.append(digest(net))
    real = sum(t.nbytes for m in inner.optimizers for s in m.state.values() for t in s.values() if torch.is_tensor(t))
    return {"after": after, "trace": spans(profiled), "bytes": real, "layout": layout(inner)}


def layout(optimizer: Interleaved) -> dict[str, list[str]]:
    return {f"{b.plan.kind} {b.label}": [slot.ref.name for slot, _ in b.locals] for b in optimizer.buckets}


@pytest.mark.parametrize(
    ("size", "order"), [(1, "interleaved"), (2, "interleaved"), (3, "sequential"), (4, "eager"), (5, "interleaved")]
)
def test_any_number_of_ranks_trains_what_one_process_would(size: int, order: str, tmp_path: Path) -> None:
    expected = alone()
    found = together(tmp_path, size, train, order, torch.float32)
    for a, b in zip(found[0]["after"][-1], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # a sign that flips lets decay act or not: lr * 0.01
    for step in range(STEPS):
        for other in found[1:]:
            assert all(map(torch.equal, other["after"][step], found[0]["after"][step])), f"equal bits after step {step}"


def clip(rank: int, size: int, average: str, limit: float) -> tuple[list[float], list[Tensor]]:
    net = Net()
    optimizer = Interleaved(net, members(net), average=average)  # type: ignore[arg-type]
    norms = []
    for step in range(2):  # Adam steps in the second one
        backward(net, batch(step).tensor_split(size)[rank], 7 * 8)
        before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        norms.append(float(optimizer.clip_grad_norm_(limit)))
        after = [p.grad for p in net.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after)), "only what `step` uses is scaled"
        optimizer.step()
        optimizer.zero_grad()
    return norms, digest(net)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("average", "limit"), [("sum", 0.1), ("mean", 0.1), ("sum", 100.0)])
def test_clipping_is_torch_s_own_over_all_ranks(size: int, average: str, limit: float, tmp_path: Path) -> None:
    net = Net()
    optimizer = Combined(*members(net))
    norms = []
    for step in range(2):
        backward(net, batch(step), 7 * 8 * (size if average == "mean" else 1))
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in together(tmp_path, size, clip, average, limit):
        assert found == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(weights, digest(net), rtol=1e-4, atol=1e-4)


def test_clipping_to_nothing_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"max_norm is 0.0; it must be positive"):
        Interleaved(net, members(net)).clip_grad_norm_(0.0)


def test_bf16_weights_are_exact_underneath_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Gradients of bf16 weights are bf16 and so are their sums over ranks: that alone may differ."""
    expected = alone(torch.bfloat16)
    found = together(tmp_path, 2, train, "interleaved", torch.bfloat16)
    assert all(map(torch.equal, found[0]["after"][-1], found[1]["after"][-1]))
    for a, b in zip(found[0]["after"][-1], expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.03)


def test_snoo_goes_around_it(tmp_path: Path) -> None:
    net = Net(torch.bfloat16)
    optimizer = Snoo(Combined(*members(net)), k=2)
    for step in range(STEPS):
        backward(net, batch(step), 7 * 8)
        optimizer.step()
        optimizer.zero_grad()
    found = together(tmp_path, 3, train, "interleaved", torch.bfloat16, True)
    assert all(map(torch.equal, found[0]["after"][-1], found[2]["after"][-1]))
    for a, b in zip(found[0]["after"][-1], digest(net), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.03)


def test_state_exists_once_over_all_ranks(tmp_path: Path) -> None:
    """Every matrix has one owner, every row too; only small tensors are everywhere."""
    whole = together(tmp_path, 1, train, "interleaved", torch.float32)[0]["bytes"]
    found = together(tmp_path, 4, train, "interleaved", torch.float32)
    small = 4 * (24 + 61) * 3 + 16  # two moments, and the sum of gradients that wait
    assert sum(f["bytes"] for f in found) == pytest.approx(whole + 3 * small, rel=0.01)
    owned = [name for f in found for label, names in f["layout"].items() if label.startswith("owned") for name in names]
    assert sorted(owned) == ["down", "square.0", "square.1", "square.2", "up"]
    assert max(f["bytes"] for f in found) < 0.45 * whole


@pytest.mark.parametrize("size", [2, 4])
def test_the_step_follows_its_table(size: int, tmp_path: Path) -> None:
    """Waits and launches of a real step, in the order that hides them: see `interleaved`."""
    first, *_ = together(tmp_path, size, train, "interleaved", torch.float32)
    events = [(s.kind, s.op, s.item) for s in first["trace"] if s.kind != "wait" or s.op == "finish"]
    launched = [item for kind, op, item in events if (kind, op) == ("launch", "reduce")]
    assert launched[-2:] == ["matrices 0", "matrices 1"], "tables began in the backward pass"
    assert "agreement" in launched[:-2]
    after = [(op, item) for kind, op, item in events if op not in ("reduce", "check")]
    assert after == [  # `unused`, the last table, sits out; small tensors are nobody's alone, so they do not arrive
        ("update", "small 0"), ("gather", "small 0"),
        ("update", "embed"), ("gather", "embed"), ("update", "head"), ("gather", "head"),
        ("update", "matrices 0"), ("gather", "matrices 0"), ("update", "matrices 1"), ("gather", "matrices 1"),
        ("finish", "matrices 0"), ("finish", "embed"), ("finish", "head"), ("finish", "matrices 1"),
    ]  # fmt: skip
    assert all(a.end <= b.start for a, b in zip(first["trace"], first["trace"][1:], strict=False))


def save_and_load(rank: int, size: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    net = Net(torch.bfloat16)
    optimizer = Interleaved(net, members(net), average="sum")
    if saved is not None:
        with torch.no_grad():
            for p, value in zip(net.parameters(), saved["weights"], strict=True):
                p.copy_(value)
        optimizer.load_full_state_dict(saved["state"])
    else:
        for step in range(3):  # an odd number: gradients are waiting for Adam's next turn
            for row in batch(step).tensor_split(size)[rank]:
                with optimizer.no_sync():
                    backward(net, row[None], 7 * 8)
            optimizer.step()
            optimizer.zero_grad()
    state = optimizer.full_state_dict()
    masters = [optimizer.master(p) for p in net.parameters()]
    return {"weights": digest(net), "state": state, "masters": masters}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_four_ranks_saved_any_number_loads(size: int, tmp_path: Path) -> None:
    four = together(tmp_path, 4, save_and_load, None)[0]
    again = together(tmp_path, size, save_and_load, four)
    assert four["state"].keys() == again[0]["state"].keys() == dict(Net().named_parameters()).keys() - {"unused"}
    for name, state in four["state"].items():
        assert state.keys() == again[0]["state"][name].keys()
        for key, value in state.items():
            other = again[0]["state"][name][key]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other, f"{name} {key}"
    for rank in again:
        assert all(map(torch.equal, rank["masters"], four["masters"])), "the exact weights, on every rank"


def one_bad_gradient(rank: int, size: int) -> list[Any]:
    net = Net()
    optimizer = Interleaved(net, members(net))
    found: list[Any] = []
    backward(net, batch(0), 56)
    if rank == 1:
        assert net.up.grad is not None
        net.up.grad[3, 4] = float("nan")
    before = digest(net)
    try:
        optimizer.step()
    except ValueError as e:
        found.append(str(e))
    found.append(all(map(torch.equal, before, digest(net))))
    optimizer.zero_grad()
    backward(net, batch(0), 56)  # the next step is a normal one
    optimizer.step()
    found.append(not any(map(torch.equal, before[2:4], (net.up, net.down))))
    return found


def test_a_bad_gradient_on_one_rank_stops_all_before_any_weight_changes(tmp_path: Path) -> None:
    for sentence, unchanged, goes_on in together(tmp_path, 3, one_bad_gradient):
        assert sentence.startswith(
            "The gradient of up is not finite (NaN or infinite) on rank 1; no weight was changed"
        )
        assert unchanged
        assert goes_on


def gradients_on_some_ranks(rank: int, size: int) -> list[Tensor]:
    net = Net()
    optimizer = Interleaved(net, members(net), average="sum")
    if rank == 1:
        backward(net, batch(0), 56)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # and nobody has one: nothing happens
    assert torch.equal(net.unused, Net().unused), "what has no gradient anywhere is left alone"
    return digest(net)


def test_ranks_without_gradients_take_part_without_a_hang(tmp_path: Path) -> None:
    first, second, third = together(tmp_path, 3, gradients_on_some_ranks)
    expected = alone(steps=1)
    for a, b, c, e in zip(first, second, third, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def forgotten_no_sync(rank: int, size: int) -> str:
    net = Net()
    optimizer = Interleaved(net, members(net))
    backward(net, batch(0), 56)
    optimizer.step()  # from now on it is known that `unused` need not be waited for
    optimizer.zero_grad()
    backward(net, batch(0), 56)
    try:
        backward(net, batch(1), 56)
    except RuntimeError as e:
        return str(e)
    return "nothing was said"


def test_a_second_backward_pass_without_no_sync_is_refused(tmp_path: Path) -> None:
    for said in together(tmp_path, 2, forgotten_no_sync):
        assert "arrived after its reduction had begun" in said
        assert "no_sync()" in said


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_short_model_is_dealt_out_evenly(ranks: int) -> None:
    """Bytes of state per rank within a tenth of the total over the ranks, at native size, on meta tensors."""
    from speedrun.model.gpt import GPT
    from speedrun.recipes import get_recipe
    from speedrun.training.optimizers import build_optimizer

    recipe = get_recipe("interleaved", "short")
    with torch.device("meta"):
        model = GPT(recipe.model, 16)
        model.store_matrices(torch.bfloat16)
    whole = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    plans = plan_buckets(param_refs(whole.members(), {}), ranks)
    per_rank = [sum(state_bytes(plans, rank).values()) for rank in range(ranks)]
    total = sum(whole.state_bytes().values())
    assert max(per_rank) < 1.1 * total / ranks
    assert min(per_rank) > 0.9 * total / ranks


def test_orders_are_tables_and_checked() -> None:
    net = Net()
    optimizer = Interleaved(net, members(net))
    assert Counter(plan.kind for plan in optimizer.plan) == {"rows": 3, "replicated": 1, "owned": 2}
    for order in (sequential(optimizer.plan), interleaved(optimizer.plan), eager(optimizer.plan)):
        for plan in optimizer.plan:
            assert [op for op, label in order if label == plan.label] == list(OPS)
    own = sequential(optimizer.plan)
    assert Interleaved(net, members(net), order=own).order == own
    with pytest.raises(ValueError, match=r"for 'embed'; it must have \['reduce', 'update', 'gather', 'finish'\]"):
        Interleaved(net, members(net), order=[(op, label) for op, label in own if (op, label) != ("gather", "embed")])
    with pytest.raises(ValueError, match="The order names 'nobody'"):
        Interleaved(net, members(net), order=[*own, ("reduce", "nobody")])


def shared_memory(net: Net) -> Net:
    net.register_buffer("window", net.embed.data[3:5])
    return net


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda net: Interleaved(net, []), "got no optimizers"),
        (lambda net: Interleaved(net, members(net)[:1]), "No optimizer has embed"),
        (lambda net: Interleaved(net, [Combined(*members(net))]), "cannot shard Combined; pass the optimizers in it"),
        (lambda net: Interleaved(net, list(net.parameters())), "got a Parameter; pass Muon, NorMuon, Adam, or any"),
        (
            lambda net: Interleaved(shared_memory(net), members(net), process_group=Comm(None, 0, 2)),
            "embed and window are two tensors in the same memory",
        ),
        (
            lambda net: Interleaved(net, members(net), order="random"),
            "order is 'random'; it must be one of: sequential",
        ),
        (lambda net: Interleaved(net, members(net), average="median"), "average is 'median'"),
        (lambda net: Interleaved(net, members(net), buckets=0), "buckets is 0"),
        (lambda net: Interleaved(net, [*members(net), Muon([net.up])]), "up is in two groups"),
    ],
)
def test_bad_input_is_refused_by_name(build: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(Net())


THREADS = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from speedrun.optim import Adam, Interleaved

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
net = nn.Linear(8, 8)
optimizer = Interleaved(net, [Adam(net.named_parameters())])
net(torch.ones(2, 8)).sum().backward()
optimizer.step()
dist.destroy_process_group()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print([name for name in names if "gloo" in name])
"""


def test_no_thread_of_gloo_outlives_its_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", THREADS, str(tmp_path / "meet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def ended_group(rank: int, size: int) -> bool:
    net = nn.Linear(8, 8)
    optimizer = Interleaved(net, [Adam(net.named_parameters())])
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    dist.barrier()
    dist.destroy_process_group(optimizer.comm.small_group())
    return optimizer.comm.small_group() is None


def test_the_group_of_small_messages_ends_when_it_is_destroyed(tmp_path: Path) -> None:
    """Its threads would end the process with an abort, had the optimizer kept it alive."""
    assert together(tmp_path, 2, ended_group) == [True, True]
