"""The orthogonalisers: against float64 formulas, over scales, shapes, ranks, and where LAPACK fails."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedrun.optim import polynomial
from speedrun.optim.orthogonalize import (
    NEWTON_SCHULZ_PER_STEP,
    POLAR_EXPRESS,
    Orthogonalizer,
    fast_dtype,
    orthogonalize,
)
from speedrun.optim.polynomial import Program, iterate_plain, multiplications, tile_rows
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


@pytest.mark.parametrize("shape", [(200, 800), (800, 200), (200, 200)])
@pytest.mark.parametrize("rank", [1, 7, 150])
def test_so_do_those_that_are_cut_into_blocks(shape, rank) -> None:
    g = matrices(rank, shape[0], rank) @ matrices(rank + 1, rank, shape[1])
    assert torch.linalg.matrix_norm(orthogonalize(g).double(), 2) <= 1.25


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
@pytest.mark.parametrize("by_gram", [False, True], ids=["direct", "gram"])
@pytest.mark.parametrize("shape", [(4, 24, 96), (4, 96, 24), (2, 48, 48), (1, 30, 41)])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_program_is_the_plain_polynomial(shape, triples, by_gram, blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both routes, whatever the shape, and with symmetric matrices in one piece or in blocks, also uneven ones."""
    monkeypatch.setattr(polynomial, "by_gram", lambda *_: by_gram)
    monkeypatch.setattr(polynomial, "tile_rows", lambda *_: blocks)
    g = matrices(1, *shape)
    plain = iterate_plain(g.double() / (g.double().norm(dim=(-2, -1), keepdim=True) * 1.02), triples).float()
    program = Program([shape], triples, 1.02, g)
    for _ in range(2):  # it can be run again, whatever the first run left behind
        program.stacks[0].copy_(g)
        (out,) = program.run()
        torch.testing.assert_close(out, plain, atol=5e-4 if by_gram else 5e-6, rtol=0)


@pytest.mark.parametrize(("side", "blocks"), [(191, 1), (192, 2), (300, 3), (577, 4)])
def test_blocks_below_the_diagonal_are_views_of_those_above(side: int, blocks: int) -> None:
    program = Program([(2, side, side)], POLAR_EXPRESS, 1.02, torch.empty(0))
    assert tile_rows(side, torch.device("cpu")) == blocks
    assert tile_rows(side, torch.device("cuda")) == 1
    found = program._symmetric(2)
    for (i, j), block in found.items():
        assert block.data_ptr() == found[j, i].data_ptr()
        assert block.shape == found[j, i].mT.shape
    assert sum(found[i, i].shape[-1] for i in range(blocks)) == side


@pytest.mark.parametrize("shapes", [[(3, 40, 10), (2, 10, 40)], [(2, 12, 10), (3, 10, 12)]], ids=["gram", "direct"])
def test_tall_and_wide_matrices_go_together(shapes) -> None:
    both = Orthogonalizer(shapes, "polar-express", 5, None, torch.float32, torch.empty(0))
    given = [matrices(n, *shape) for n, shape in enumerate(shapes)]
    for stack, g in zip(both.stacks, given, strict=True):
        stack.copy_(g)
    for out, g in zip(both.run(), given, strict=True):
        torch.testing.assert_close(out, orthogonalize(g), atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_orthogonalizer_computes_in_the_dtype_it_was_given(method, dtype) -> None:
    g = matrices(3, 2, 9, 20)
    orthogonalizer = Orthogonalizer([g.shape], method, 5, None, dtype, g)
    for _ in range(2):
        orthogonalizer.stacks[0].copy_(g)
        (out,) = orthogonalizer.run()
        assert out.dtype == (torch.float32 if method == "svd" and dtype == torch.bfloat16 else dtype)
        torch.testing.assert_close(out.to(g.dtype), orthogonalize(g, method, dtype=dtype), atol=0, rtol=0)


def test_it_can_be_compiled() -> None:
    """Inside somebody's compiled function no program is made, and the formula goes through the compiler."""
    g = matrices(4, 3, 8, 20)
    torch.testing.assert_close(torch.compile(orthogonalize, backend="eager")(g), orthogonalize(g), atol=1e-5, rtol=0)


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
