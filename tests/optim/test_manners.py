"""What every user of torch.optim expects, for every optimizer of the package."""

import copy
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo, base, route
from tests.distributed.ranks import together
from tests.optim.test_muon import give, parameters


class Net(nn.Module):
    """Small, with something for everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(self.up(x).relu()))


def build(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if p.ndim == 2]
    plan = route(model)
    combined = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.01, every=2))
    return {
        "muon": lambda: Muon(matrices, lr=0.02, weight_decay=0.1),
        "normuon": lambda: NorMuon(matrices, lr=0.02, update_ema=0.1),
        "adam": lambda: Adam(named, lr=0.01, weight_decay=0.1, decay="cautious"),
        "combined": lambda: combined,
        "snoo": lambda: Snoo(combined, k=2),
    }[kind]()


KINDS = ["muon", "normuon", "adam", "combined", "snoo"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def fresh(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("cls", [Muon, NorMuon, Adam, Combined, Snoo])
def test_methods_look_like_torchs(cls) -> None:
    for name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        ours, theirs = (inspect.signature(getattr(c, name)).parameters for c in (cls, torch.optim.Optimizer))
        assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()], name
        if name != "step":  # torch's base class has overloads there
            assert [p.default for p in ours.values()] == [p.default for p in theirs.values()], name


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind) -> None:
    model = fresh()
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    loss = lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())  # noqa: E731
    first = loss().item()
    optimizer = build(kind, model)
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.7 * first


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_called_once_with_gradients_enabled(kind) -> None:
    model = fresh()
    optimizer = build(kind, model)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.arange(5)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [True]
    assert isinstance(loss, torch.Tensor)
    assert loss.item() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_reach_every_group(kind) -> None:
    model = fresh()
    optimizer = build(kind, model)
    start = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr / 8 for lr in start])
    parts = getattr(getattr(optimizer, "optimizer", optimizer), "optimizers", [optimizer])
    assert [g["lr"] for part in parts for g in part.param_groups] == pytest.approx([lr / 8 for lr in start])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [3, 4])
def test_a_saved_state_continues_bit_for_bit(kind, after, tmp_path: Path) -> None:
    straight = fresh()
    optimizer = build(kind, straight)
    train(straight, optimizer, range(after))
    torch.save({"model": straight.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    train(straight, optimizer, range(after, 8))

    resumed = fresh(1)
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    other = build(kind, resumed)
    other.load_state_dict(saved["optim"])
    train(resumed, other, range(after, 8))
    assert same(straight, resumed)


def test_a_saved_state_continues_in_another_process(tmp_path: Path) -> None:
    model = fresh()
    optimizer = build("snoo", model)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    train(model, optimizer, range(3, 6))
    script = (
        "import sys, torch\n"
        "from tests.optim.test_manners import build, fresh, train\n"
        "torch.set_num_threads(1)\n"
        "saved = torch.load(sys.argv[1] + '/x.pt', weights_only=True)\n"
        "model = fresh(5); model.load_state_dict(saved['model'])\n"
        "optimizer = build('snoo', model); optimizer.load_state_dict(saved['optim'])\n"
        "train(model, optimizer, range(3, 6)); torch.save(model.state_dict(), sys.argv[1] + '/y.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    other = fresh(2)
    other.load_state_dict(torch.load(tmp_path / "y.pt", weights_only=True))
    assert same(model, other)


def test_groups_and_parameters_in_another_order_are_matched_by_name() -> None:
    def optimizer_of(model: Net, reverse: bool) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        groups = [
            {"params": [(n, named[n]) for n in ("up.weight", "down.weight")], "lr_mul": [1.0, 3.0]},
            {"params": [(n, named[n]) for n in ("head.weight", "embed.weight")], "lr": 0.01},
        ]
        if reverse:
            groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]  # type: ignore[index]
            groups[1]["lr_mul"] = [3.0, 1.0]
        return NorMuon(groups, lr=0.02)

    straight = fresh()
    a = optimizer_of(straight, reverse=False)
    train(straight, a, range(3))
    resumed = copy.deepcopy(straight)
    b = optimizer_of(resumed, reverse=True)
    b.load_state_dict(a.state_dict())
    assert b.param_groups[0]["param_names"] == ["embed.weight", "head.weight"]
    assert b.param_groups[1]["lr_mul"] == [3.0, 1.0]
    train(straight, a, range(3, 6))
    train(resumed, b, range(3, 6))
    assert same(straight, resumed)


def test_dtypes_of_the_state_survive_loading() -> None:
    p = nn.Parameter(torch.randn(4, 4).bfloat16())
    for build_one in (lambda: Muon([p]), lambda: NorMuon([p]), lambda: Adam([p])):
        a = build_one()
        give([p], 0)
        a.step()
        b = build_one()
        b.load_state_dict(a.state_dict())
        dtypes = {k: v.dtype for k, v in a.state[p].items() if torch.is_tensor(v)}
        assert {k: v.dtype for k, v in b.state[p].items() if torch.is_tensor(v)} == dtypes
        assert torch.int16 in dtypes.values()
        assert torch.float32 in dtypes.values()


def test_loading_copies_so_that_two_optimizers_do_not_share_state() -> None:
    a_params, b_params = parameters([(4, 4)]), parameters([(4, 4)])
    a, b = Muon(a_params), Muon(b_params)
    give(a_params, 0)
    a.step()
    b.load_state_dict(a.state_dict())
    kept = b.state[b_params[0]]["momentum_buffer"].clone()
    give(a_params, 1)
    a.step()
    assert torch.equal(b.state[b_params[0]]["momentum_buffer"], kept)


@pytest.mark.parametrize("cls", [Muon, NorMuon, Adam])
def test_a_group_can_be_added_mid_training(cls) -> None:
    one, two = parameters([(8, 8), (8, 8)])
    optimizer = cls([one], lr=0.02)
    give([one], 0)
    optimizer.step()
    optimizer.add_param_group({"params": [two], "lr": 0.5})
    before = two.detach().clone()
    give([one, two], 1)
    optimizer.step()
    assert not torch.equal(two, before)
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({"params": parameters([(2, 2)]), "lr": -1})
    assert len(optimizer.param_groups) == 2, "a refused group leaves no trace"


@pytest.mark.parametrize("cls", [Muon, NorMuon, Adam])
def test_a_parameter_without_gradient_is_left_alone(cls) -> None:
    used, unused = parameters([(8, 8), (8, 8)])
    optimizer = cls([used, unused], lr=0.02, weight_decay=0.5)
    before = unused.detach().clone()
    for step in range(2):
        give([used], step)
        optimizer.step()
    assert torch.equal(unused, before)
    assert unused not in optimizer.state
    give([used, unused], 2)
    unused_only = unused.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.equal(unused, before)
    assert torch.equal(unused.grad, unused_only)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_left_as_they_are(kind) -> None:
    model = fresh()
    optimizer = build(kind, model)
    model(torch.arange(5)).square().mean().backward()
    kept = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for now, then in kept:
        assert torch.equal(now, then)
    assert all(p.grad is now for p, (now, _) in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(kind, poison) -> None:
    model = fresh()
    optimizer = build(kind, model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    model(torch.arange(5)).square().mean().backward()
    model.head.weight.grad[1, 2] = poison  # type: ignore[index]
    with pytest.raises(ValueError, match=r"The gradient of head\.weight is not finite .* no weight was changed"):
        optimizer.step()
    assert same(model, before)
    after = optimizer.state_dict()
    for i, values in state["state"].items():
        for key, value in values.items():
            assert not torch.is_tensor(value) or torch.equal(value, after["state"][i][key]), key
    train(model, optimizer, range(2, 4))  # and training can go on


def test_large_finite_gradients_are_fine() -> None:
    """Their sum overflows; that is no reason to refuse them."""
    params = parameters([(8, 8)])
    params[0].grad = torch.full((8, 8), 3e38) * torch.eye(8).add(0.01).clamp(max=1)
    Muon(params).step()
    assert params[0].isfinite().all()


@pytest.mark.parametrize("cls", [Muon, NorMuon, Adam])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "decay": "cautious"}])
@pytest.mark.parametrize("good", [3, 0])
def test_the_masked_step_of_a_gpu_changes_nothing_and_tells_at_the_next(cls, options, good, monkeypatch) -> None:
    """A GPU is not asked at once. The masked path runs on any device, so its arithmetic is checked here."""
    params, plain = parameters([(8, 8), (4, 8)]), parameters([(8, 8), (4, 8)])
    masked, normal = cls(params, lr=0.02, **options), cls(plain, lr=0.02, **options)

    monkeypatch.setattr(base, "is_synchronous", lambda work: all(w.param is not params[0] for w in work))
    for step in range(good):
        give(params, step)
        give(plain, step)
        masked.step()
        normal.step()
        for p, q in zip(params, plain, strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    before = copy.deepcopy(masked.state_dict()), [p.detach().clone() for p in params]
    give(params, 3)
    params[1].grad[0, 0] = float("nan")  # type: ignore[index]
    masked.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))
    for i, values in before[0]["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(masked.state_dict()["state"][i][key], value, atol=0, rtol=0)
    give(params, 4)
    with pytest.raises(ValueError, match="A gradient of the previous step was not finite"):
        masked.step()


@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("options", [{}, {"every": 2}])
def test_after_a_masked_step_training_goes_on_as_if_it_had_not_been(options, bad, monkeypatch) -> None:
    params, plain = parameters([(8, 8)]), parameters([(8, 8)])
    masked, normal = Adam(params, lr=0.02, **options), Adam(plain, lr=0.02, **options)
    monkeypatch.setattr(base, "is_synchronous", lambda work: all(w.param is not params[0] for w in work))
    for step in range(5):
        if step == bad:
            params[0].grad = torch.full((8, 8), torch.nan)
            masked.step()
            with pytest.raises(ValueError, match="A gradient of the previous step was not finite"):
                masked.step()
        give(params, step)
        give(plain, step)
        masked.step()
        normal.step()
        torch.testing.assert_close(params[0], plain[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cls", [Muon, Adam])
def test_sparse_gradients_are_refused_by_name(cls) -> None:
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = cls([("table", p)])
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match="The gradient of table is sparse"):
        optimizer.step()


def test_the_step_may_be_called_from_compiled_code_without_recompiling() -> None:
    params = parameters([(8, 8)])
    optimizer = NorMuon(params, lr=0.02)
    step = torch.compile(optimizer.step)
    other = parameters([(8, 8)])
    plain = NorMuon(other, lr=0.02)
    for k in range(4):
        for o in (optimizer, plain):
            o.param_groups[0]["lr"] = 0.02 / (k + 1)
        give(params, k)
        give(other, k)
        if k == 2:  # a changed learning rate must not compile again
            torch.compiler.set_stance("fail_on_recompile")
        try:
            step()
        finally:
            if k == 3:
                torch.compiler.set_stance("default")
        plain.step()
    assert torch.equal(params[0], other[0])


def test_a_tensor_as_learning_rate() -> None:
    a, b = parameters([(8, 8)]), parameters([(8, 8)])
    for cls in (NorMuon, Adam):
        give(a, 0)
        give(b, 0)
        cls(a, lr=torch.tensor(0.25)).step()
        cls(b, lr=0.25).step()
    assert torch.equal(a[0], b[0])


def test_reset_is_a_new_start() -> None:
    for kind in KINDS:
        once, twice = fresh(), fresh()
        a, b = build(kind, once), build(kind, twice)
        train(twice, b, range(3))
        twice.load_state_dict(once.state_dict())
        b.reset()  # type: ignore[attr-defined]
        train(once, a, range(5))
        train(twice, b, range(5))
        assert same(once, twice), kind


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda s: s["param_groups"][0]["params"].pop(), "groups of [1] parameters, this Muon has [2]"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(2)), "of another optimizer: Muon knows no 'exp_avg'"),
        (
            lambda s: s["state"][0].update(momentum_buffer=torch.zeros(3, 3)),
            "The state 'momentum_buffer' of parameter 0 of group 0 (8, 8) has shape (3, 3), but",
        ),
        (lambda s: s["param_groups"][0].pop("method"), "not made by Muon: its group lacks method"),
        (lambda s: s.pop("state"), "it needs `state` and `param_groups`"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(spoil, sentence) -> None:
    params = parameters([(8, 8), (4, 4)])
    optimizer = Muon(params)
    give(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    kept = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=re.escape(sentence)):
        optimizer.load_state_dict(saved)
    for i, values in kept["state"].items():
        assert torch.equal(optimizer.state_dict()["state"][i]["momentum_buffer"], values["momentum_buffer"])


def test_names_that_do_not_fit_are_named() -> None:
    a, b = parameters([(8, 8)]), parameters([(8, 8)])
    one, two = Muon([("a.weight", a[0])]), Muon([("b.weight", b[0])])
    with pytest.raises(ValueError, match=r"does not fit this Muon: it lacks b\.weight"):
        two.load_state_dict(one.state_dict())


def trained_under_ddp(rank: int, size: int) -> dict[str, torch.Tensor]:
    model = fresh()
    ddp = DistributedDataParallel(model)
    optimizer = build("snoo", model)
    for step in range(4):
        ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        optimizer.zero_grad()
        F.cross_entropy(ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return model.state_dict()


def test_it_works_under_ddp(tmp_path: Path) -> None:
    """Two processes with half of the rows each equal one process with all of them."""
    states = together(tmp_path, 2, trained_under_ddp)
    alone = fresh()
    train(alone, build("snoo", alone), range(4))
    for state in states:
        for name, p in alone.named_parameters():
            torch.testing.assert_close(p.detach(), state[name], atol=2e-4, rtol=1e-3)
