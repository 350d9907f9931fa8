"""Stand-ins for the two kernels of flash.py: plain torch from `cu_seqlens`, and strict about arguments."""

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from speedrun.model.attention import reference_attend

SIGNATURE = inspect.signature(varlen.varlen_attn)


def each_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, back: int) -> Tensor:
    window = None if back < 0 else back
    bounds = itertools.pairwise(cu_seqlens.tolist())
    parts = [reference_attend(*(x[None, a:b] for x in (q, k, v)), window=window, scale=scale) for a, b in bounds]
    return torch.cat(parts, dim=1)[0]


@torch.library.custom_op("tests::documents", mutates_args=())
def documents(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, back: int) -> Tensor:
    """An operator, as the kernels are: inside a graph, too, it sees the numbers."""
    lengths = cu_seqlens.diff()
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == len(q)
    assert lengths.min() >= 0
    assert lengths.max() <= max_seqlen, "a kernel does not look at what is beyond"
    return each_document(q, k, v, cu_seqlens, scale, back)


@documents.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, back: int) -> Tensor:
    return torch.empty_like(q)


def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.scale, ctx.back = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    *qkv, cu_seqlens = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in qkv]
        y = each_document(*leaves, cu_seqlens, ctx.scale, ctx.back)
    return *torch.autograd.grad(y, leaves, g), None, None, None, None


documents.register_autograd(backward, setup_context=remember)


def check(
    qkv: tuple[Tensor, ...], cu_seqlens: tuple[Tensor, ...], max_seqlen: tuple[int, ...], scale: Any, window: Any
) -> None:
    """What both kernels ask for."""
    for x in qkv:
        assert x.ndim == 3
        assert x.shape == qkv[0].shape
        assert x.stride(-1) == 1
        assert x.dtype == qkv[0].dtype
        assert x.dtype in (torch.bfloat16, torch.float16)
    for cu in cu_seqlens:
        assert cu.dtype == torch.int32
        assert cu.ndim == 1
        assert cu.is_contiguous()
        assert cu is cu_seqlens[0]
    assert [type(n) for n in max_seqlen] == [int, int]
    assert max_seqlen[0] == max_seqlen[1]
    assert type(scale) is float
    assert [type(window), *map(type, window)] == [tuple, int, int]
    assert window[0] >= -1
    assert window[1] == 0, "a key ahead would be seen"


class Kernels:
    """Both of them, and what they were called with outside of graphs."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.flash_attn_interface = self  # where the hub's builds keep it

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: Any
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls.append({"cu_seqlens": cu_seqlens.tolist(), "max_seqlen": max_seqlen, "window": window})
        return documents(q, k, v, cu_seqlens, max_seqlen, scale, window[0])

    # As published: hopper/flash_attn_interface.py in https://github.com/Dao-AILab/flash-attention
    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa) == (None,) * 7
        assert (attention_chunk, softcap, num_splits, sm_margin) == (0, 0, 1, 0)
        assert (causal, return_attn_probs) == (True, False)
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        if not torch.compiler.is_compiling():
            max_seqlen = max_seqlen_q, max_seqlen_k
            check((q, k, v), (cu_seqlens_q, cu_seqlens_k), max_seqlen, softmax_scale, window_size)
        return self.compute(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size)

    def varlen_attn(self, *args: Any, **how: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            given = {**SIGNATURE.bind(*args, **how).arguments}
            qkv = tuple(given.pop(name) for name in ("query", "key", "value"))
            cu_seqlens = given.pop("cu_seq_q"), given.pop("cu_seq_k")
            max_seqlen = given.pop("max_q"), given.pop("max_k")
            check(qkv, cu_seqlens, max_seqlen, given.pop("scale"), given.pop("window_size"))
            assert given == {}
        return self.compute(*args, how["cu_seq_q"], how["max_q"], how["scale"], how["window_size"])
