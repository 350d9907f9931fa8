"""Muon and NorMuon against the plain reference, over shapes, groups, blocks and options; and against torch's Muon."""

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from speedrun.optim import NEWTON_SCHULZ, Muon, NorMuon
from speedrun.optim import muon as muon_module
from tests.optim import reference

OPTIONS = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0.0, 0.8, 0.95]),
        "nesterov": st.booleans(),
        "momentum_form": st.sampled_from(["ema", "classical"]),
        "method": st.sampled_from(["polar-express", "newton-schulz"]),
        "steps": st.integers(1, 6),
        "scale": st.sampled_from([None, "unit-variance", "spectral", "match-rms-adamw", "unit-rms-norm"]),
        "weight_decay": st.sampled_from([0.0, 0.1, 1.2]),
        "decay": st.sampled_from(["decoupled", "cautious"]),
        "decay_by": st.sampled_from(["lr", "lr-squared"]),
        "update_ema": st.sampled_from([None, 0.3]),
        "update_floor": st.sampled_from([None, 0.35, 2.0]),
        "lr_mul": st.sampled_from([1.0, 0.1, 2.0]),
        "wd_mul": st.sampled_from([1.0, 0.0, 2.0]),
    }
)
SHAPES = st.lists(
    st.sampled_from(
        [((8, 8), 1), ((24, 8), 3), ((32, 8), 4), ((8, 32), 1), ((8, 24), (1, 3)), ((16, 16), (2, 2)), ((5, 3), 1)]
    ),
    min_size=1,
    max_size=5,
)


def parameters(shapes, seed=0, dtype=torch.float32) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)) for shape in shapes]


def gradients(params, step: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype) for p in params]


def give(params, step: int) -> list[torch.Tensor]:
    grads = gradients(params, step)
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return grads


@settings(max_examples=60, deadline=None)
@given(SHAPES, OPTIONS, st.booleans(), st.booleans(), st.sampled_from([None, -1, -2]), st.integers(1, 5))
def test_fast_equals_reference(shapes_blocks, options, normalized, one_group, axis, steps) -> None:
    """In float64, so that any disagreement is a mistake and not rounding."""
    params = parameters([shape for shape, _ in shapes_blocks], dtype=torch.float64)
    extra = {"beta2": 0.9, "axis": axis} if normalized else {}
    blocks = [b for _, b in shapes_blocks]
    if one_group:
        groups = [{"params": params, "blocks": blocks}]
    else:
        groups = [
            {"params": [p], "blocks": b, "lr": 0.02 * (i + 1)}
            for i, (p, b) in enumerate(zip(params, blocks, strict=True))
        ]
    fast = (NorMuon if normalized else Muon)(groups, lr=0.02, **options, **extra)
    plain = [
        reference.Muon(lr=0.02 if one_group else 0.02 * (i + 1), blocks=b, **options, **extra)
        for i, b in enumerate(blocks)
    ]
    expected = [p.detach().clone() for p in params]
    for step in range(steps):
        grads = give(params, step)
        fast.step()
        expected = [r.step(p, g) for r, p, g in zip(plain, expected, grads, strict=True)]
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(("adjust", "scale"), [("original", "spectral"), ("match_rms_adamw", "match-rms-adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_parity_with_torch_muon_over_100_steps(adjust, scale, nesterov) -> None:
    """Same coefficients, same arithmetic (bfloat16), one matrix at a time."""
    shapes = [(16, 16), (48, 16), (16, 64)]
    ours, theirs = parameters(shapes), parameters(shapes)
    a = Muon(
        ours, lr=0.01, method="newton-schulz", scale=scale, nesterov=nesterov, weight_decay=0.1, dtype=torch.bfloat16
    )
    b = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    for step in range(100):
        give(ours, step)
        give(theirs, step)
        a.step()
        b.step()
    for p, q, start in zip(ours, theirs, parameters(shapes), strict=True):
        moved = (q - start).norm()
        # bfloat16 has three digits, and the two evaluate the polynomial in another order.
        assert (p - q).norm() < 0.03 * moved


def test_a_bucket_spans_groups_and_blocks() -> None:
    """Q, K, V of a fused matrix and an output matrix in another group are one stack of four.

    Tall and wide matrices are two stacks, and one bucket.
    """
    qkv, out, up, down = parameters([(24, 8), (8, 8), (32, 8), (8, 32)])
    optimizer = Muon([{"params": [qkv], "blocks": 3}, {"params": [out, up, down], "lr": 0.1}], lr=0.02)
    give([qkv, out, up, down], 0)
    optimizer.step()
    shapes = [[tuple(x.shape) for x in found.stacks] for found in optimizer._orthogonalizers.values()]
    assert shapes == [[(4, 8, 8)], [(1, 32, 8), (1, 8, 32)]]


def test_memory_on_the_way_is_used_again() -> None:
    """It is allocated in the first step; copies of an optimizer do not carry it along."""
    params = parameters([(24, 8), (8, 8), (32, 8), (8, 32)])
    optimizer = NorMuon(params, lr=0.02)
    kept = []
    for step in range(3):
        give(params, step)
        optimizer.step()
        kept.append([x.data_ptr() for found in optimizer._orthogonalizers.values() for x in found.stacks])
    assert kept[0] == kept[1] == kept[2]
    copied = copy.deepcopy(optimizer)
    assert not hasattr(copied, "_orthogonalizers")
    copied.step()  # on weights of its own


def test_memory_is_bounded_when_ever_other_matrices_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "CACHED", 2)
    params, same = parameters([(8, 8)] * 4), parameters([(8, 8)] * 4)
    a, b = Muon(params, lr=0.02), [Muon([p], lr=0.02) for p in same]
    for step, count in enumerate((1, 2, 3, 4, 1, 3)):
        for p, q in zip(params, same, strict=True):
            p.grad = q.grad = None
        give(params[:count], step)
        give(same[:count], step)
        a.step()
        for optimizer in b:
            optimizer.step()
        assert len(a._orthogonalizers) <= 2
    for p, q in zip(params, same, strict=True):
        torch.testing.assert_close(p, q)


def test_large_buckets_are_cut_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = parameters([(8, 8)] * 5), parameters([(8, 8)] * 5)
    monkeypatch.setattr(muon_module, "MIN_STACK", 2)
    for params, limit in ((whole, 2**30), (cut, 2 * 4 * 64)):
        monkeypatch.setattr(muon_module, "CHUNK_BYTES", limit)
        optimizer = NorMuon(params, lr=0.02)
        for step in range(3):
            give(params, step)
            optimizer.step()
    for p, q in zip(whole, cut, strict=True):
        torch.testing.assert_close(p, q)


def test_convolutions_are_matrices_and_banks_are_stacks() -> None:
    conv = nn.Parameter(torch.randn(6, 3, 2, 2))
    flat = nn.Parameter(conv.detach().reshape(6, 12).clone())
    bank = nn.Parameter(torch.randn(4, 8, 8))
    apart = [nn.Parameter(x.clone()) for x in bank.detach()]
    a = Muon([{"params": [conv]}, {"params": [bank], "matrix": "batch"}], lr=0.1)
    b = Muon([flat, *apart], lr=0.1)
    for step in range(3):
        give([conv, bank], step)
        flat.grad = conv.grad.reshape(6, 12).clone()  # type: ignore[union-attr]
        for p, g in zip(apart, bank.grad, strict=True):  # type: ignore[arg-type]
            p.grad = g.clone()
        a.step()
        b.step()
    torch.testing.assert_close(conv.detach().reshape(6, 12), flat.detach())
    torch.testing.assert_close(bank.detach(), torch.stack([p.detach() for p in apart]))


def test_per_head_blocks_in_the_columns() -> None:
    """The output projection reads heads from its columns: (1, heads) treats each head's columns apart."""
    p = nn.Parameter(torch.zeros(8, 16))
    optimizer = Muon([p], lr=1.0, blocks=(1, 4), method="svd", scale=None, momentum=0.0)
    give([p], 0)
    optimizer.step()
    for head in range(4):
        sigma = torch.linalg.svdvals(p.detach()[:, 4 * head : 4 * head + 4])
        torch.testing.assert_close(sigma, torch.ones(4), atol=1e-5, rtol=0)


def test_normuon_keeps_the_norm_and_evens_out_the_rows() -> None:
    p, q = (nn.Parameter(torch.zeros(16, 8)) for _ in range(2))
    plain, even = Muon([p], lr=1.0), NorMuon([q], lr=1.0)
    g = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 16)[:, None]
    p.grad, q.grad = g.clone(), g.clone()
    plain.step()
    even.step()
    torch.testing.assert_close(p.norm(), q.norm())
    rows = q.detach().norm(dim=1)
    torch.testing.assert_close(rows, rows.mean().expand(16), atol=1e-3, rtol=1e-3)
    assert p.detach().norm(dim=1).std() > 0.1


def test_momentum_changed_between_steps_takes_effect() -> None:
    params = parameters([(8, 8)])
    plain = reference.Muon(lr=0.02)
    optimizer = Muon(params, lr=0.02)
    expected = params[0].detach().clone()
    for step, (mu, lr) in enumerate([(0.85, 0.02), (0.9, 0.01), (0.95, 0.04)]):
        optimizer.param_groups[0].update(momentum=mu, lr=lr)
        plain.momentum, plain.lr = mu, lr
        (g,) = give(params, step)
        optimizer.step()
        expected = plain.step(expected, g)
    torch.testing.assert_close(params[0].detach(), expected, atol=1e-5, rtol=1e-4)


def test_state_is_half_of_adamw() -> None:
    """Bytes beside the weights: one float32 buffer against two; NorMuon adds one number per row."""

    def state_bytes(optimizer: torch.optim.Optimizer) -> int:
        return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))

    shapes = [(192, 192), (576, 192), (768, 192), (192, 768)]
    sizes = {}
    for name, build in (("adamw", torch.optim.AdamW), ("muon", Muon), ("normuon", NorMuon)):
        params = parameters(shapes)
        optimizer = build(params, lr=0.01)
        give(params, 0)
        optimizer.step()
        sizes[name] = state_bytes(optimizer)
    weights = sum(4 * a * b for a, b in shapes)
    assert sizes["muon"] == weights
    assert sizes["muon"] * 2 <= sizes["adamw"]
    assert sizes["normuon"] * 2 <= sizes["adamw"] * 1.01


def test_bf16_weights_with_mantissa_and_momentum_take_8_bytes() -> None:
    params = parameters([(192, 192), (768, 192)], dtype=torch.bfloat16)
    optimizer = Muon(params, lr=0.01)
    give(params, 0)
    optimizer.step()
    total = sum(p.nbytes for p in params) + sum(
        v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    )
    assert total == 8 * sum(p.numel() for p in params)


BAD = [
    ({"lr": -1.0}, "lr is -1.0; it must be finite and not negative"),
    ({"lr": float("nan")}, "lr is nan"),
    ({"momentum": 1.0}, "momentum is 1.0; it must be at least 0 and below 1"),
    ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ({"scale": "big"}, "scale is 'big'; it must be one of: unit-variance, spectral, match-rms-adamw"),
    ({"method": "qr"}, "method is 'qr'"),
    ({"steps": 0}, "steps is 0"),
    ({"decay": "eager"}, "decay is 'eager'"),
    ({"decay_by": "time"}, "decay_by is 'time'"),
    ({"momentum_form": "x"}, "momentum_form is 'x'"),
    ({"update_ema": 1.5}, "update_ema is 1.5"),
    ({"update_floor": -0.1}, "update_floor is -0.1; it must be finite and not negative"),
    ({"update_floor": float("nan")}, "update_floor is nan"),
    ({"blocks": 3}, "blocks is 3, which does not divide the 8 x 8 matrix of "),
    ({"blocks": 0}, "blocks is 0"),
    ({"matrix": "heap"}, "matrix is 'heap'"),
    ({"lr_mul": [1.0, 2.0]}, "lr_mul lists 2 values for 1 parameters"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_options_are_refused_by_name_and_value(options, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Muon([("w", nn.Parameter(torch.ones(8, 8)))], **options)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: NorMuon([nn.Parameter(torch.ones(2, 2))], beta2=1.0), "beta2 is 1.0"),
        (lambda: NorMuon([nn.Parameter(torch.ones(2, 2))], axis=0), "axis is 0; it must be -1, -2 or None"),
        (lambda: Muon([]), "Muon got an empty parameter list"),
        (
            lambda: Muon([("bias", nn.Parameter(torch.ones(4)))]),
            "Muon cannot train bias: it has 1 dimension, and needs",
        ),
        (lambda: Muon([("scalar", nn.Parameter(torch.ones(())))]), "Muon cannot train scalar: it has 0 dimensions"),
        (
            lambda: Muon([("z", nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))]),
            "Muon cannot train z: its dtype is torch.complex64; leave it out, or give it as two real tensors",
        ),
    ],
)
def test_parameters_muon_cannot_train_are_refused_by_name(build, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build()


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="momentumm"):
        Muon([nn.Parameter(torch.ones(2, 2))], momentumm=0.9)
    with pytest.raises(TypeError, match="momentumm"):
        NorMuon([nn.Parameter(torch.ones(2, 2))], momentumm=0.9)


def test_coefficients_may_be_given() -> None:
    a, b = parameters([(8, 8)]), parameters([(8, 8)])
    give(a, 0)
    give(b, 0)
    Muon(a, method="newton-schulz").step()
    Muon(b, method="newton-schulz", coefficients=NEWTON_SCHULZ).step()
    assert torch.equal(a[0], b[0])
