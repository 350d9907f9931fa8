"""Orthogonalisation by polynomials: X <- a X + b (X X^T) X + c (X X^T)^2 X, a few times, with given coefficients.

Such a polynomial changes the singular values alone; applied a few times it takes every one of them towards 1.

`iterate_plain` is that formula. `Program` is the same in float32 and float64, where a CPU spends most of a step:

    program = Program([(12, 192, 192)], POLAR_EXPRESS, 1.02, like)      # once
    program.stacks[0].copy_(momentum)                                   # in every step
    (update,) = program.run()

Shapes: N matrices of m rows and n columns, s = min(m, n), k = max(m, n).
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]
Shifts = list[tuple[float, float]]
Tiles = dict[tuple[int, int], Tensor]  # blocks of the matrices of a stack, by row and column

# On a CPU, symmetric matrices are cut into at most MOST_TILES rows of tiles with sides of at least TILE_SIDE. Tiles
# below the diagonal are never computed: 0.8 to 0.9 of the time for sides from 192.
MOST_TILES, TILE_SIDE = 4, 96
SMALL = 1e-12  # above it, and below its inverse, a norm in float32 is right whatever the matrix


def unit_norm(x_Nmn: Tensor, margin: float) -> Tensor:
    """Each matrix over (its Frobenius norm * margin), in place and without overflow or underflow. Zeros stay zeros."""
    norm_N11 = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True)
    reading_is_cheap = x_Nmn.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (reading_is_cheap and ((norm_N11 > SMALL) & (norm_N11 < 1 / SMALL)).all()):
        sum_N11 = torch.linalg.vector_norm(x_Nmn, 1, dim=(-2, -1), keepdim=True)
        x_Nmn.div_(torch.where(sum_N11 > 0, sum_N11 / x_Nmn[0].numel(), 1))
        norm_N11 = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True).clamp_(min=1)  # it is, but for zeros
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


def tile_rows(side: int, device: torch.device) -> int:
    return max(1, min(side // TILE_SIDE, MOST_TILES)) if device.type == "cpu" else 1


def by_gram(rows: int, cols: int, steps: int) -> bool:
    """Whether the Gram matrix needs less: 2 r + 17 products of s^3, not 10 r + 5. Beyond five steps, errors grow.

    Amsel et al., The Polar Express, appendix F: fast polynomial iteration for rectangular matrices
    (https://arxiv.org/abs/2505.16932).
    """
    return max(rows, cols) > 1.5 * min(rows, cols) and steps <= 5


class Program:
    """The polynomials for stacks of certain shapes: memory of its own, and a list of operations on it.

    Made once and run in every step: allocating memory, slicing it, and computing the mirrored half of symmetric
    matrices would double the time on a CPU. Tall and wide matrices of the same sides go together.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], triples: Coefficients, margin: float, like: Tensor) -> None:
        first, shifts = complete_squares(triples)
        self.margin, self.like = margin / first, like
        self.stacks = [like.new_empty(shape) for shape in shapes]  # matrices go here, and are used up
        self.operations: list[Callable[[], object]] = []
        side, gram = min(shapes[0][1:]), by_gram(shapes[0][1], shapes[0][2], len(shifts))
        blocks = tile_rows(side, like.device)
        self.bands = [slice(side * i // blocks, side * (i + 1) // blocks) for i in range(blocks)]
        self.sizes = [band.stop - band.start for band in self.bands]
        self.whole_Nss = like.new_empty((sum(shape[0] for shape in shapes), side, side))
        self.results = self._gram(shifts) if gram else [self._direct(x_Nmn, shifts) for x_Nmn in self.stacks]

    def run(self) -> list[Tensor]:
        """The orthogonal factors of what is in the stacks, until the next run."""
        for x_Nmn in self.stacks:
            unit_norm(x_Nmn, self.margin)
        for operation in self.operations:
            operation()
        return self.results

    def _direct(self, x_Nmn: Tensor, shifts: Shifts) -> Tensor:
        """X <- P X with P = (S + beta I)^2 + gamma I and S = X X^T; products go to and fro between two memories."""
        now_Nsk = x_Nmn.mT if is_tall(x_Nmn) else x_Nmn
        s_Nss, p_Nss = self._symmetric(len(x_Nmn)), self._symmetric(len(x_Nmn))
        places = [self.like.new_empty(now_Nsk.shape) for _ in range(2)]
        for (beta, gamma), then_Nsk in zip(shifts, itertools.cycle(places), strict=False):
            self._product(s_Nss, self._rows(now_Nsk), plus=beta)
            self._product(p_Nss, s_Nss, s_Nss, plus=gamma)
            self._record(torch.bmm, self._assembled(p_Nss), now_Nsk, out=then_Nsk)
            now_Nsk = then_Nsk
        return now_Nsk.mT if is_tall(x_Nmn) else now_Nsk

    def _gram(self, shifts: Shifts) -> list[Tensor]:
        """The same, with all iterations on S, which becomes P S P, and one product with X at the end: all commute."""
        counts = [len(x_Nmn) for x_Nmn in self.stacks]
        s_Nss, p_Nss, half_Nss, all_Nss, more_Nss = (self._symmetric(sum(counts)) for _ in range(5))
        for end, x_Nmn in zip(itertools.accumulate(counts), self.stacks, strict=True):
            self._product({at: s[end - len(x_Nmn) : end] for at, s in s_Nss.items()}, self._rows(x_Nmn))
        diagonals = [s_Nss[i, i].diagonal(dim1=-2, dim2=-1) for i in range(len(self.bands))]
        before = [torch.empty_like(d_Nk) for d_Nk in diagonals]
        for k, (beta, gamma) in enumerate(shifts):
            factor_Nss = p_Nss if k else all_Nss
            self._record(torch._foreach_copy_, before, diagonals)
            self._record(torch._foreach_add_, diagonals, beta)
            self._product(factor_Nss, s_Nss, s_Nss, plus=gamma)
            self._record(torch._foreach_copy_, diagonals, before)
            if k + 1 < len(shifts):
                self._product(half_Nss, s_Nss, factor_Nss)
                self._product(s_Nss, factor_Nss, half_Nss)
            if k:
                self._product(more_Nss, all_Nss, p_Nss)
                all_Nss, more_Nss = more_Nss, all_Nss
        found = [torch.empty_like(x_Nmn) for x_Nmn in self.stacks]
        for x_Nmn, out_Nmn, full_Nss in zip(self.stacks, found, self._assembled(all_Nss).split(counts), strict=True):
            self._record(torch.bmm, *((x_Nmn, full_Nss) if is_tall(x_Nmn) else (full_Nss, x_Nmn)), out=out_Nmn)
        return found

    def _rows(self, x_Nmn: Tensor) -> Tiles:
        return {(i, -1): (x_Nmn.mT if is_tall(x_Nmn) else x_Nmn)[:, band] for i, band in enumerate(self.bands)}

    def _symmetric(self, count: int) -> Tiles:
        """Room for symmetric matrices; blocks below the diagonal are views of those above."""
        found: Tiles = {}
        for i, j in itertools.combinations_with_replacement(range(len(self.sizes)), 2):
            block = self.like.new_empty((count, self.sizes[i], self.sizes[j]))
            found |= {(j, i): block.mT, (i, j): block}
        return found

    def _assembled(self, s_Nss: Tiles) -> Tensor:
        """The same in one piece: products with other matrices are faster so."""
        if len(self.bands) == 1:
            return s_Nss[0, 0]
        whole_Nss = self.whole_Nss[: len(s_Nss[0, 0])]
        for (i, j), block in s_Nss.items():
            self._record(whole_Nss[:, self.bands[i], self.bands[j]].copy_, block)
        return whole_Nss

    def _product(self, out: Tiles, a: Tiles, b: Tiles | None = None, plus: float = 0.0) -> None:
        """A B + plus I, for a symmetric A B: A and B are symmetric and commute, or B is left out and means A^T."""
        b = {(k, i): block.mT for (i, k), block in a.items()} if b is None else b
        first, *rest = sorted({k for _, k in a})
        for (i, j), block in out.items():
            if i <= j:  # the others are views of these
                self._record(torch.bmm, a[i, first], b[first, j], out=block)
                for k in rest:
                    self._record(block.baddbmm_, a[i, k], b[k, j])
            if i == j and plus:
                self._record(block.diagonal(dim1=-2, dim2=-1).add_, plus)

    def _record(self, operation: Callable[..., object], *given: object, **options: object) -> None:
        self.operations.append(functools.partial(operation, *given, **options))


def multiplications(rows: int, cols: int, steps: int, dtype: torch.dtype, device: torch.device) -> float:
    """In the products for one matrix, by the route that it takes."""
    short, long = sorted((rows, cols))
    blocks = tile_rows(short, device)
    wide = dtype in (torch.float32, torch.float64)
    symmetric = (blocks + 1) / (2 * blocks) if wide else 1.0  # so much of a symmetric product is computed
    large, cube = short * short * long, short**3
    if wide and by_gram(rows, cols, steps):
        return large + symmetric * (large + (4 * steps - 3) * cube)
    return steps * (large + symmetric * (large + cube))
