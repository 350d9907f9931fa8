"""Saving, loading, hooks and copies, as PyTorch's own tests ask for them, for every optimizer of the package."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR

from speedrun.optim import Adam, Combined, Interleaved, Muon, NorMuon, Snoo
from tests.optim.test_muon import give, parameters


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def split(net: nn.Module, *, named: bool = True) -> tuple[list[Any], list[Any]]:
    found = list(net.named_parameters())
    return tuple([(n, p) if named else p for n, p in found if (p.ndim > 1) is matrix] for matrix in (True, False))  # type: ignore[return-value]


BUILD: dict[str, Callable[[Any, Any], Any]] = {
    "adam": lambda matrices, vectors: Adam([*matrices, *vectors], every=2),
    "muon": lambda matrices, vectors: Muon(matrices),
    "normuon": lambda matrices, vectors: NorMuon(matrices),
    "combined": lambda matrices, vectors: Combined(NorMuon(matrices), Adam(vectors, every=2)),
    "combined with another package's": lambda matrices, vectors: Combined(Muon(matrices), torch.optim.AdamW(vectors)),
    "snoo": lambda matrices, vectors: Snoo(Combined(NorMuon(matrices), Adam(vectors)), k=2),
    "snoo of another package's": lambda matrices, vectors: Snoo(torch.optim.AdamW([*matrices, *vectors]), k=2),
    "nested": lambda matrices, vectors: Combined(Snoo(Muon(matrices), k=2), Combined(Adam(vectors))),
}
every_kind = pytest.mark.parametrize("kind", BUILD)


def build(kind: str, net: nn.Module, *, named: bool = True) -> Any:
    return BUILD[kind](*split(net, named=named))


def interleaved() -> Interleaved:
    net = network()
    matrices, vectors = split(net)
    return Interleaved(net, [NorMuon(matrices), Adam(vectors)])


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def trained(kind: str, *, steps: int = 3, named: bool = True) -> tuple[nn.Module, Any]:
    net = network()
    optimizer = build(kind, net, named=named)
    train(net, optimizer, range(steps))
    return net, optimizer


def same(a: Any, b: Any) -> bool:
    if torch.is_tensor(a):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_goes_on(net: nn.Module, optimizer: Any, other: nn.Module, again: Any) -> None:
    for one, its in ((net, optimizer), (other, again)):
        train(one, its, range(3, 7))
    assert same(net.state_dict(), other.state_dict())


# --------------------------------------------------------------------- round trips


@every_kind
@pytest.mark.parametrize("named", [(True, True), (True, False), (False, True), (False, False)])
def test_a_loaded_state_is_the_saved_one(kind: str, named: tuple[bool, bool]) -> None:
    net, optimizer = trained(kind, named=named[0])
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other = copy.deepcopy(net)
    again = build(kind, other, named=named[1])
    again.load_state_dict(saved)
    assert same(saved, kept), "loading changes nothing in what is loaded"
    loaded = again.state_dict()
    names = [group.pop("param_names", None) for group in loaded["param_groups"]]
    assert all(names) is any(named), "names of either side are kept"
    for group in kept["param_groups"]:
        group.pop("param_names", None)
    assert same(loaded, kept)
    assert_goes_on(net, optimizer, other, again)


@every_kind
def test_copies_go_on_and_have_the_same_attributes(kind: str) -> None:
    net, optimizer = trained(kind)
    for other, again in (copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))):
        assert {k for k in vars(again) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}
        assert repr(again) == repr(optimizer) or "differentiable" in repr(again)
        assert_goes_on(*copy.deepcopy((net, optimizer)), other, again)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_interleaved_is_not_copied(copied: Callable[[Any], Any]) -> None:
    for optimizer in (interleaved(), Snoo(interleaved())):
        with pytest.raises(ValueError, match=r"Interleaved cannot be copied or pickled: .* Save its state_dict"):
            copied(optimizer) if copied is not copy.copy else copied(getattr(optimizer, "optimizer", optimizer))


@every_kind
def test_repeated_groups_have_the_same_numbers(kind: str) -> None:
    _, optimizer = trained(kind)
    before = optimizer.state_dict()["param_groups"]
    optimizer.param_groups.extend(list(optimizer.param_groups))
    assert optimizer.state_dict()["param_groups"] == [*before, *before]


@every_kind
def test_steps_may_be_numbers(kind: str) -> None:
    net, optimizer = trained(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = state["step"].item()
    other = copy.deepcopy(net)
    again = build(kind, other)
    again.load_state_dict(saved)
    assert_goes_on(net, optimizer, other, again)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda net: nn.ModuleDict({"_orig_mod": net}),
    "DDP of compiled": lambda net: nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": net})}),
    "FSDP of every layer": lambda net: nn.Sequential(*(nn.ModuleDict({"_fsdp_wrapped_module": m}) for m in net)),  # type: ignore[attr-defined]
    "checkpointed layers": lambda net: nn.Sequential(
        *(nn.ModuleDict({"_checkpoint_wrapped_module": m}) for m in net)  # type: ignore[attr-defined]
    ),
}


@every_kind
@pytest.mark.parametrize("wrap", WRAPS)
def test_names_are_found_through_wrappers(kind: str, wrap: str) -> None:
    net, optimizer = trained(kind)
    other = copy.deepcopy(net)
    again = build(kind, WRAPS[wrap](other))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(
        name in dict(WRAPS[wrap](other).named_parameters()) for g in again.param_groups for name in g["param_names"]
    )
    back = copy.deepcopy(net)
    third = build(kind, back)
    third.load_state_dict(copy.deepcopy(again.state_dict()))
    assert_goes_on(net, optimizer, other, again)
    train(back, third, range(3, 7))
    assert same(net.state_dict(), back.state_dict())


def test_a_member_of_another_package_is_matched_by_name_too() -> None:
    net = network()
    a = Combined(Muon([("first", net[0].weight)]), torch.optim.AdamW([("b", net[0].bias), ("c", net[2].bias)]))
    train(net, a, range(2))
    b = Combined(torch.optim.AdamW([("c", net[2].bias), ("b", net[0].bias)]), Muon([("first", net[0].weight)]))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for p in (net[0].weight, net[0].bias, net[2].bias):
        assert same(dict(a.state[p]), dict(b.state[p]))


def test_a_layer_that_is_called_module_is_not_another_one() -> None:
    one, two = parameters([(2, 2), (2, 2)])
    a, b = Muon([("x.module.w", one), ("x.w", two)]), Muon([("x.w", two), ("x.module.w", one)])
    give([one, two], 0)
    a.step()
    b.load_state_dict(a.state_dict())
    for p in (one, two):
        assert torch.equal(a.state[p]["momentum_buffer"], b.state[p]["momentum_buffer"])


@every_kind
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_distributed_checkpoint_keeps_all_of_the_state(kind: str, flat: bool, steps: int, tmp_path: Path) -> None:
    """It makes one step with a fresh optimizer, which must have all keys after that."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, optimizer = trained(kind, steps=steps)
    net.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no other processes
        dcp.save(get_optimizer_state_dict(net, optimizer, options=options), checkpoint_id=tmp_path)
        other = copy.deepcopy(net)
        again = build(kind, other)
        target = get_optimizer_state_dict(other, again, options=options)
        assert same(net.state_dict(), other.state_dict()), "that step changes no weight"
        dcp.load(target, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, again, target, options=options)
    assert_goes_on(net, optimizer, other, again)


@pytest.mark.parametrize("kind", [Adam, Muon])
@pytest.mark.parametrize("used", [True, False])
def test_a_flattened_state_has_what_a_bfloat16_weight_needs(kind: Any, used: bool) -> None:
    """Unflattened are the keys that our own state has; {} stands for those that were not saved."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    p, unused = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16)), nn.Parameter(torch.randn(4, 3))
    net = nn.ParameterDict({"p": p, "unused": unused})
    one = kind(net.named_parameters())
    for _ in range(2):
        give([p, unused] if used else [p], 0)
        one.step()
    other = copy.deepcopy(net)
    net.zero_grad()
    other.zero_grad()
    two = kind(other.named_parameters())
    set_optimizer_state_dict(other, two, get_optimizer_state_dict(net, one, options=flat), options=flat)
    assert same(one.state_dict(), two.state_dict())
    assert torch.equal(one.master(p), two.master(other["p"]))


def test_names_of_distributed_checkpoint_are_those_of_the_whole_model() -> None:
    """Its groups say `param_names` in the order of the saved optimizer, and have parameters in ours."""
    net = network()
    a = Adam([("first", net[0].weight), ("last", net[2].weight)], lr_mul=[1.0, 2.0])
    train(net, a, range(2))
    saved = get_optimizer_state_dict(net, a)
    b = Adam([("last", net[2].weight), ("first", net[0].weight)], lr_mul=[2.0, 1.0])
    set_optimizer_state_dict(net, b, saved)
    assert b.param_groups[0]["lr_mul"] == [2.0, 1.0]
    for layer in (net[0], net[2]):
        assert same(a.state[layer.weight], b.state[layer.weight])


# --------------------------------------------------------------------- groups of others


def test_tuples_that_became_lists_are_tuples_again() -> None:
    params = parameters([(4, 4), (4, 4)])
    for blocks in ((2, 2), [(1, 2), 4]):
        optimizer = Muon(params, blocks=blocks)
        saved = optimizer.state_dict()
        saved["param_groups"][0]["blocks"] = [list(b) if isinstance(b, tuple) else b for b in blocks]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["blocks"] == blocks


@every_kind
def test_groups_may_know_more_keys_or_fewer(kind: str) -> None:
    net, optimizer = trained(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["note"] = "kept"
    other = copy.deepcopy(net)
    again = build(kind, other)
    lr_scheduler.LambdaLR(again, lambda step: 0.5)
    again.param_groups[-1]["part"] = "mine"
    again.load_state_dict(saved)
    assert again.param_groups[0]["note"] == "kept"
    if "another" not in kind:  # torch's own optimizers drop what the saved groups do not have
        assert all("initial_lr" in group for group in again.param_groups)
        assert again.param_groups[-1]["part"] == "mine"
    assert_goes_on(net, optimizer, other, again)


def test_an_option_that_came_later_has_the_value_it_was_built_with() -> None:
    params = parameters([(4, 4)])
    saved = Muon(params).state_dict()
    del saved["param_groups"][0]["update_ema"]
    optimizer = Muon(params, update_ema=0.25)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["update_ema"] == 0.25


def test_a_rate_of_a_schedule_may_be_a_rounding_error_below_zero() -> None:
    params = parameters([(4, 4)])
    optimizer = Muon(params)
    optimizer.param_groups[0]["lr"] = -1e-19
    Muon(params).load_state_dict(optimizer.state_dict())


SCHEDULES: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [2]),
    lambda o: SWALR(o, swa_lr=0.01),
]


@every_kind
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_with_their_defaults(kind: str, schedule: Callable[[Any], Any]) -> None:
    net = network()
    optimizer = build(kind, net)
    scheduler = schedule(optimizer)
    for step in range(3):
        train(net, optimizer, range(step, step + 1))
        scheduler.step(*[1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
    other = copy.deepcopy(net)
    again = build(kind, other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_goes_on(net, optimizer, other, again)


def test_onecycle_cycles_the_momentum_of_what_has_one() -> None:
    optimizer = build("combined", network())
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, max_momentum=0.9)
    muon, adam = optimizer.optimizers
    assert muon.param_groups[0]["momentum"] == 0.9
    assert adam.param_groups[0]["betas"] == (0.9, 0.999)
    net = network()
    matrices, vectors = split(net)
    betas = Combined(Adam(matrices), torch.optim.AdamW(vectors))
    lr_scheduler.OneCycleLR(betas, max_lr=0.1, total_steps=10, max_momentum=0.8)
    assert [group["betas"] for group in betas.param_groups] == [(0.8, 0.999)] * 2


# --------------------------------------------------------------------- hooks


@pytest.mark.parametrize("kind", [*BUILD, "interleaved"])
def test_state_dict_hooks_are_called_and_obeyed(kind: str) -> None:
    optimizer: Any = interleaved() if kind == "interleaved" else build(kind, network())
    seen: list[str] = []

    def renamed(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("second")
        return {**state_dict, "param_groups": [{**g, "lr": 0.003} for g in state_dict["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda o: o.state.__setitem__("note", 1))
    optimizer.register_state_dict_post_hook(lambda o, s: s.__setitem__("from a hook", 2))
    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda o: o.state.__setitem__("loaded", True))
    saved = optimizer.state_dict()
    assert saved["from a hook"] == 2
    assert saved["state"]["note"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["first", "second"]
    assert {group["lr"] for group in optimizer.param_groups} == {0.003}
    assert optimizer.state["loaded"]
    assert optimizer.state["note"] == 1


def test_a_hook_may_repair_a_foreign_state() -> None:
    net, optimizer = trained("combined")
    foreign = copy.deepcopy(optimizer.state_dict())
    for state in foreign["state"].values():
        if "momentum_buffer" in state:
            state["velocity"] = state.pop("momentum_buffer")
    other = copy.deepcopy(net)
    again = build("combined", other)
    with pytest.raises(ValueError, match="NorMuon knows no 'velocity'"):
        again.load_state_dict(foreign)

    def repaired(optimizer: Any, state_dict: dict[str, Any]) -> None:
        for state in state_dict["state"].values():
            if "velocity" in state:
                state["momentum_buffer"] = state.pop("velocity")

    again.optimizers[0].register_load_state_dict_pre_hook(repaired)  # a member's is called, too
    again.load_state_dict(foreign)
    assert_goes_on(net, optimizer, other, again)


def test_a_loading_hook_has_the_last_word_on_the_state() -> None:
    params = parameters([(4, 4)])
    optimizer = Muon(params)
    give(params, 0)
    optimizer.step()
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[params[0]]["momentum_buffer"].zero_())
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state[params[0]]["momentum_buffer"].any()


@pytest.mark.parametrize("kind", [*BUILD, "interleaved"])
def test_a_step_is_counted_once(kind: str) -> None:
    optimizer: Any = interleaved() if kind == "interleaved" else build(kind, network())
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all, after")),
    ]
    optimizer.register_step_pre_hook(lambda *_: seen.append("own, before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("own, after"))
    for group in optimizer.param_groups:
        give(group["params"], 0)
    try:
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["all, before", "own, before", "own, after", "all, after"]
    assert sum(event.name.startswith("Optimizer.step#") for event in profile.function_events) == 1


def test_a_member_whose_step_somebody_replaced_is_stepped_so() -> None:
    net = network()
    optimizer = build("combined", net)
    member, seen = optimizer.optimizers[1], []
    before = member.step
    member.step = lambda: seen.append(1) or before()
    train(net, optimizer, range(2))
    assert seen == [1, 1]


def test_what_belongs_to_no_parameter_may_be_in_the_state() -> None:
    net, optimizer = trained("combined")
    optimizer.state["x"] = 1
    assert optimizer.state["x"] == 1
    assert "x" in optimizer.state
    assert list(optimizer.state)[-1] == "x"
    again = copy.deepcopy(optimizer)
    assert again.state["x"] == 1
    other = build("combined", net)
    other.load_state_dict(optimizer.state_dict())
    assert other.state["x"] == 1
    del optimizer.state["x"]
    assert "x" not in optimizer.state
    other.reset()
    assert not other.state


# --------------------------------------------------------------------- dtypes


def test_mantissas_stay_where_weights_are_exact() -> None:
    """A state of bfloat16 weights in a float32 model, and a model that became one."""
    half = [nn.Parameter(p.detach().bfloat16()) for p in parameters([(4, 4)])]
    for cls in (Adam, Muon):
        optimizer = cls(half)
        give(half, 0)
        optimizer.step()
        full = [nn.Parameter(p.detach().float()) for p in half]
        wide = cls(full)
        wide.load_state_dict(optimizer.state_dict())
        assert "mantissa" not in wide.state[full[0]]
        half[0].data = half[0].data.float()
        assert not {"mantissa", "checksum"} & set(optimizer.state_dict()["state"][0])
        give(half, 1)
        give(full, 1)
        optimizer.step()
        wide.step()
        cls(half).load_state_dict(optimizer.state_dict())
        assert torch.equal(half[0], full[0])
        half[0].grad = None
        half[0].data = half[0].data.bfloat16()


@pytest.mark.parametrize("kind", ["adam", "muon", "normuon", "combined", "snoo"])
def test_a_state_of_another_precision_is_converted(kind: str) -> None:
    net = network().double()
    optimizer = build(kind, net)
    for step in range(2):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).double()
        optimizer.step()
    other = network()
    again = build(kind, other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, again, range(2))
    assert {v.dtype for s in again.state.values() for k, v in s.items() if k.startswith(("exp", "mom"))} == {
        torch.float32
    }
