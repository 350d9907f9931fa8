"""The nearest (semi-)orthogonal matrix, by polynomials of matrix products or by SVD.

`orthogonalize(g)` maps every singular value of each matrix in `g` towards 1 and keeps the singular vectors. The
polynomial methods apply X <- a X + b (X X^T) X + c (X X^T)^2 X a few times, with fixed coefficients or with others in
each iteration; they need only matrix products, so they are fast on any device and work on whole stacks of matrices.

    update = orthogonalize(momentum)                            # Polar Express, five iterations
    update = orthogonalize(momentum, method="newton-schulz")
    update = orthogonalize(momentum, method="svd")              # exact and slow

Shapes: N matrices of m rows and n columns, s = min(m, n).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from speedrun.optim.arguments import require_choice
from speedrun.optim.polynomial import Coefficients, Program, iterate_plain, unit_norm
from speedrun.optim.state import require

Method = Literal["polar-express", "newton-schulz", "svd"]

# Tuned for steep growth near 0, not for convergence: singular values end between about 0.7 and 1.2. Keller Jordan,
# https://kellerjordan.github.io/posts/muon/.
NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),)

# One triple per iteration, steep first and gentle last: You Jiacheng, in the records of
# https://github.com/KellerJordan/modded-nanogpt and in Dion (https://github.com/microsoft/dion).
NEWTON_SCHULZ_PER_STEP: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Minimax-optimal for five iterations, made with a safety factor of 2e-2, which the norm below makes room for. Amsel et
# al., The Polar Express, https://arxiv.org/abs/2505.16932; these numbers: varunneal's record,
# https://github.com/KellerJordan/modded-nanogpt/pull/146.
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
    "svd": ((), 1.0),
}
_CLASSIC = (15 / 8, -10 / 8, 3 / 8)  # converges to 1 exactly, slowly: used when LAPACK gives up


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
    g_Nmn = g.detach().reshape(-1, *g.shape[-2:])
    orthogonalizer = Orthogonalizer([g_Nmn.shape], method, steps, coefficients, dtype, g_Nmn[:0])
    orthogonalizer.stacks[0].copy_(g_Nmn)
    return orthogonalizer.run()[0].to(g.dtype).reshape(g.shape)


def check_method(method: str, steps: int, coefficients: Coefficients | None) -> None:
    require_choice("method", method, Method)
    require(type(steps) is int and steps >= 1, "steps", steps, "at least 1, and whole")
    if coefficients is not None and not (
        isinstance(coefficients, Sequence)
        and coefficients
        and all(isinstance(triple, Sequence) and len(triple) == 3 for triple in coefficients)
    ):
        raise ValueError(f"coefficients is {coefficients!r}; it must hold triples (a, b, c), at least one.")


class Orthogonalizer:
    """`orthogonalize` for stacks (N, m, n) of certain shapes, with memory that is kept from one run to the next.

    All matrices are m x n or n x m. `stacks` is where they go; they are used up, and results need not have their dtype.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        method: str,
        steps: int,
        coefficients: Coefficients | None,
        dtype: torch.dtype,
        like: Tensor,
    ) -> None:
        self.svd, self.dtype = method == "svd", dtype
        default, self.margin = _DEFAULTS[method]
        triples = list(default if coefficients is None else coefficients)[:steps]
        self.triples = triples + triples[-1:] * (steps - len(triples))
        self.program: Program | None = None
        # Half precision has no bits to spare for completed squares, and a compiler plans its own memory.
        squares = dtype in (torch.float32, torch.float64) and all(c > 0 for _, _, c in triples)
        if squares and not self.svd and not torch.compiler.is_compiling():
            self.program = Program(shapes, self.triples, self.margin, like.to(dtype))
        if self.program is not None and dtype == like.dtype:
            self.stacks = self.program.stacks
        else:
            self.stacks = [like.new_empty(shape) for shape in shapes]

    def run(self) -> list[Tensor]:
        # The scale is taken out in at least float32: squares overflow in half precision, and that of 1e30 anywhere.
        wide = torch.promote_types(self.dtype, torch.float32)
        if self.svd:
            return [_by_svd(g_Nmn.to(wide)) for g_Nmn in self.stacks]
        if self.program is None:
            xs = [unit_norm(g_Nmn.to(wide), self.margin).to(self.dtype) for g_Nmn in self.stacks]
            return [iterate_plain(x_Nmn, self.triples) for x_Nmn in xs]
        for place, g_Nmn in zip(self.program.stacks, self.stacks, strict=True):
            place.copy_(g_Nmn)  # nothing to do where they are the same
        return self.program.run()


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
    return iterate_plain(unit_norm(x_Nmn.double(), 1.02), triples).to(x_Nmn.dtype)
