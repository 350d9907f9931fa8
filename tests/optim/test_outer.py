"""Snoo and Combined."""

import pytest
import torch
from torch import nn

from speedrun.optim import Adam, Combined, Muon, Snoo
from tests.optim.test_muon import give, parameters


def test_snoo_is_nesterov_on_the_way_of_k_steps() -> None:
    """Against torch's SGD with Nesterov momentum on the pseudo-gradient, first after step 1, then every k."""
    ours, theirs = parameters([(3, 2)], dtype=torch.float64), parameters([(3, 2)], dtype=torch.float64)
    snoo = Snoo(torch.optim.SGD(ours, lr=0.1), lr=0.68, momentum=0.37, k=3)
    inner = torch.optim.SGD(theirs, lr=0.1)
    outer = [p.detach().clone().requires_grad_() for p in theirs]
    sgd = torch.optim.SGD(outer, lr=0.68, momentum=0.37, nesterov=True)
    for step in range(10):
        give(ours, step)
        give(theirs, step)
        snoo.step()
        inner.step()
        if step % 3 == 0:
            for o, p in zip(outer, theirs, strict=True):
                o.grad = (o - p).detach()
            sgd.step()
            with torch.no_grad():
                for o, p in zip(outer, theirs, strict=True):
                    p.copy_(o)
        torch.testing.assert_close(ours[0], theirs[0])


def test_snoo_takes_new_groups() -> None:
    one, two = parameters([(2, 2), (2, 2)])
    snoo = Snoo(torch.optim.SGD([one], lr=0.1), k=1)
    snoo.add_param_group({"params": [two]})
    give([one, two], 0)
    before = two.detach().clone()
    snoo.step()
    assert not torch.equal(two, before)
    assert len(snoo.outer) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"lr": -1.0}, "lr is -1.0"), ({"momentum": 1.0}, "momentum is 1.0"), ({"k": 0}, "k is 0; it must be at least 1")],
)
def test_snoo_refuses_bad_numbers(options, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Snoo(torch.optim.SGD(parameters([(2, 2)])), **options)


def test_snoo_refuses_states_that_are_not_its_own() -> None:
    params = parameters([(2, 2)])
    inner = torch.optim.SGD(params)
    with pytest.raises(ValueError, match="not made by Snoo: its groups lack `snoo_count`"):
        Snoo(inner).load_state_dict(torch.optim.SGD(params).state_dict())
    stepped = Snoo(torch.optim.SGD(params, momentum=0.9))
    give(params, 0)
    stepped.step()
    with pytest.raises(ValueError, match="parameters have state, and none has `outer`"):
        Snoo(inner).load_state_dict(stepped.optimizer.state_dict())
    others = parameters([(3, 3)])
    other = Snoo(torch.optim.SGD(others))
    give(others, 0)
    other.step()
    with pytest.raises(ValueError, match=r"'outer' of parameter 0 of group 0 \(2, 2\) has shape \(3, 3\), but this"):
        Snoo(inner).load_state_dict(other.state_dict())
    two = Snoo(torch.optim.SGD(parameters([(2, 2), (2, 2)])))
    with pytest.raises(ValueError, match=r"has groups of \[1\] parameters, this Snoo has \[2\]"):
        two.load_state_dict(Snoo(inner).state_dict())
    spoilt = other.state_dict()
    spoilt["state"][0]["outer"] = spoilt["state"][0]["outer"].to(torch.int32)
    with pytest.raises(ValueError, match=r"'outer' of parameter 0 of group 0 \(3, 3\) has dtype torch.int32"):
        other.load_state_dict(spoilt)


def test_snoo_starts_at_its_first_step() -> None:
    """A model may be loaded after the optimizer was built."""
    params, plain = parameters([(2, 2)]), parameters([(2, 2)])
    late = Snoo(torch.optim.SGD(params, lr=0.1), k=1)
    assert not late.state
    with torch.no_grad():
        params[0].add_(1)
        plain[0].add_(1)
    early = Snoo(torch.optim.SGD(plain, lr=0.1), k=1)
    for optimizer, weights in ((late, params), (early, plain)):
        give(weights, 0)
        optimizer.step()
    assert torch.equal(params[0], plain[0])


def test_the_state_of_snoo_and_of_what_it_wraps_is_one_mapping() -> None:
    params = parameters([(2, 2)])
    snoo = Snoo(torch.optim.Adam(params), k=3)
    give(params, 0)
    snoo.step()
    (p,) = params
    assert set(snoo.state[p]) == {"step", "exp_avg", "exp_avg_sq", "outer", "outer_momentum"}
    assert list(snoo.state) == [p]
    snoo.state["note"] = 1
    snoo.state[p] = {**snoo.state[p], "outer": torch.ones(2, 2)}
    assert snoo.outer[p]["outer"].eq(1).all()
    assert "outer" not in snoo.optimizer.state[p]
    saved = snoo.state_dict()
    assert saved["state"]["note"] == 1
    assert (saved["param_groups"][0]["snoo_k"], saved["param_groups"][0]["snoo_count"]) == (3, 1)
    del snoo.state[p]
    assert list(snoo.state) == ["note"]


def test_snoo_finds_its_weights_by_name() -> None:
    one, two = parameters([(2, 2), (2, 2)])
    saved = Snoo(Muon([("one", one), ("two", two)]), k=5)
    give([one, two], 0)
    saved.step()
    turned = Snoo(Muon([("two", two), ("one", one)]))
    turned.load_state_dict(saved.state_dict())
    assert (turned.k, turned.count) == (5, 1)
    for p in (one, two):
        assert all(torch.equal(turned.outer[p][key], saved.outer[p][key]) for key in ("outer", "outer_momentum"))


def test_snoo_converts_a_state_to_the_weights_precision() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    one, two = Snoo(Adam([p])), Snoo(Adam([nn.Parameter(torch.ones(2, 2, dtype=torch.float64))]))
    p.grad = torch.ones_like(p)
    one.step()
    two.load_state_dict(one.state_dict())
    assert {x.dtype for state in two.outer.values() for x in state.values()} == {torch.float64}


def test_combined_refuses_a_parameter_in_two_optimizers_and_none_at_all() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"A parameter of shape \(2, 2\) is in Muon and in Adam"):
        Combined(Muon([p]), Adam([p]))
    with pytest.raises(ValueError, match="Combined got no optimizers"):
        Combined()


def test_combined_holds_the_groups_and_states_of_its_members() -> None:
    one, two = parameters([(2, 2), (2, 2)])
    muon, adam = Muon([("one", one)], lr=0.1), torch.optim.AdamW([("two", two)], lr=0.2)
    both = Combined(muon, adam)
    assert [g["lr"] for g in both.param_groups] == [0.1, 0.2]
    both.param_groups[1]["lr"] = 0.5
    assert adam.param_groups[0]["lr"] == 0.5
    give([one, two], 0)
    both.step()
    assert "momentum_buffer" in both.state[one]
    assert "exp_avg" in both.state[two]
    saved = both.state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [[0], [1]]
    assert [g["param_names"] for g in saved["param_groups"]] == [["one"], ["two"]]
    both.zero_grad()
    assert one.grad is None
    assert two.grad is None


def test_combined_grows_through_its_members() -> None:
    """New groups come last, or a scheduler's rates would move to other groups."""
    one, two, three, four, five, vector = parameters([(2, 2)] * 5 + [(3,)])
    muon, adam = Muon([one]), Adam([two])
    both = Combined(muon, adam)
    muon.add_param_group({"params": [three], "lr": 0.3})
    both.sync()
    both.add_param_group({"params": vector, "lr": 0.4})  # only Adam takes vectors
    both.add_param_group({"params": [four], "momentum": 0.5})  # only Muon has momentum
    both.add_param_group({"params": (p for p in [five]), "optimizer": "Adam"})
    firsts = [group["params"][0] for group in both.param_groups]
    assert all(p is q for p, q in zip(firsts, [one, two, three, vector, four, five], strict=True))
    assert [len(o.param_groups) for o in both.optimizers] == [3, 3]
    assert both.param_groups[3]["lr"] == 0.4
    (six,) = parameters([(2, 2)])
    both.add_param_group({"params": [six], "optimizer": muon})
    assert muon.param_groups[-1]["params"] == [six]
    assert "optimizer" not in muon.param_groups[-1]
    every = [one, two, three, vector, four, five, six]
    give(every, 0)
    both.step()
    other = Combined(Muon(every[:1]), Adam(every[1:2]))
    for p, name in zip(every[2:], ["Muon", "Adam", "Muon", "Adam", "Muon"], strict=True):
        other.add_param_group({"params": [p], "optimizer": name})
    other.load_state_dict(both.state_dict())
    assert all(torch.equal(both.state[p][k], v) for p in every for k, v in other.state[p].items() if k != "waiting")


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({}, "the group fits each of Muon, Adam"),
        ({"optimizer": "SGD"}, "a group for SGD fits none of Muon, Adam"),
        ({"momentum": 0.9, "betas": (0.9, 0.9)}, "the group fits none of Muon, Adam"),
        ({"params": "one"}, r"A parameter of shape \(2, 2\) is in Muon already"),
        ({"optimizer": "Muon", "lr": -1}, "lr is -1"),
    ],
)
def test_combined_says_why_it_takes_no_group(group, sentence) -> None:
    one, two, three = parameters([(2, 2)] * 3)
    both = Combined(Muon([one]), Adam([two]))
    with pytest.raises(ValueError, match=sentence):
        both.add_param_group({**group, "params": [one if "params" in group else three]})
    assert [len(o.param_groups) for o in [both, *both.optimizers]] == [2, 1, 1]


def test_combined_refuses_a_state_with_other_groups() -> None:
    one, two = parameters([(2, 2), (2, 2)])
    short, long = Combined(Muon([one])), Combined(Muon([{"params": [one]}, {"params": [two]}]))
    with pytest.raises(ValueError, match=r"has groups of \[1\] parameters, this Combined has \[1, 1\]"):
        long.load_state_dict(short.state_dict())
    with pytest.raises(ValueError, match=r"has groups of \[1, 1\] parameters, this Combined has \[1\]"):
        short.load_state_dict(long.state_dict())


@pytest.mark.parametrize("inner", [Combined, Snoo, lambda o: Combined(Snoo(Combined(o)))])
def test_combined_checks_all_gradients_first_however_deep_they_are(inner) -> None:
    params = parameters([(2, 2), (3, 2)])
    before = [p.detach().clone() for p in params]
    adam, muon = Adam([("one", params[0])]), Muon([("two", params[1])])
    both = Combined(adam, inner(muon))
    give(params, 0)
    params[1].grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match="The gradient of two is not finite"):
        both.step()
    assert all(map(torch.equal, params, before))
    assert not any(any(o.state.values()) for o in (adam, muon))
    give(params, 1)
    both.step()
    assert not any(map(torch.equal, params, before))


def test_a_member_checks_for_itself_after_a_step_that_another_one_broke_off() -> None:
    params = parameters([(2, 2), (3, 2)])
    breaks, adam = torch.optim.SGD([params[0]]), Adam([("two", params[1])])
    hook = breaks.register_step_pre_hook(lambda *_: 1 / 0)
    give(params, 0)
    with pytest.raises(ZeroDivisionError):
        Combined(breaks, adam).step()
    hook.remove()
    params[1].grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match="The gradient of two is not finite"):
        adam.step()
