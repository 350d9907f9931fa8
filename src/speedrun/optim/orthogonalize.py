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
import math
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
# On a CPU, symmetric matrices are cut into at most so many rows of blocks of at least this side, and those
# below the diagonal are never computed: 0.8 to 0.95 of the time for sides of 384 and 768, hardly less below.
_BLOCK_SIDE = 128
_MOST_BLOCKS = 4
_SMALL = 1e-12  # above it, and below its inverse, a norm in float32 is right whatever the matrix


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA; float32 elsewhere, as most CPUs multiply bfloat16 several times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Workspace:
    """Memory for what a step needs on the way, kept for the next step.

    On a CPU, fresh memory is slow memory: a product whose result is new runs at half the speed. GPUs have an allocator
    that keeps what was freed.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.wanted = 0

    def begin(self) -> None:
        """All of it is free again. What did not fit since the last time will fit from now on."""
        if self.wanted > len(self.memory):
            self.memory = torch.empty(self.wanted, dtype=torch.uint8)
        self.wanted = 0

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Of this shape, with the dtype and on the device of another tensor."""
        start, size = self.wanted, math.prod(shape) * like.itemsize
        if like.device.type != "cpu" or torch.compiler.is_compiling():
            return like.new_empty(shape)
        self.wanted += -(-size // 64) * 64
        if self.wanted > len(self.memory):
            return like.new_empty(shape)
        return self.memory[start : start + size].view(like.dtype).view(shape)


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
    (out_Nmn,) = orthogonalize_stacks([g.reshape(-1, *g.shape[-2:])], method, steps, coefficients, dtype)
    return out_Nmn.to(g.dtype).view_as(g)


def check_method(method: str, steps: int, coefficients: Coefficients | None) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; it must be one of: {', '.join(get_args(Method))}.")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1.")
    if coefficients is not None and (not coefficients or any(len(triple) != 3 for triple in coefficients)):
        raise ValueError(f"coefficients is {coefficients!r}; it must hold triples (a, b, c), at least one.")


def orthogonalize_stacks(
    stacks: list[Tensor],
    method: str,
    steps: int,
    coefficients: Coefficients | None,
    dtype: torch.dtype,
    space: Workspace | None = None,
) -> list[Tensor]:
    """What `orthogonalize` does, on stacks (N, m, n) whose matrices are m x n or n x m, and without casting back.

    The results have `dtype`, or that of SVD. With a workspace they lie in it, and the stacks are used up.
    """
    if method == "svd":
        return [_by_svd(g_Nmn.to(torch.float64 if dtype == torch.float64 else torch.float32)) for g_Nmn in stacks]
    default, margin = _DEFAULTS[method]
    triples = list(default if coefficients is None else coefficients)[:steps]
    triples += triples[-1:] * (steps - len(triples))
    # Half precision has no bits to spare for completed squares.
    square = dtype in (torch.float32, torch.float64) and all(c > 0 for _, _, c in triples)
    first, shifts = complete_squares(triples) if square else (1.0, [])
    # The scale is taken out in at least float32: in half precision squares overflow, and 1e30 squared does anywhere.
    wide = torch.promote_types(dtype, torch.float32)
    xs = [_unit_norm(g_Nmn.to(wide), margin / first, in_place=space is not None).to(dtype) for g_Nmn in stacks]
    if not square:
        return [iterate_plain(x_Nmn, triples) for x_Nmn in xs]
    space = space or Workspace()
    m, n = xs[0].shape[-2:]
    # Each iteration on the Gram matrix magnifies its rounding errors, which after eight or more of them swamp the
    # result for a rank-deficient matrix.
    if steps <= _GRAM_STEPS and max(m, n) > _GRAM_RATIO * min(m, n):
        return iterate_gram(xs, shifts, space)
    return [
        iterate_direct(x.mT.contiguous(), shifts, space).mT if is_tall(x) else iterate_direct(x, shifts, space)
        for x in xs
    ]


def multiplications(rows: int, cols: int, steps: int, dtype: torch.dtype, device: torch.device) -> float:
    """In the products for one matrix, by the route that it takes."""
    short, long = sorted((rows, cols))
    blocks = block_count(short, device)
    wide = dtype in (torch.float32, torch.float64)
    symmetric = (blocks + 1) / (2 * blocks) if wide else 1.0  # so much of a symmetric product is computed
    large, cube = short * short * long, short**3
    if wide and steps <= _GRAM_STEPS and long > _GRAM_RATIO * short:
        return large + symmetric * (large + (4 * steps - 3) * cube)
    return steps * (large + symmetric * (large + cube))


def _unit_norm(x_Nmn: Tensor, margin: float, in_place: bool = False) -> Tensor:
    """Each matrix over (its Frobenius norm * margin), without overflow or underflow on the way. Zeros stay zeros."""
    x_Nmn = x_Nmn if in_place else x_Nmn.clone(memory_format=torch.contiguous_format)
    norm_N11 = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True)
    asking_is_cheap = x_Nmn.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (asking_is_cheap and ((norm_N11 > _SMALL) & (norm_N11 < 1 / _SMALL)).all()):
        sum_N11 = torch.linalg.vector_norm(x_Nmn, 1, dim=(-2, -1), keepdim=True)
        x_Nmn.div_(torch.where(sum_N11 > 0, sum_N11 / x_Nmn[0].numel(), 1))
        # Now it is at least 1, unless the matrix is zero.
        norm_N11 = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True).clamp_(min=1)
    return x_Nmn.mul_(norm_N11.mul_(margin).reciprocal_())


def is_tall(x_Nmn: Tensor) -> bool:
    return x_Nmn.shape[-2] > x_Nmn.shape[-1]


def iterate_plain(x_Nmn: Tensor, triples: Coefficients) -> Tensor:
    """X <- a X + (b S + c S^2) X with S = X X^T, or the mirror image for tall matrices: three products an iteration."""
    tall = is_tall(x_Nmn)
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


def iterate_direct(x_Nsk: Tensor, shifts: Shifts, space: Workspace) -> Tensor:
    """What `iterate_plain` does, from a wide X that has been multiplied by the first factor of `complete_squares`.

    X is used up: products go to and fro between two buffers, in bands of rows where S has blocks.
    """
    s_Nss, p_Nss = (Symmetric(len(x_Nsk), x_Nsk, space) for _ in range(2))
    now = s_Nss.bands_of(x_Nsk)
    one = [space.empty(band.shape, band) for band in now]
    other = now if len(now) == 1 else [space.empty(band.shape, band) for band in now]
    for (beta, gamma), out in zip(shifts, itertools.cycle((one, other)), strict=False):
        s_Nss.gram([now]).shift(beta)
        now = p_Nss.product(s_Nss, s_Nss).shift(gamma).times(now, out)
    return now[0] if len(now) == 1 else torch.cat(now, 1, out=x_Nsk)


def iterate_gram(xs: list[Tensor], shifts: Shifts, space: Workspace) -> list[Tensor]:
    """The same, with all iterations on S = X X^T and one product with X at the end.

    One iteration multiplies X by P = (S + beta I)^2 + gamma I. P and S commute, so S becomes P S P, and the product of
    all P is applied to X once. All of these are symmetric, and wide and tall matrices go through them together.
    """
    spare = [Symmetric(sum(map(len, xs)), xs[0], space) for _ in range(4)]
    s_Nss = spare.pop()
    s_Nss.gram([s_Nss.bands_of(x_Nmn.mT if is_tall(x_Nmn) else x_Nmn) for x_Nmn in xs])
    product_Nss: Symmetric | None = None
    for k, (beta, gamma) in enumerate(shifts):
        diagonal = [d_Nk.clone() for d_Nk in s_Nss.diagonal()]
        s_Nss.shift(beta)
        p_Nss = spare.pop().product(s_Nss, s_Nss).shift(gamma)
        for d_Nk, before_Nk in zip(s_Nss.diagonal(), diagonal, strict=True):
            d_Nk.copy_(before_Nk)
        if k + 1 < len(shifts):
            half_Nss = spare.pop().product(s_Nss, p_Nss)
            s_Nss.product(p_Nss, half_Nss)
            spare.append(half_Nss)
        if product_Nss is None:
            product_Nss = p_Nss
        else:
            longer_Nss = spare.pop().product(product_Nss, p_Nss)
            spare += [product_Nss, p_Nss]
            product_Nss = longer_Nss
    assert product_Nss is not None
    found = []
    for x_Nmn, whole_Nss in zip(xs, product_Nss.whole().split([len(x) for x in xs]), strict=True):
        factors = (x_Nmn, whole_Nss) if is_tall(x_Nmn) else (whole_Nss, x_Nmn)
        found.append(torch.bmm(*factors, out=space.empty(x_Nmn.shape, x_Nmn)))
    return found


class Symmetric:
    """A stack of symmetric matrices, cut into blocks, of which those below the diagonal are never computed.

    Their side is the shorter one of `x_Nmn`. Small matrices, and all of them on a GPU, are one block.
    """

    def __init__(self, count: int, x_Nmn: Tensor, space: Workspace) -> None:
        self.count, self.side, self.x_Nmn, self.space = count, min(x_Nmn.shape[-2:]), x_Nmn, space
        blocks = block_count(self.side, x_Nmn.device)
        edges = [self.side * i // blocks for i in range(blocks + 1)]
        self.bands = [slice(*pair) for pair in itertools.pairwise(edges)]
        sizes = [band.stop - band.start for band in self.bands]
        self.blocks = {
            (i, j): space.empty((count, sizes[i], sizes[j]), x_Nmn) for i in range(blocks) for j in range(i, blocks)
        }

    def __getitem__(self, at: tuple[int, int]) -> Tensor:
        i, j = at
        return self.blocks[i, j] if i <= j else self.blocks[j, i].mT

    def bands_of(self, x_Nsk: Tensor) -> list[Tensor]:
        """The rows that belong to each row of blocks."""
        return [x_Nsk[:, band] for band in self.bands]

    def gram(self, stacks: list[list[Tensor]]) -> "Symmetric":
        """Becomes X X^T of one stack after the other, each given as its bands."""
        start = 0
        for x in stacks:
            end = start + len(x[0])
            for (i, j), out in self.blocks.items():
                torch.bmm(x[i], x[j].mT, out=out[start:end])
            start = end
        return self

    def times(self, x: list[Tensor], out: list[Tensor]) -> list[Tensor]:
        """S X, both in bands."""
        for i, band in enumerate(out):
            _sum_of_products([self[i, j] for j in range(len(x))], x, band)
        return out

    def product(self, a: "Symmetric", b: "Symmetric") -> "Symmetric":
        """Becomes A B, for matrices that commute: no other product of two symmetric ones is symmetric."""
        for (i, j), out in self.blocks.items():
            every = range(len(self.bands))
            _sum_of_products([a[i, k] for k in every], [b[k, j] for k in every], out)
        return self

    def diagonal(self) -> list[Tensor]:
        return [self.blocks[i, i].diagonal(dim1=-2, dim2=-1) for i in range(len(self.bands))]

    def shift(self, by: float) -> "Symmetric":
        """Becomes S + by I."""
        for d_Nk in self.diagonal():
            d_Nk.add_(by)
        return self

    def whole(self) -> Tensor:
        """As plain matrices (N, s, s)."""
        if len(self.bands) == 1:
            return self.blocks[0, 0]
        whole_Nss = self.space.empty((self.count, self.side, self.side), self.x_Nmn)
        for i, rows in enumerate(self.bands):
            for j, cols in enumerate(self.bands):
                whole_Nss[:, rows, cols] = self[i, j]
        return whole_Nss


def _sum_of_products(a: list[Tensor], b: list[Tensor], out: Tensor) -> None:
    torch.bmm(a[0], b[0], out=out)
    for left, right in zip(a[1:], b[1:], strict=True):
        out.baddbmm_(left, right)


def block_count(side: int, device: torch.device) -> int:
    return max(1, min(side // _BLOCK_SIDE, _MOST_BLOCKS)) if device.type == "cpu" else 1


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
