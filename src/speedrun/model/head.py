"""The output head and its loss."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of next-token losses, from float32 logits; a target of -1 does not count.

    A sum, not a mean: micro-batches and ranks may hold different numbers of tokens, and only a sum over all of them,
    divided once by the batch's tokens, is the batch's mean.
    """
    logits_NV = F.linear(x_ND, weight_VD.to(x_ND.dtype)).float()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=-1, reduction="sum")
