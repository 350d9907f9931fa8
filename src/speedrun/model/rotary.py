"""Rotary position tables.

Channel c of a head is paired with channel c + K/2 and turned by position * frequency; the pair (x1, x2) becomes
(x1 cos + x2 sin, x2 cos - x1 sin).
"""

import torch
from torch import Tensor


def rotary_tables(length: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, 1, head_width / 2), float32; the middle axis broadcasts over heads."""
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)  # (K/2,)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)  # (T, K/2)
    return angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]


def rotate(x_BTHK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    x1, x2 = x_BTHK.chunk(2, dim=-1)
    cos, sin = cos_T1K.to(x1.dtype), sin_T1K.to(x1.dtype)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)
