"""bfloat16 + 16 bits = float32, for every bit pattern, over many steps, and whoever else writes the weight."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo
from speedrun.optim.exact_bf16 import checksum, join, split
from tests.optim.test_muon import give, gradients, parameters


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.itemsize == 4 else torch.int16)


def test_all_upper_halves_round_trip_with_edge_lower_halves() -> None:
    """All signs, exponents and top mantissa bits (so all denormals, infinities, NaNs, zeros), at the 16-bit border."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF):
        pattern = (high << 16) | low
        h, rest = split(pattern.view(torch.float32))
        assert torch.equal(bits(h), high.to(torch.int16)), "the weight is the upper half, cut off and not rounded"
        assert torch.equal(rest.to(torch.int32) & 0xFFFF, torch.full_like(high, low))
        assert torch.equal(bits(join(h, rest)), pattern)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_any_pattern_round_trips(patterns) -> None:
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert torch.equal(bits(join(*split(x))), bits(x))


def test_compiled_is_the_same_to_the_bit() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    high, low = torch.compile(split)(x)
    assert torch.equal(bits(high), bits(split(x)[0]))
    assert torch.equal(low, split(x)[1])
    assert torch.equal(torch.compile(join)(high, low), x)


def build(kind: str, params):
    if kind == "adam":
        return Adam(params, lr=0.003, weight_decay=0.1, decay="cautious")
    if kind == "adam-plain":
        return Adam(params, lr=0.003, eps_at="uncorrected")
    return {"muon": Muon, "normuon": NorMuon}[kind](
        params, lr=0.003, weight_decay=0.1, decay="cautious", update_ema=0.1
    )


@pytest.mark.parametrize("kind", ["muon", "normuon", "adam", "adam-plain"])
def test_1000_steps_equal_a_float32_master_bit_for_bit(kind) -> None:
    """The forward of both sees the same bfloat16 weights, so their gradients are the same."""
    exact = [nn.Parameter(p.detach().clone()) for p in parameters([(6, 6), (12, 6)], dtype=torch.bfloat16)]
    master = [nn.Parameter(p.detach().float()) for p in exact]
    a, b = build(kind, exact), build(kind, master)
    if kind.startswith("adam"):
        b._fits_fused = lambda *_: False  # type: ignore[method-assign]  # torch's kernel rounds differently
    for step in range(1000):
        for p, m, g in zip(exact, master, gradients(exact, step % 17), strict=True):
            p.grad = (g.float() * 0.01 + p.detach().float() * 0.1).bfloat16()
            seen = split(m.detach())[0]
            m.grad = (g.float() * 0.01 + seen.float() * 0.1).bfloat16().float()
        a.step()
        b.step()
    for p, m in zip(exact, master, strict=True):
        assert torch.equal(bits(a.master(p)), bits(m.detach()))
        assert torch.equal(bits(p.detach()), bits(split(m.detach())[0]))


def test_without_it_small_updates_are_lost() -> None:
    for exact, moved in ((True, True), (False, False)):
        p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        optimizer = Muon([p], lr=1e-5, exact_bf16=exact)
        for _ in range(2000):
            p.grad = torch.eye(4, dtype=torch.bfloat16)
            optimizer.step()
        assert bool((p.detach() != 1).any()) == moved


def test_somebody_elses_write_is_noticed() -> None:
    """A stale mantissa would be added to the new weight."""
    p = nn.Parameter(torch.randn(4, 4).bfloat16())
    optimizer = Muon([("w", p)], lr=1e-3)
    give([p], 0)
    optimizer.step()
    assert optimizer.state[p]["mantissa"].any()
    with torch.no_grad():
        p.fill_(1.0)
    assert torch.equal(optimizer.master(p), torch.ones(4, 4)), "the written value counts, exactly"
    before = optimizer.master(p)
    give([p], 1)
    optimizer.step()
    assert (optimizer.master(p) - before).abs().max() < 2e-3


def test_loading_a_model_checkpoint_drops_the_mantissa() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = Muon(model.parameters(), lr=1e-3)
    give(list(model.parameters()), 0)
    optimizer.step()
    model.load_state_dict({"weight": torch.full((4, 4), 2.0, dtype=torch.bfloat16)})
    assert torch.equal(optimizer.master(model.weight), torch.full((4, 4), 2.0))


@pytest.mark.parametrize("model_first", [True, False])
def test_a_state_dict_continues_bit_for_bit(model_first) -> None:
    straight = nn.Linear(4, 4, bias=False).bfloat16()
    resumed = copy.deepcopy(straight)
    a = NorMuon(straight.named_parameters(), lr=1e-2)
    for step in range(3):
        give(list(straight.parameters()), step)
        a.step()
    b = NorMuon(resumed.named_parameters(), lr=1.0)
    if model_first:
        resumed.load_state_dict(straight.state_dict())
        b.load_state_dict(a.state_dict())
    else:
        b.load_state_dict(a.state_dict())
        resumed.load_state_dict(straight.state_dict())
    assert b.state[resumed.weight]["mantissa"].dtype == torch.int16, "torch's own loading would make it bfloat16"
    for step in range(3, 6):
        give(list(straight.parameters()), step)
        give(list(resumed.parameters()), step)
        a.step()
        b.step()
    assert torch.equal(a.master(straight.weight), b.master(resumed.weight))


def test_a_state_of_other_weights_is_an_error_not_a_silent_reset() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    a = Muon(model.named_parameters(), lr=1e-2)
    give(list(model.parameters()), 0)
    a.step()
    other = nn.Linear(4, 4, bias=False).bfloat16()
    b = Muon(other.named_parameters(), lr=1e-2)
    b.load_state_dict(a.state_dict())
    give(list(other.parameters()), 1)
    before = other.weight.detach().clone()
    with pytest.raises(ValueError, match="The weight weight is not the one that the loaded optimizer state belongs to"):
        b.step()
    assert torch.equal(other.weight, before)
    b.reset()
    b.step()


def test_a_deep_copy_is_exact_and_independent() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    a = Muon(model.parameters(), lr=1e-2)
    give(list(model.parameters()), 0)
    a.step()
    model2, b = copy.deepcopy((model, a))
    give(list(model.parameters()), 1)
    give(list(model2.parameters()), 1)
    a.step()
    b.step()
    assert torch.equal(a.master(model.weight), b.master(model2.weight))
    assert b.param_groups[0]["params"][0] is model2.weight


def test_snoo_writes_exact_weights_exactly() -> None:
    """Snoo over bfloat16 weights equals Snoo over float32 ones whose forward sees them cut off."""
    exact = [nn.Parameter(p.detach().clone()) for p in parameters([(6, 6)], dtype=torch.bfloat16)]
    master = [nn.Parameter(p.detach().float()) for p in exact]
    a, b = (Snoo(Combined(Muon(ps, lr=0.01)), k=3) for ps in (exact, master))
    for step in range(20):
        grads = gradients(exact, step)
        for p, m, g in zip(exact, master, grads, strict=True):
            p.grad, m.grad = g.clone(), g.float()
        a.step()
        b.step()
    assert torch.equal(a.master(exact[0]), master[0].detach())


def test_the_checksum_sees_values_and_places() -> None:
    x = torch.linspace(-2, 2, 100).bfloat16()
    y = x.clone()
    y[3], y[4] = x[4], x[3]
    z = x.clone()
    z[50] *= 1.01  # one unit in the last place, or two
    assert len({checksum(x), checksum(y), checksum(z)}) == 3
    assert checksum(x) == checksum(x.clone())
