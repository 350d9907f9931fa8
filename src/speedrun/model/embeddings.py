"""Token lookup whose gradient has the same bits every time.

Compiled code would add the gradients of repeated tokens with atomic additions, in whatever order the threads come. Two
custom operators keep torch.compile out of it: PyTorch's own kernel gives each thread its own rows of the table.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("speedrun::lookup", mutates_args=())
def lookup(table_VD: Tensor, ids_BT: Tensor) -> Tensor:
    """Rows of the table, (B, T, D)."""
    return F.embedding(ids_BT, table_VD)


@lookup.register_fake
def _(table_VD: Tensor, ids_BT: Tensor) -> Tensor:
    return table_VD.new_empty(*ids_BT.shape, table_VD.shape[1])


@torch.library.custom_op("speedrun::lookup_gradient", mutates_args=())
def lookup_gradient(grad_BTD: Tensor, ids_BT: Tensor, rows: int) -> Tensor:
    """(V, D): the sum of the gradients of each row's uses."""
    return torch.ops.aten.embedding_dense_backward(grad_BTD, ids_BT, rows, -1, False)


@lookup_gradient.register_fake
def _(grad_BTD: Tensor, ids_BT: Tensor, rows: int) -> Tensor:
    return grad_BTD.new_empty(rows, grad_BTD.shape[-1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    table_VD, ids_BT = inputs
    ctx.save_for_backward(ids_BT)
    ctx.rows = table_VD.shape[0]


def _backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
    (ids_BT,) = ctx.saved_tensors
    return lookup_gradient(grad_BTD.contiguous(), ids_BT, ctx.rows), None


lookup.register_autograd(_backward, setup_context=_remember)
