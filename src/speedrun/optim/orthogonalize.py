"""The nearest (semi-)orthogonal matrix, by polynomials of matrix products or by SVD.

`orthogonalize(g)` maps every singular value of each matrix in `g` towards 1 and keeps the singular vectors. The
polynomial methods apply X <- a X + b (X X^T) X + c (X X^T)^2 X a few times, with fixed coefficients or with others in
each iteration; they need only matrix products, so they are fast on any device and work on whole stacks of matrices.

    update = orthogonalize(momentum)                            # Polar Express, five iterations
    update = orthogonalize(momentum, method="newton-schulz")
    update = orthogonalize(momentum, method="svd")              # exact and slow

Shapes: N matrices of m rows and n columns, s = min(m, n).
"""

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["polar-express", "newton-schulz", "svd"]
Coefficients = Sequence[tuple[float, float, float]]

# Tuned for steep growth near 0, not for convergence: singular values end between about 0.7 and 1.2.
NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),)

# One triple per iteration, steep first and gentle last.
NEWTON_SCHULZ_PER_STEP: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Minimax-optimal for five iterations, made with a safety factor of 2e-2, which the norm below makes room for.
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

_DEFAULTS: dict[str, tuple[Coefficients, float]] = {  # coefficients, and how far below 1 the norm is brought
    "polar-express": (POLAR_EXPRESS, 1.02),
    "newton-schulz": (NEWTON_SCHULZ, 1.0),
}
_CLASSIC = (15 / 8, -10 / 8, 3 / 8)  # converges to 1 exactly, slowly: used when LAPACK gives up

# Above this ratio of the sides, iterating on the s x s Gram matrix needs fewer FLOPs than on the matrix itself: with
# five iterations 2 r + 17 against 10 r + 5 products of s^3.
_GRAM_RATIO = 1.5
_GRAM_STEPS = 5
_MIRROR_SIDE, _PANELS = (
    512,
    4,
)  # from this side on, mirroring beats computing: 0.9 of the time at 768; measured on a CPU


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA; float32 elsewhere, as most CPUs multiply bfloat16 several times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@torch.no_grad()
def orthogonalize(
    g: Tensor,
    method: Method = "polar-express",
    steps: int = 5,
    coefficients: Coefficients | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The orthogonal factor of each matrix in `g` (..., m, n), in the dtype of `g`.

    The result does not depend on the scale of a matrix, from 1e-30 to 1e+30. Zeros stay zeros. With fewer triples than
    `steps` the last one repeats. `dtype` is that of the arithmetic; None takes what the device is fast at, but never
    less than float64 for a float64 matrix. No gradient flows through it.
    """
    check_method(method, steps, coefficients)
    if g.ndim < 2:
        raise ValueError(f"orthogonalize needs at least 2 dimensions, got shape {tuple(g.shape)}.")
    if not g.is_floating_point():
        raise ValueError(f"orthogonalize needs a real floating-point tensor, got {g.dtype}.")
    if g.numel() == 0:
        return g.clone()
    if dtype is None:
        dtype = torch.float64 if g.dtype == torch.float64 else fast_dtype(g.device)
    return orthogonalize_stack(g.reshape(-1, *g.shape[-2:]), method, steps, coefficients, dtype).to(g.dtype).view_as(g)


def check_method(method: str, steps: int, coefficients: Coefficients | None) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; it must be one of: {', '.join(get_args(Method))}.")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1.")
    if coefficients is not None and (not coefficients or any(len(triple) != 3 for triple in coefficients)):
        raise ValueError(f"coefficients is {coefficients!r}; it must hold triples (a, b, c), at least one.")


def orthogonalize_stack(
    g_Nmn: Tensor, method: str, steps: int, coefficients: Coefficients | None, dtype: torch.dtype
) -> Tensor:
    """What `orthogonalize` does, on a stack and without casting back: the result has `dtype`, or that of SVD."""
    if method == "svd":
        return _by_svd(g_Nmn.to(torch.float64 if dtype == torch.float64 else torch.float32))
    default, margin = _DEFAULTS[method]
    triples = list(default if coefficients is None else coefficients)[:steps]
    triples += triples[-1:] * (steps - len(triples))
    # Half precision has no bits to spare for completed squares.
    square = dtype in (torch.float32, torch.float64) and all(c > 0 for _, _, c in triples)
    first, shifts = complete_squares(triples) if square else (1.0, [])
    # The scale is taken out in at least float32: in half precision squares overflow, and 1e30 squared does anywhere.
    x_Nmn = _unit_norm(g_Nmn.to(torch.promote_types(dtype, torch.float32)), margin / first).to(dtype)
    if not square:
        return iterate_plain(x_Nmn, triples)
    m, n = x_Nmn.shape[-2:]
    # Each iteration on the Gram matrix magnifies its rounding errors, which after eight or more of them swamp the
    # result for a rank-deficient matrix.
    if steps <= _GRAM_STEPS and max(m, n) > _GRAM_RATIO * min(m, n):
        return iterate_gram(x_Nmn, shifts)
    return iterate_direct(x_Nmn, shifts)


def multiplications(rows: int, cols: int, steps: int, dtype: torch.dtype) -> int:
    """In the products for one matrix, by the route that it takes."""
    short, long = sorted((rows, cols))
    if dtype in (torch.float32, torch.float64) and steps <= _GRAM_STEPS and long > _GRAM_RATIO * short:
        return 2 * short * short * long + (4 * steps - 3) * short**3
    return steps * (2 * short * short * long + short**3)


def _unit_norm(x_Nmn: Tensor, margin: float) -> Tensor:
    """Each matrix over (its Frobenius norm * margin), without overflow or underflow on the way. Zeros stay zeros."""
    sum_N11 = torch.linalg.vector_norm(x_Nmn, 1, dim=(-2, -1), keepdim=True)
    x_Nmn = x_Nmn / torch.where(sum_N11 > 0, sum_N11 / x_Nmn[0].numel(), 1)
    norm_N11 = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True)  # at least 1, unless the matrix is zero
    return x_Nmn.mul_(norm_N11.clamp_(min=1).mul_(margin).reciprocal_())


def iterate_plain(x_Nmn: Tensor, triples: Coefficients) -> Tensor:
    """X <- a X + (b S + c S^2) X with S = X X^T, or the mirror image for tall matrices: three products an iteration."""
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    for a, b, c in triples:
        s_Nss = x_Nmn.mT @ x_Nmn if tall else x_Nmn @ x_Nmn.mT
        s_Nss = torch.baddbmm(s_Nss, s_Nss, s_Nss, beta=b, alpha=c)
        x_Nmn = torch.baddbmm(x_Nmn, *((x_Nmn, s_Nss) if tall else (s_Nss, x_Nmn)), beta=a)
    return x_Nmn


Shifts = list[tuple[float, float]]


def complete_squares(triples: Coefficients) -> tuple[float, Shifts]:
    """The same polynomials as (S + beta I)^2 + gamma I: products and two changes of a diagonal, no sums of matrices.

    With t X in place of X the polynomial becomes r (a + b S + c S^2), where r = t^4 / c makes the coefficient of the
    square 1; the next X comes out as r t times what it was. Going backwards from 1, every t follows, and the first one
    is all that has to be multiplied.
    """
    t, shifts = 1.0, []
    for a, b, c in reversed(triples):
        t = (c * t) ** 0.2
        r = t**4 / c
        beta = r * b / (2 * t * t)
        shifts.append((beta, r * a - beta * beta))
    return t, shifts[::-1]


def iterate_direct(x_Nmn: Tensor, shifts: Shifts) -> Tensor:
    """What `iterate_plain` does, from an X that has been multiplied by the first factor of `complete_squares`.

    X is used up: products go to and fro between a few buffers, since fresh memory is slow memory.
    """
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    side = min(x_Nmn.shape[-2:])
    s_Nss, p_Nss = (x_Nmn.new_empty(len(x_Nmn), side, side) for _ in range(2))
    other_Nmn = torch.empty_like(x_Nmn, memory_format=torch.contiguous_format)
    for beta, gamma in shifts:
        _symmetric(x_Nmn.mT, x_Nmn, s_Nss) if tall else _symmetric(x_Nmn, x_Nmn.mT, s_Nss)
        _diagonal(s_Nss).add_(beta)
        _symmetric(s_Nss, s_Nss, p_Nss)
        _diagonal(p_Nss).add_(gamma)
        torch.bmm(*((x_Nmn, p_Nss) if tall else (p_Nss, x_Nmn)), out=other_Nmn)
        x_Nmn, other_Nmn = other_Nmn, x_Nmn
    return x_Nmn


def iterate_gram(x_Nmn: Tensor, shifts: Shifts) -> Tensor:
    """The same, with all iterations on S = X X^T and one product with X at the end.

    One iteration multiplies X by P = (S + beta I)^2 + gamma I. P and S commute, so S becomes P S P, and the product of
    all P is applied to X once. All of these are symmetric.
    """
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    side = min(x_Nmn.shape[-2:])
    spare = [x_Nmn.new_empty(len(x_Nmn), side, side) for _ in range(4)]
    s_Nss = _symmetric(x_Nmn.mT, x_Nmn, spare.pop()) if tall else _symmetric(x_Nmn, x_Nmn.mT, spare.pop())
    product_Nss: Tensor | None = None
    for k, (beta, gamma) in enumerate(shifts):
        diagonal_Ns = _diagonal(s_Nss).clone()
        _diagonal(s_Nss).add_(beta)
        p_Nss = _symmetric(s_Nss, s_Nss, spare.pop())
        _diagonal(p_Nss).add_(gamma)
        _diagonal(s_Nss).copy_(diagonal_Ns)
        if k + 1 < len(shifts):
            half_Nss = _symmetric(s_Nss, p_Nss, spare.pop())
            _symmetric(p_Nss, half_Nss, s_Nss)
            spare.append(half_Nss)
        if product_Nss is None:
            product_Nss = p_Nss
        else:
            longer_Nss = _symmetric(product_Nss, p_Nss, spare.pop())
            spare += [product_Nss, p_Nss]
            product_Nss = longer_Nss
    assert product_Nss is not None
    return x_Nmn @ product_Nss if tall else product_Nss @ x_Nmn


def _diagonal(x_Nss: Tensor) -> Tensor:
    return x_Nss.diagonal(dim1=-2, dim2=-1)


def _symmetric(a_Nsk: Tensor, b_Nks: Tensor, out_Nss: Tensor) -> Tensor:
    """A product that is known to be symmetric. Of a large one on a CPU, what lies right of the panels is mirrored.

    The panels are bands of rows, each computed up to where the diagonal leaves it.
    """
    s = a_Nsk.shape[-2]
    if s < _MIRROR_SIDE or a_Nsk.device.type != "cpu":
        return torch.bmm(a_Nsk, b_Nks, out=out_Nss)
    edges = [s * i // _PANELS for i in range(_PANELS + 1)]
    bands = list(itertools.pairwise(edges))
    for start, end in bands:
        torch.bmm(a_Nsk[:, start:end], b_Nks[:, :, :end], out=out_Nss[:, start:end, :end])
    for start, end in bands[:-1]:
        out_Nss[:, start:end, end:] = out_Nss[:, end:, start:end].mT
    return out_Nss


def _by_svd(g_Nmn: Tensor) -> Tensor:
    """U V^T over the directions whose singular value is not rounding noise."""
    largest_N11 = torch.linalg.vector_norm(g_Nmn, torch.inf, dim=(-2, -1), keepdim=True)
    x_Nmn = g_Nmn / torch.where(largest_N11 > 0, largest_N11, 1)
    try:
        u, sigma_Ns, vh = torch.linalg.svd(x_Nmn, full_matrices=False)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return _converged(x_Nmn)
    noise = max(g_Nmn.shape[-2:]) * torch.finfo(g_Nmn.dtype).eps
    keep_Ns = sigma_Ns > noise * sigma_Ns[..., :1]
    return (u * keep_Ns.unsqueeze(-2)) @ vh


def _converged(x_Nmn: Tensor) -> Tensor:
    """What SVD gives, without LAPACK: Polar Express, then an iteration whose only limit is 1, in float64."""
    triples = [*POLAR_EXPRESS, *[POLAR_EXPRESS[-1]] * 10, *[_CLASSIC] * 10]
    return iterate_plain(_unit_norm(x_Nmn.double(), 1.02), triples).to(x_Nmn.dtype)
