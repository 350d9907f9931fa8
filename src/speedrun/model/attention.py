"""Attention behind one function, whatever computes it.

`attend(q, k, v, documents=None)` is causal and never crosses a document boundary. PyTorch's scaled dot product
attention does the work; `reference_attend` is the slow, obvious version that tests compare it with.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def describe_backend(device: torch.device) -> tuple[str, str]:
    """(name, reason) of what computes attention on this device."""
    if device.type == "cuda":
        return "sdpa", "PyTorch picks flash or memory-efficient kernels on this GPU"
    return "sdpa", f"the only backend with a backward pass on {device.type}"


def document_mask(documents_BT: Tensor) -> Tensor:
    """(B, 1, T, T) bool: True where query t may look at key s, i.e. s <= t in the same document."""
    T = documents_BT.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same & causal)[:, None]


def attend(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention over heads, (B, T, H, K). With `mask` (True = visible) the mask alone decides."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
    return y.transpose(1, 2)


def reference_attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    documents_BT: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition, one score matrix at a time, in float64."""
    B, T, _, K = q_BTHK.shape
    q, k, v = (x.double().transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(K))  # (B, H, T, T)
    if documents_BT is None:
        documents_BT = torch.zeros(B, T, dtype=torch.long, device=q.device)
    scores = scores.masked_fill(~document_mask(documents_BT), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(q_BTHK.dtype)
