"""Parameters, options and states that are of no use: refused by name, before anything has changed."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedrun.optim import Adam, Interleaved, Muon, NorMuon
from tests.optim.test_muon import give, parameters
from tests.optim.test_state import same, trained


def spoilt(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state_dict: state_dict["state"][0].update(values)


@pytest.mark.parametrize(
    ("kind", "spoil", "sentence"),
    [
        (
            "muon",
            spoilt(momentum_buffer=torch.zeros(6, 4, dtype=torch.complex64)),
            "of 0.weight has dtype torch.complex64",
        ),
        (
            "muon",
            spoilt(momentum_buffer=torch.zeros(6, 4, dtype=torch.int64)),
            "is kept in torch.float32; save it again",
        ),
        (
            "adam",
            spoilt(exp_avg=torch.zeros(4, 6)),
            "'exp_avg' of 0.weight has shape (4, 6), but this model's needs (6, 4)",
        ),
        ("adam", spoilt(step=torch.zeros(2)), "'step' of 0.weight has shape (2,), but this model's needs ()"),
        ("adam", lambda s: s["state"][0].pop("exp_avg_sq"), "Adam needs 'exp_avg_sq', and 0.weight has none"),
        (
            "normuon",
            lambda s: s["state"][0].pop("second_moment"),
            "NorMuon needs 'second_moment', and 0.weight has none",
        ),
        ("normuon", lambda s: s["param_groups"][0].pop("beta2"), "not made by NorMuon: its group lacks beta2"),
        ("muon", lambda s: s["param_groups"][0].update(scale="large"), "scale is 'large'; it must be one of"),
        ("muon", lambda s: s["param_groups"][0].update(lr_mul=[1.0]), "lr_mul lists 1 values for 2 parameters"),
        ("combined", spoilt(momentum_buffer=torch.zeros(1)), "'momentum_buffer' of 0.weight has shape (1,)"),
        ("combined", lambda s: s["state"][2].pop("step"), "Adam needs 'step', and 0.bias has none"),
        ("combined", lambda s: s["param_groups"].pop(), "it lacks 0.bias"),
        ("snoo", spoilt(outer=torch.zeros(1)), "'outer' of 0.weight has shape (1,), but this model's needs (6, 4)"),
    ],
)
def test_a_foreign_state_is_refused_and_nothing_changes(kind: str, spoil: Any, sentence: str) -> None:
    _, optimizer = trained(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    kept = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=re.escape(sentence)):
        optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), kept)


@pytest.mark.parametrize(
    ("theirs", "ours", "sentence"),
    [
        (torch.optim.AdamW, Adam, "not made by Adam: its group lacks eps_at"),
        (torch.optim.SGD, Muon, "not made by Muon: its group lacks method"),
        (torch.optim.Muon, NorMuon, "not made by NorMuon: its group lacks method"),
        (Adam, Muon, "not made by Muon: its group lacks method"),
        (Muon, NorMuon, "not made by NorMuon: its group lacks beta2"),
        (NorMuon, Muon, "Muon knows no 'second_moment'"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(theirs: Any, ours: Any, sentence: str) -> None:
    params = parameters([(4, 4)])
    other, optimizer = theirs(params, lr=0.1), ours(params)
    give(params, 0)
    other.step()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state


def test_a_state_with_more_parameters_is_refused() -> None:
    one, two = parameters([(4, 4), (4, 4)])
    long, short = Muon([{"params": [("one", one)]}, {"params": [("two", two)]}]), Muon([("one", one)])
    with pytest.raises(ValueError, match="it has two, which is not trained here"):
        short.load_state_dict(long.state_dict())


@pytest.mark.parametrize(
    ("cls", "p", "sentence"),
    [
        (Muon, torch.zeros(0, 5), r"Muon cannot train table: its shape \(0, 5\) has no weights"),
        (NorMuon, torch.zeros(5, 0), r"Muon cannot train table: its shape \(5, 0\) has no weights"),
        (Muon, torch.zeros(5), "Muon cannot train table: it has 1 dimension"),
        (Adam, torch.zeros(2, 2, dtype=torch.int64), "Adam cannot train table: its dtype is torch.int64; leave it out"),
        (Muon, torch.zeros(2, 2, dtype=torch.complex64), "table: its dtype is torch.complex64; .* two real"),
    ],
)
def test_parameters_of_no_use_are_named(cls: Any, p: torch.Tensor, sentence: str) -> None:
    optimizer = cls([("fine", torch.zeros(2, 2))])
    for make in (lambda: cls([("table", p)]), lambda: optimizer.add_param_group({"params": [("table", p)]})):
        with pytest.raises(ValueError, match=sentence):
            make()
    assert len(optimizer.param_groups) == 1


def test_adam_takes_no_rows_as_adamw_does() -> None:
    """As FSDP leaves them on ranks that have no part of a parameter."""
    p = nn.Parameter(torch.zeros(0, 5))
    p.grad = torch.zeros(0, 5)
    optimizer = Adam([p])
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("cls", [Adam, Muon, NorMuon])
def test_a_learning_rate_of_two_elements_is_named(cls: Any) -> None:
    params = parameters([(4, 4)])
    with pytest.raises(ValueError, match=r"lr is a tensor of 2 elements, .*; a Tensor lr must be 1-element"):
        cls(params, lr=torch.tensor([0.1, 0.2]))
    cls(params, lr=torch.tensor([0.1]))


@pytest.mark.parametrize("base", [Muon, NorMuon])
def test_subclasses_know_their_options_too(base: Any) -> None:
    cls = type("Mine", (base,), {})
    with pytest.raises(TypeError, match="has no argument 'momentun'"):
        cls(parameters([(4, 4)]), momentun=0.9)


def interleaved() -> tuple[nn.Linear, Interleaved]:
    net = nn.Linear(3, 4)
    optimizer = Interleaved(net, [Muon([net.weight]), torch.optim.AdamW([net.bias])])
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda s: s["state"]["weight"].update(momentum_buffer=torch.zeros(2, 2)), r"of weight has shape \(2, 2\)"),
        (lambda s: s["state"]["weight"].clear() or s["state"]["weight"].update(exp_avg=1), "knows no 'exp_avg'"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "Interleaved"),
        (lambda s: s["param_groups"][0].pop("method"), "not made by Muon: its group lacks method"),
        (lambda s: s.update(ranks=2), "of rank 0 of 2, this is rank 0 of 1"),
    ],
)
def test_interleaved_refuses_a_state_before_it_loads_any(spoil: Any, sentence: str) -> None:
    _, optimizer = interleaved()
    before, bad = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 7.0
    spoil(bad)
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(bad)
    assert same(before, optimizer.state_dict())


def test_interleaved_takes_no_group_that_it_would_not_train() -> None:
    _, optimizer = interleaved()
    with pytest.raises(ValueError, match="cannot take another group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert len(optimizer.param_groups) == 2
