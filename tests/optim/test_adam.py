"""Adam against the plain reference and against torch's AdamW."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from speedrun.optim import Adam
from speedrun.optim.adam import share_layout
from tests.optim import reference
from tests.optim.test_muon import give, parameters

OPTIONS = st.fixed_dictionaries(
    {
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.95), (0.0, 0.9)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "eps_at": st.sampled_from(["corrected", "uncorrected"]),
        "weight_decay": st.sampled_from([0.0, 0.1, 5.0]),
        "decay": st.sampled_from(["decoupled", "cautious"]),
        "decay_by": st.sampled_from(["lr", "lr-squared"]),
        "every": st.integers(1, 3),
        "lr_mul": st.sampled_from([1.0, 5.0]),
        "wd_mul": st.sampled_from([1.0, 2.0]),
    }
)


@settings(max_examples=80, deadline=None)
@given(OPTIONS, st.sampled_from([torch.float32, torch.float64]), st.integers(1, 7))
def test_fast_equals_reference(options, dtype, steps) -> None:
    params = parameters([(5, 3), (7,), ()], dtype=dtype)
    optimizer = Adam(params, lr=0.01, **options)
    plain = [reference.Adam(lr=0.01, **options) for _ in params]
    expected = [p.detach().clone().double() for p in params]
    for step in range(steps):
        grads = give(params, step)
        optimizer.step()
        expected = [r.step(p, g.double()) for r, p, g in zip(plain, expected, grads, strict=True)]
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), e, atol=2e-5 if dtype == torch.float32 else 1e-10, rtol=0)


def test_equals_torch_adamw_over_100_steps_bit_for_bit() -> None:
    ours, theirs = parameters([(16, 8), (8,)]), parameters([(16, 8), (8,)])
    a = Adam(ours, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    b = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(100):
        give(ours, step)
        give(theirs, step)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_stepping_every_second_time_uses_the_sum_of_the_gradients() -> None:
    every, once = parameters([(4, 3)]), parameters([(4, 3)])
    a, b = Adam(every, lr=0.1, every=2), Adam(once, lr=0.1)
    (first,) = give(every, 0)
    before = every[0].detach().clone()
    a.step()
    assert torch.equal(every[0], before), "the first call only remembers"
    (second,) = give(every, 1)
    a.step()
    once[0].grad = first + second
    b.step()
    assert torch.equal(every[0], once[0])
    assert a.state[every[0]]["waiting"] == 0


def test_gradients_that_wait_survive_a_checkpoint() -> None:
    straight, resumed = parameters([(4, 3)]), parameters([(4, 3)])
    a = Adam(straight, lr=0.1, every=2)
    b = Adam(resumed, lr=0.1, every=2)
    for step in range(4):
        if step in (1, 3):
            saved, b = b.state_dict(), Adam(resumed, lr=0.5, every=2)
            b.load_state_dict(saved)
        give(straight, step)
        give(resumed, step)
        a.step()
        b.step()
    assert torch.equal(straight[0], resumed[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1}, "lr is -1; it must be finite and not negative"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0); it must be two numbers, each at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas is (0.9,)"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"eps_at": "inside"}, "eps_at is 'inside'; it must be one of: corrected, uncorrected"),
        ({"every": 0}, "every is 0; it must be at least 1"),
        ({"decay": "no"}, "decay is 'no'"),
        ({"wd_mul": [1.0, 1.0]}, "wd_mul lists 2 values for 1 parameters"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(options, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Adam([nn.Parameter(torch.ones(3))], **options)


# -------------------------------------------------------------------- strides


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        net.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-6, rtol=1e-5)


def test_a_transposed_gradient_meets_its_own_weights() -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.tensor([[1.0, -1.0], [1.0, -1.0], [1.0, -1.0]]).t()
    Adam([p], lr=1.0).step()
    assert p.sign().tolist() == [[-1, -1, -1], [1, 1, 1]]


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"every": 2}, {"betas": (0.5, 0.95)}])
@pytest.mark.parametrize(
    "weight",
    [
        lambda: torch.zeros(6, 8)[:, ::2],  # gaps
        lambda: torch.zeros(4, 12).t()[::2],  # gaps, and columns first
        lambda: torch.zeros(4, 6).t(),  # dense, but columns first
        lambda: torch.zeros(6, 4),
    ],
)
@pytest.mark.parametrize("gradient", [lambda g: g, lambda g: g.t().contiguous().t(), lambda g: g.repeat(1, 2)[:, :4]])
def test_any_strides_train_as_contiguous_ones_do(weight, gradient, options) -> None:
    start = parameters([(6, 4)])[0].detach()
    p, q = nn.Parameter(weight()), nn.Parameter(start.clone())
    p.data.copy_(start)
    a, b = Adam([p], lr=0.01, **options), Adam([q], lr=0.01, **options)
    for step in range(6):
        (g,) = give([q], step)
        p.grad = gradient(g)
        a.step()
        b.step()
    torch.testing.assert_close(p, q, atol=2e-6, rtol=1e-5)


def test_a_view_with_gaps_leaves_what_lies_between_alone() -> None:
    """As AdamW does."""
    stores = torch.ones(6, 8), torch.ones(6, 8)
    ours, theirs = (nn.Parameter(store[:, ::2]) for store in stores)
    assert ours.data_ptr() == stores[0].data_ptr()
    a = Adam([ours], lr=0.1, weight_decay=0.1)
    b = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    for step in range(3):
        give([ours], step)
        give([theirs], step)
        a.step()
        b.step()
    torch.testing.assert_close(*stores)
    assert stores[0][:, 1::2].eq(1).all()


def test_a_contiguous_state_goes_into_a_channels_last_model() -> None:
    ours, theirs = conv_net(), conv_net()
    a, b = Adam(ours.parameters(), lr=0.01), torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0)
    train(ours, a, range(3))
    train(theirs, b, range(6))
    other = conv_net().to(memory_format=torch.channels_last)
    other.load_state_dict(ours.state_dict())
    c = Adam(other.parameters(), lr=0.01)
    c.load_state_dict(a.state_dict())
    train(other, c, range(3, 6))
    assert_same(other, theirs)


def test_a_model_may_become_channels_last_between_two_steps() -> None:
    ours, theirs = conv_net(), conv_net()
    a, b = Adam(ours.parameters(), lr=0.01), torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0)
    train(ours, a, range(3))
    ours.to(memory_format=torch.channels_last)
    train(ours, a, range(3, 6))
    train(theirs, b, range(6))
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("tensors", "same"),
    [
        ([torch.zeros(3, 4), torch.zeros(3, 4)], True),
        ([torch.zeros(5, 1), torch.zeros(1, 5).t()], True),  # a dimension of size 1 is never walked along
        ([torch.zeros(()), torch.zeros(())], True),
        ([torch.zeros(0, 3), torch.zeros(3, 0).t()], True),
        ([torch.zeros(3, 4).t(), torch.zeros(3, 4).t()], True),
        ([torch.zeros(3, 3), torch.zeros(3, 3).t()], False),
        ([torch.zeros(3, 8)[:, ::2], torch.zeros(3, 8)[:, ::2]], False),  # gaps
        ([torch.zeros(9).as_strided((3, 3), (2, 2))] * 2, False),  # spans 9 elements and has 9, but some twice
        ([torch.zeros(3, 1).expand(3, 4)] * 2, False),
    ],
)
def test_the_fused_kernel_is_taken_for_one_dense_layout(tensors, same) -> None:
    assert share_layout(tensors) is same


def test_channels_last_throughout_keeps_the_fused_kernel() -> None:
    net = conv_net().to(memory_format=torch.channels_last)
    optimizer = Adam(net.parameters())
    train(net, optimizer, range(1))
    assert all(optimizer._fits_fused(w, 1.0) for w in optimizer._work())


def test_autograd_hears_of_a_fused_step() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    Adam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
