"""Rotary positions (RoPE), and YaRN, which stretches them when the window grows.

RoPE: Su et al., https://arxiv.org/abs/2104.09864. YaRN: Peng et al., https://arxiv.org/abs/2309.00071; applied in the
course of training: https://github.com/KellerJordan/modded-nanogpt/pull/122 (classiclarryd). The `half` form is that
of the same repository.

Channel c of a head is paired with channel c + K/2 and turned by position * frequency, so that the product of a query
and a key depends on their distance; the pair (x1, x2) becomes (x1 cos + x2 sin, x2 cos - x1 sin). In the `half` form
half of the pairs have frequency 0: they stand still, and carry what does not depend on distance.

YaRN: when the long window grows from `old` to `new` tokens, frequencies that turn less than once within the old window
are slowed by old/new, so that no distance turns further than it ever did; those that turn more than 32 times are kept,
and the scores are sharpened a little. The changes accumulate; `yarn` computes them from the list of all windows so
far, so there is no state to save.
"""

import itertools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

SLOW_TURNS, FAST_TURNS = 1.0, 32.0
SHARPEN = 0.2


def frequencies(head_dim: int, base: float, form: Literal["full", "half"] = "full") -> Tensor:
    """Radians per token of each channel pair, (K/2,), float64."""
    match form:
        case "full":
            return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        case "half":
            turning = (1 / base) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
            return F.pad(turning, (0, head_dim // 2 - head_dim // 4))


def yarn_step(frequency_K: Tensor, old: int, new: int) -> tuple[Tensor, float]:
    """Frequencies after the window grew from `old` to `new` tokens, and the factor of the scores."""
    turns = old * frequency_K / (2 * math.pi)
    keep = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0, 1)
    ratio = old / new
    return frequency_K * (ratio + keep * (1 - ratio)), 1 + SHARPEN * math.log(new / old)


def yarn(frequency_K: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, float]:
    """After all changes of the long window so far."""
    scale = 1.0
    for old, new in itertools.pairwise(windows):
        frequency_K, factor = yarn_step(frequency_K, old, new)
        scale *= factor
    return frequency_K, scale


def rotary_tables(length: int, frequency_K: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, 1, K/2), float32; the middle axis broadcasts over heads."""
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency_K)  # (T, K/2)
    return angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]


def rotate(x_BTHK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    x1, x2 = x_BTHK.chunk(2, dim=-1)
    cos, sin = cos_T1K.to(x1.dtype), sin_T1K.to(x1.dtype)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)
