"""Attention behind one function, whatever computes it.

`attend(q, k, v, documents_BT=..., window=...)` is causal, never crosses a document boundary, and with a window looks at
most so many tokens back. On a CPU short windows are computed block by block, so the cost grows with tokens * window.
`reference_attend` is the slow, obvious version that tests compare everything with.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_BLOCK = 32  # shorter blocks cost more in small matrix products than they save
DENSE_LENGTH = 256  # up to here a window saves too little to be worth compiled code of its own


def describe_backend(device: torch.device) -> tuple[str, str]:
    """(name, reason) of what computes attention on this device."""
    if device.type == "cuda":
        return "sdpa", "PyTorch picks flash or memory-efficient kernels on this GPU"
    return "sdpa", f"the only backend with a backward pass on {device.type}; short windows block by block"


def window_is_data(device: torch.device, length: int) -> bool:
    """Whether windows are best passed as tensors: in short rows on a CPU one compiled graph then serves all of them."""
    return device.type == "cpu" and length <= DENSE_LENGTH


def visible(query_positions: Tensor, key_positions: Tensor, window: int | Tensor | None) -> Tensor:
    """(..., T, S) bool: True where a query may look at a key: not ahead, at most `window` tokens back."""
    back = query_positions[..., :, None] - key_positions[..., None, :]
    return back >= 0 if window is None else (back >= 0) & (back <= window)


def document_mask(documents_BT: Tensor, window: int | Tensor | None = None) -> Tensor:
    """(B, 1, T, T) bool: True where query t may look at key s, i.e. s <= t in the same document and window."""
    t = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same & visible(t, t, window))[:, None]


def attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    documents_BT: Tensor | None = None,
    window: int | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention over heads, (B, T, H, K). A window that is a tensor is one that the code must not depend on."""
    T = q_BTHK.shape[1]
    if isinstance(window, int) and 2 * max(window, MIN_BLOCK) < T:
        return attend_locally(q_BTHK, k_BTHK, v_BTHK, documents_BT=documents_BT, window=window, scale=scale)
    mask = None
    if documents_BT is not None:
        mask = document_mask(documents_BT, window)
    elif isinstance(window, Tensor) or (window is not None and window < T - 1):
        t = torch.arange(T, device=q_BTHK.device)
        mask = visible(t, t, window)[None, None]
    return attend_masked(q_BTHK, k_BTHK, v_BTHK, mask=mask, causal=mask is None, scale=scale)


def attend_masked(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None = None
) -> Tensor:
    """Every query against every key, (B, T, H, K); `mask` is True where a query may look."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return y.transpose(1, 2)


def attend_locally(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    window: int,
    documents_BT: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same for a short window: queries in blocks of at least the window, each with its own and the block before.

    Cost: tokens * 2 * block instead of tokens * tokens.
    """
    B, T, H, K = q_BTHK.shape
    block = max(window, MIN_BLOCK)
    n = math.ceil(T / block)
    pad = n * block - T

    def blocks(x: Tensor) -> Tensor:  # (B, T, H, K) -> (B, n, block, H, K)
        return F.pad(x, (0, 0, 0, 0, 0, pad)).view(B, n, block, H, K)

    def with_previous(x: Tensor) -> Tensor:  # (B, n, block, H, K) -> (B * n, 2 * block, H, K)
        return torch.cat([F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], x], dim=2).flatten(0, 1)

    q, k, v = blocks(q_BTHK), blocks(k_BTHK), blocks(v_BTHK)
    at = torch.arange(block, device=q.device)
    mask = visible(at + block, torch.arange(2 * block, device=q.device), window)  # (block, 2 * block)
    mask = mask.expand(n, block, 2 * block)
    exists = torch.ones(n, 2 * block, dtype=torch.bool, device=q.device)
    exists[0, :block] = False  # nothing before the first block
    mask = (mask & exists[:, None, :])[None].expand(B, n, block, 2 * block)
    if documents_BT is not None:
        number = F.pad(documents_BT, (0, pad)).view(B, n, block)
        before = torch.cat([F.pad(number, (0, 0, 1, 0))[:, :-1], number], dim=2)
        mask = mask & (number[..., :, None] == before[..., None, :])
    # A padded query may see nothing at all; its row is cut off below, but must not become NaN on the way.
    mask = mask | ((at[:, None] + block) == torch.arange(2 * block, device=q.device))
    mask = mask.reshape(B * n, 1, block, 2 * block)
    y = attend_masked(q.flatten(0, 1), with_previous(k), with_previous(v), mask=mask, causal=False, scale=scale)
    return y.reshape(B, n * block, H, K)[:, :T]


def reference_attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    documents_BT: Tensor | None = None,
    window: int | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition, one score matrix at a time, in float64."""
    B, T, _, K = q_BTHK.shape
    q, k, v = (x.double().transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(K))  # (B, H, T, T)
    if documents_BT is None:
        documents_BT = torch.zeros(B, T, dtype=torch.long, device=q.device)
    scores = scores.masked_fill(~document_mask(documents_BT, window), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(q_BTHK.dtype)
