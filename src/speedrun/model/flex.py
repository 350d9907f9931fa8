"""FlexAttention, for GPUs without Flash Attention 3: a mask by blocks, so that what nobody sees is not computed.

The list of blocks comes from the window and from each block's first and last document. It needs no T x T table, and is
made once per batch and window for all layers.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def block_mask(B: int, T: int, device: torch.device, documents_BT: Tensor | None, window: int | None) -> BlockMask:
    """What `attention.document_mask` says, by blocks. Document numbers must rise along a row."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ok = k <= q
        if window is not None:
            ok = ok & (q - k <= window)
        if documents_BT is not None:
            ok = ok & (documents_BT[b, q] == documents_BT[b, k])
        return ok

    n = -(-T // BLOCK)
    first = torch.arange(n, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp(max=T - 1)
    some = first[:, None] >= first  # (n, n): queries down, keys across
    whole = first[:, None] > first  # every query of the one sees every key of the other: no mask inside
    if window is not None:
        some = some & (first[:, None] - last <= window)
        whole = whole & (last[:, None] - first <= window)
    some, whole = some.expand(B, 1, n, n), whole.expand(B, 1, n, n)
    if documents_BT is not None:
        low, high = documents_BT[:, first], documents_BT[:, last]  # (B, n)
        some = some & (low[:, :, None] <= high[:, None, :])[:, None]
        whole = whole & (low[:, None, :] == high[:, :, None])[:, None]
    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(some & whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(T, T)
    )


def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which ones first) of the key blocks in each row of a table, the form BlockMask takes."""
    count = blocks.sum(-1, dtype=torch.int32)
    return count, blocks.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()


@functools.cache
def compiled_flex() -> Any:
    """On its own FlexAttention would compute the whole T x T table; only compiled it follows the blocks."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # every window and scale
    return torch.compile(flex_attention, dynamic=False)


def attend_flex(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, mask: BlockMask, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    call: Any = flex_attention
    if q.device.type != "cpu" and not torch.compiler.is_compiling():
        call = compiled_flex()
    return call(q, k, v, block_mask=mask, scale=scale).transpose(1, 2)
