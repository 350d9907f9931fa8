"""Attention over documents laid end to end, by one of two kernels for NVIDIA GPUs.

`fa3` is Flash Attention 3, for Hopper: a kernel from the hub, through the optional package `kernels`. `varlen` is
torch's own `varlen_attn`, Flash Attention 2, from Ampere on. Neither takes a mask, but the offsets of
documents, `cu_seqlens`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["fa3", "varlen"]
HUB = ("kernels-community/flash-attn3", "varunneal/flash-attention-3")  # the hub's own build, then the records'
# Keywords of cu_seqlens (twice), the longest document (twice), the scale and the window; torch's own is
# causal by its window, and deterministic where torch is.
KEYWORDS: dict[Kernel, tuple[str, ...]] = {
    "fa3": ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "window_size",
            "causal", "deterministic"),
    "varlen": ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"),
}  # fmt: skip

_fa3: Callable[..., Any] | None = None  # a plain global: torch.compile looks through it, not through a cache


class Unavailable(Exception):
    """Why there is no kernel, as the end of a sentence."""


def brief(e: Exception) -> str:
    """Type and first line."""
    return ": ".join([type(e).__name__, *str(e).strip().splitlines()[:1]])


def load(try_out: Callable[[], None]) -> None:
    """Fetch the kernel once (the hub keeps it on disk) and try it."""
    global _fa3
    try:
        from kernels import get_kernel
    except Exception as e:  # also a package that is there and broken
        raise Unavailable(f"the package `kernels` cannot be imported ({brief(e)})") from e
    problems = []
    for name in HUB:
        try:
            # By the branch of version 1: its name stays in the hub's cache, and is found there without network.
            module = get_kernel(name, revision="v1", trust_remote_code=[name])
            _fa3 = getattr(module, "flash_attn_interface", module).flash_attn_varlen_func
            check_keywords(_fa3)
            try_out()
            return
        except Exception as e:  # whatever a download or a foreign binary may raise: the next one, or another backend
            problems.append(f"{name}: {brief(e)}")
    _fa3 = None
    raise Unavailable(f"none of the hub's builds works ({'; '.join(problems)})")


def check_keywords(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    missing = [name for name in KEYWORDS["fa3"] if name not in parameters]
    if missing:
        raise TypeError(f"another version, whose flash_attn_varlen_func does not take {', '.join(missing)}")


def cu_seqlens_of(doc_ids_BT: Tensor) -> Tensor:
    """(documents + 1,) int32: where each document begins in the rows laid end to end, and where the last one ends.

    A row begins a document, whatever number the row before ended with.
    """
    begins = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    begins[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=doc_ids_BT.numel()).int()


def row_cu_seqlens(B: int, T: int, device: torch.device) -> Tensor:
    """The same where every row is one document."""
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)


def attend_flash(
    kernel: Kernel,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """`max_seqlen`: no document has more tokens. The grid of the backward pass grows with it.

    It is a bound: the longest document's own length would compile anew for every batch.
    """
    function = _fa3
    if kernel == "varlen":
        from torch.nn.attention.varlen import varlen_attn as function  # only here: it takes a second
    assert function is not None, "load() comes first"
    B, T, H, K = q_BTHK.shape
    scale = 1 / math.sqrt(K) if scale is None else scale
    seen = (-1 if window is None else window, 0)  # tokens back and ahead; -1: all
    deterministic = torch.are_deterministic_algorithms_enabled()
    values = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, seen, True, deterministic)
    how: dict[str, Any] = dict(zip(KEYWORDS[kernel], values, strict=False))
    y = function(*(x.reshape(B * T, H, K) for x in (q_BTHK, k_BTHK, v_BTHK)), **how)
    y = y[0] if isinstance(y, tuple) else y  # some builds return the log-sums beside it
    return y.view(B, T, H, K)
