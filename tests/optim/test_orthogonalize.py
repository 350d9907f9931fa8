"""The orthogonalisers: against float64 formulas, over scales, shapes, ranks, and where LAPACK fails."""

import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedrun.optim.orthogonalize import (
    NEWTON_SCHULZ_PER_STEP,
    POLAR_EXPRESS,
    Symmetric,
    Workspace,
    block_count,
    complete_squares,
    fast_dtype,
    iterate_direct,
    iterate_gram,
    iterate_plain,
    multiplications,
    orthogonalize,
    orthogonalize_stacks,
)
from tests.optim import reference

METHODS = ["polar-express", "newton-schulz", "svd"]


def matrices(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(METHODS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.integers(0, 2),
    st.integers(0, 10_000),
)  # fmt: skip
def test_equals_the_plain_formula_for_any_shape(method, m, n, steps, batch_dims, seed) -> None:
    g = matrices(seed, *(2, 3)[:batch_dims], m, n)
    out = orthogonalize(g, method, steps)
    assert out.shape == g.shape
    assert out.dtype == g.dtype
    expected = torch.stack([reference.orthogonalize(x.double(), method, steps) for x in g.view(-1, m, n)]).view_as(out)
    # Nearly equal singular values near 0 make single entries of U V^T sensitive; sizes are around 1/sqrt(n).
    torch.testing.assert_close(out.double(), expected, atol=2e-3 if method == "svd" else 5e-4, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(METHODS), st.floats(-30, 30), st.integers(1, 24), st.integers(1, 24), st.integers(0, 1000))
def test_the_scale_of_the_matrix_does_not_matter(method, power, m, n, seed) -> None:
    """Peers add a constant to the norm: below it their result is silently not orthogonal."""
    g = matrices(seed, m, n).clamp(-3, 3).double()
    small = orthogonalize((g * 10.0**power).float(), method)
    torch.testing.assert_close(small, orthogonalize(g.float(), method), atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (3, 5, 7), (1, 1), (1, 9)])
def test_zeros_stay_zeros(method, shape) -> None:
    out = orthogonalize(torch.zeros(shape), method)
    assert torch.equal(out, torch.zeros(shape))
    some = torch.stack([torch.zeros(shape), torch.ones(shape)])
    assert torch.equal(orthogonalize(some, method)[0], torch.zeros(shape)), "also beside a matrix that is not zero"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(METHODS), st.integers(2, 32), st.integers(2, 32), st.integers(0, 31), st.integers(5, 12),
    st.integers(0, 1000),
)  # fmt: skip
def test_rank_deficient_matrices_stay_bounded(method, m, n, rank, steps, seed) -> None:
    rank = min(rank, m, n)
    g = matrices(seed, m, rank) @ matrices(seed + 1, rank, n)
    out = orthogonalize(g, method, steps)
    assert out.isfinite().all()
    assert torch.linalg.matrix_norm(out.double(), 2) <= 1.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_comes_back_in_its_own(dtype) -> None:
    g = matrices(0, 3, 12, 20).to(dtype)
    out = orthogonalize(g)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), orthogonalize(g.double()), atol=1e-2, rtol=0)


def test_bfloat16_arithmetic_can_be_forced_and_stays_close() -> None:
    g = matrices(0, 2, 32, 48)
    out = orthogonalize(g, dtype=torch.bfloat16)
    assert out.dtype == torch.float32
    assert not torch.equal(out, orthogonalize(g))
    sigma = torch.linalg.svdvals(out)
    assert sigma.min() > 0.6
    assert sigma.max() < 1.25


def test_five_iterations_bring_every_singular_value_near_one() -> None:
    """Singular values over three decades: Polar Express ends within 15 %, the fixed coefficients within 35 %."""
    u, v = (torch.linalg.qr(matrices(s, 64, 64))[0] for s in (0, 1))
    g = (u * torch.logspace(0, -2.5, 64)) @ v.T
    for method, low, high in (("polar-express", 0.85, 1.15), ("newton-schulz", 0.3, 1.25), ("svd", 0.999, 1.001)):
        sigma = torch.linalg.svdvals(orthogonalize(g, method))
        assert low < sigma.min(), method
        assert sigma.max() < high, method


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_coefficients_of_ones_own(shape) -> None:
    g = matrices(3, *shape)
    for triples, steps in ((NEWTON_SCHULZ_PER_STEP, 5), (NEWTON_SCHULZ_PER_STEP, 3), ([(1.5, -0.5, 0.0)], 7)):
        out = orthogonalize(g, "newton-schulz", steps, triples)
        torch.testing.assert_close(
            out.double(), reference.orthogonalize(g.double(), "newton-schulz", steps, triples), atol=5e-4, rtol=0
        )


@pytest.mark.parametrize("triples", [POLAR_EXPRESS, NEWTON_SCHULZ_PER_STEP], ids=["polar-express", "per-step"])
@pytest.mark.parametrize("shape", [(4, 24, 96), (4, 96, 24), (2, 48, 48)])
def test_completed_squares_and_the_gram_route_are_the_plain_polynomial(shape, triples) -> None:
    x = matrices(1, *shape)
    x /= x.norm(dim=(-2, -1), keepdim=True) * 1.02
    plain = iterate_plain(x.double(), triples).float()
    first, shifts = complete_squares(triples)
    if shape[-1] >= shape[-2]:
        torch.testing.assert_close(iterate_direct(x * first, shifts, Workspace()), plain, atol=5e-6, rtol=0)
    torch.testing.assert_close(iterate_gram([x * first], shifts, Workspace())[0], plain, atol=5e-4, rtol=0)


@pytest.mark.parametrize("shape", [(2, 9, 30), (2, 30, 9), (3, 17, 17)])
def test_blocks_below_the_diagonal_need_not_be_computed(shape, monkeypatch: pytest.MonkeyPatch) -> None:
    g = matrices(2, *shape)
    whole = orthogonalize(g)
    monkeypatch.setattr(sys.modules["speedrun.optim.orthogonalize"], "_BLOCK_SIDE", 4)  # two blocks and four
    torch.testing.assert_close(orthogonalize(g), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("side", "blocks"), [(255, 1), (256, 2), (401, 3), (577, 4)])
def test_symmetric_matrices_in_blocks_are_what_they_are_in_one_piece(side: int, blocks: int) -> None:
    x = matrices(1, 2, side, side + 3) / side**0.5
    found = Symmetric(2, x, Workspace())
    assert block_count(side, x.device) == blocks
    assert len(found.blocks) == blocks * (blocks + 1) // 2
    gram = x @ x.mT
    torch.testing.assert_close(found.gram([found.bands_of(x)]).whole(), gram, atol=1e-5, rtol=1e-5)
    square = Symmetric(2, x, Workspace()).product(found.shift(2.0), found)
    shifted = gram + 2 * torch.eye(side)
    torch.testing.assert_close(square.whole(), shifted @ shifted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(torch.cat(found.diagonal(), -1), shifted.diagonal(dim1=-2, dim2=-1))


def test_a_workspace_grows_once_and_hands_out_parts_that_do_not_overlap() -> None:
    space, like = Workspace(), torch.empty(0, dtype=torch.float64)
    for turn in range(3):
        space.begin()
        parts = [space.empty((3, 5), like), space.empty((7,), like.float()), space.empty((2, 2), like)]
        for number, part in enumerate(parts):
            part.fill_(number)
        assert [(tuple(p.shape), p.dtype) for p in parts] == [
            ((3, 5), torch.float64), ((7,), torch.float32), ((2, 2), torch.float64),
        ]  # fmt: skip
        for number, part in enumerate(parts):
            assert torch.equal(part, torch.full_like(part, number))
        shared = {p.untyped_storage().data_ptr() for p in parts}
        assert len(shared) == (3 if turn == 0 else 1)
        assert all(p.data_ptr() % 64 == 0 for p in parts)


def test_tall_and_wide_matrices_go_together() -> None:
    tall, wide = matrices(1, 3, 40, 10), matrices(2, 2, 10, 40)
    triples = (tall.clone(), wide.clone())
    both = orthogonalize_stacks([tall, wide], "polar-express", 5, None, torch.float32)
    for g, out in zip(triples, both, strict=True):
        torch.testing.assert_close(out, orthogonalize(g), atol=1e-6, rtol=0)
    assert torch.equal(tall, triples[0]), "without a workspace nothing is overwritten"


def test_multiplications_are_those_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the products are made: torch.bmm, baddbmm_ and @."""
    made = 0.0

    def counting(name: str, owner: object, first: int) -> None:
        real = getattr(owner, name)

        def counted(*args: Tensor, **options: object) -> Tensor:
            nonlocal made
            a, b = args[first : first + 2]
            made += len(a) * a.shape[-2] * a.shape[-1] * b.shape[-1]
            return real(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    counting("bmm", torch, 0)
    counting("baddbmm_", Tensor, 1)
    counting("__matmul__", Tensor, 0)
    for rows, cols in ((384, 384), (96, 384), (384, 96), (512, 800)):
        made = 0.0
        orthogonalize(matrices(0, rows, cols))
        assert made == pytest.approx(multiplications(rows, cols, 5, torch.float32, torch.device("cpu")))


def test_svd_falls_back_when_lapack_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    g = matrices(5, 2, 12, 20)
    expected = orthogonalize(g, "svd")

    def fails(*_, **__):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    torch.testing.assert_close(orthogonalize(g, "svd"), expected, atol=1e-4, rtol=0)


def test_views_and_strides_do_not_matter_and_the_input_is_kept() -> None:
    g = matrices(6, 20, 12)
    kept = g.clone()
    torch.testing.assert_close(orthogonalize(g.T), orthogonalize(g).T, atol=1e-5, rtol=0)
    torch.testing.assert_close(orthogonalize(g[::2]), orthogonalize(g[::2].contiguous()))
    assert torch.equal(g, kept)


def test_a_matrix_that_wants_gradients_is_fine_and_gets_none() -> None:
    g = matrices(7, 520, 520)
    assert torch.equal(orthogonalize(g.clone().requires_grad_()), orthogonalize(g))
    assert not orthogonalize(g.clone().requires_grad_()).requires_grad


def test_the_cpu_computes_in_float32() -> None:
    assert fast_dtype(torch.device("cpu")) == torch.float32
    assert fast_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: orthogonalize(torch.ones(3)), "at least 2 dimensions, got shape (3,)"),
        (lambda: orthogonalize(torch.ones(3, 3, dtype=torch.complex64)), "got torch.complex64"),
        (lambda: orthogonalize(torch.ones(3, 3, dtype=torch.int64)), "got torch.int64"),
        (lambda: orthogonalize(torch.ones(3, 3), "qr"), "method is 'qr'; it must be one of: polar-express"),  # type: ignore[arg-type]
        (lambda: orthogonalize(torch.ones(3, 3), steps=0), "steps is 0; it must be at least 1"),
        (lambda: orthogonalize(torch.ones(3, 3), coefficients=[]), "triples (a, b, c)"),
        (lambda: orthogonalize(torch.ones(3, 3), coefficients=[(1.0, 2.0)]), "triples (a, b, c)"),  # type: ignore[list-item]
    ],
)
def test_bad_input_is_refused_by_name(call, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


def test_an_empty_stack_is_fine() -> None:
    assert orthogonalize(torch.ones(0, 3, 4)).shape == (0, 3, 4)
