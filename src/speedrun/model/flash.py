"""Flash Attention 3 for Hopper GPUs: a kernel from the hub, through the optional package `kernels`.

It takes documents one after another, not a mask: rows are laid end to end, and `edges` says where each document begins.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HUB = ("kernels-community/flash-attn3", "varunneal/flash-attention-3")  # the hub's own build, then the records'

_varlen: Callable[..., Any] | None = None  # a plain global: torch.compile looks through it, not through a cache


class Unavailable(Exception):
    """Why there is no kernel, as the end of a sentence."""


def load() -> str:
    """Fetch the kernel once (the hub keeps it on disk); returns where it came from."""
    global _varlen
    try:
        from kernels import get_kernel
    except ImportError as e:
        raise Unavailable("the package `kernels` is not installed (pip install 'speedrun[gpu]')") from e
    problems = []
    for name in HUB:
        # Newer versions of the package load other people's builds only when told which ones.
        trusts = "trust_remote_code" in inspect.signature(get_kernel).parameters
        more = {"trust_remote_code": [name]} if trusts else {}
        try:
            module = get_kernel(name, version=1, **more)
            _varlen = getattr(module, "flash_attn_interface", module).flash_attn_varlen_func
            return name
        except Exception as e:  # whatever a download or a foreign binary may raise: the next one, or another backend
            problems.append(f"{name}: {type(e).__name__}")
    raise Unavailable(f"no kernel could be loaded from the hub ({'; '.join(problems)})")


def edges_of(documents_BT: Tensor) -> Tensor:
    """(documents + 1,) int32: where each document begins in the rows laid end to end, and where the last one ends.

    A row begins a document, whatever number the row before ended with.
    """
    begins = torch.ones_like(documents_BT, dtype=torch.bool)
    begins[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=documents_BT.numel()).int()


def row_edges(B: int, T: int, device: torch.device) -> Tensor:
    """The same where every row is one document."""
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)


def attend_flash(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    edges: Tensor,
    longest: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """`longest`: no document has more tokens. The grid of the backward pass grows with it."""
    assert _varlen is not None, "load() comes first"
    B, T, H, K = q_BTHK.shape
    y = _varlen(
        *(x.reshape(B * T, H, K) for x in (q_BTHK, k_BTHK, v_BTHK)),
        cu_seqlens_q=edges,
        cu_seqlens_k=edges,
        max_seqlen_q=longest,  # a bound: the longest document's own length would compile anew for every batch
        max_seqlen_k=longest,
        softmax_scale=1 / math.sqrt(K) if scale is None else scale,
        causal=True,
        window_size=(-1 if window is None else window, 0),
    )
    y = y[0] if isinstance(y, tuple) else y  # some builds return the log-sums beside it
    return y.view(B, T, H, K)
