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
    with pytest.raises(ValueError, match="not made by Snoo"):
        Snoo(inner).load_state_dict(inner.state_dict())
    other = Snoo(torch.optim.SGD(parameters([(3, 3)])))
    with pytest.raises(ValueError, match=r"`snoo` has no parameter 0 of group 0 \(2, 2\), or one of another shape"):
        Snoo(inner).load_state_dict(other.state_dict())
    two = Snoo(torch.optim.SGD(parameters([(2, 2), (2, 2)])))
    with pytest.raises(ValueError, match="`snoo` has no parameter 1 of group 0"):
        two.load_state_dict(Snoo(inner).state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):  # torch's own
        Snoo(inner).load_state_dict(two.state_dict())


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
    one, two = parameters([(2, 2), (2, 2)])
    muon = Muon([one])
    both = Combined(muon)
    with pytest.raises(ValueError, match="cannot know which optimizer"):
        both.add_param_group({"params": [two]})
    muon.add_param_group({"params": [two], "lr": 0.3})
    both.sync()
    assert len(both.param_groups) == 2


def test_combined_refuses_a_state_with_other_groups() -> None:
    one, two = parameters([(2, 2), (2, 2)])
    short, long = Combined(Muon([one])), Combined(Muon([{"params": [one]}, {"params": [two]}]))
    with pytest.raises(ValueError, match="has 1 groups, these optimizers have 2"):
        long.load_state_dict(short.state_dict())
    with pytest.raises(ValueError, match="1 more groups"):
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
