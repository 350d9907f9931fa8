"""bfloat16 weights that are exact float32 underneath.

A float32 has 32 bits; a bfloat16 is the upper 16 of them. So a bfloat16 weight (what the model computes with) plus the
lower 16, which the optimizer keeps as its `mantissa`, are one float32, and no update is ever lost to rounding. The
weight is the float32 cut off, not rounded: rounding could carry into the upper half, and the two would no longer fit
together.

After You Jiacheng's record of the medium track and https://github.com/KellerJordan/modded-nanogpt/pull/190.
"""

import torch
from torch import Tensor

from speedrun.optim.dtensor import full_tensor


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 whose upper bits are `high` (bfloat16) and whose lower bits are `low` (int16)."""
    bits = high.view(torch.int16).to(torch.int32).bitwise_left_shift(16)
    return bits.bitwise_or(low.to(torch.int32).bitwise_and(0xFFFF)).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper (bfloat16) and lower (int16) half of a float32. `join` is the exact inverse, for every bit pattern."""
    bits = x.contiguous().view(torch.int32)
    high = bits.bitwise_right_shift(16).to(torch.int16).view(torch.bfloat16)
    low = bits.bitwise_left_shift(16).bitwise_right_shift(16).to(torch.int16)  # sign-extended, so that it fits
    return high, low


def checksum(high: Tensor) -> int:
    """A number that depends on the bits of a bfloat16 tensor and their order: shows whether a mantissa belongs to it.

    For a DTensor it is that of the whole, however it is cut; all ranks must call this.
    """
    bits = full_tensor(high.detach()).contiguous().view(torch.int16).flatten().to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    return int(((bits + 0x9E3779B1) * (place * 0x85EBCA6B + 0xC2B2AE35)).sum().item())
