"""The output head: bounded logits, losses of the next tokens, and a matrix product in 8-bit floats.

Shapes: B sequences, T positions, N = B * T, D width, V vocabulary, M predicted tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.model.config import HeadConfig

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Logits are made in pieces of at most this many bytes. On a CPU: larger blocks do not stay in the allocator, and
# touching fresh memory in every step is slow. On a GPU: the logits of a quarter of a million tokens fit nowhere.
CPU_BYTES, GPU_BYTES = 2**23, 2**34
MOST_PIECES = 8  # each one is compiled
SAFE_LIMIT = 80.0  # exp of what a soft cap keeps below this, summed over any vocabulary, is finite in float32
WITHOUT_FP8 = ("mps",)  # devices on which torch has no 8-bit floats at all


def softcap(z: Tensor, config: HeadConfig) -> Tensor:
    """Logits kept within bounds, in the form the config names.

    With bounds no token can become so unlikely that its one appearance ruins a step. tanh: Gemma 2,
    https://arxiv.org/abs/2408.00118; the others are of https://github.com/KellerJordan/modded-nanogpt: sigmoid with a
    shift of 5 and a temperature of 7.5 is its pull request 181 (classiclarryd), isru the 7th record of its medium track
    (YouJiacheng).
    """
    c = config.softcap_limit
    match config.softcap:
        case "tanh":
            return c * torch.tanh(z / c)
        case "sigmoid":
            return c * torch.sigmoid((z + config.softcap_shift) / config.softcap_temperature)
        case "isru":
            return c * z * torch.rsqrt(z.square() + c * c)  # cheaper than tanh
        case None:
            return z


def logits_of(x_ND: Tensor, weight_VD: Tensor, config: HeadConfig, training: bool = False) -> Tensor:
    """Float32 logits."""
    if training and config.fp8 and x_ND.device.type not in WITHOUT_FP8:
        z = fp8_linear(x_ND, weight_VD, *config.fp8_scales)
    else:
        z = F.linear(x_ND, weight_VD.to(x_ND.dtype))
    return softcap(z.float(), config)


def log_total(logits: Tensor, config: HeadConfig) -> Tensor:
    """Logarithm of the sum of exponentials over the last axis. Bounded logits need no pass that finds the largest."""
    if config.softcap and config.softcap_limit <= SAFE_LIMIT:
        return logits.exp().sum(-1).log()
    return logits.logsumexp(-1)


def targets_ahead(targets_BT: Tensor, count: int, doc_ids_BT: Tensor | None = None) -> Tensor:
    """(count, N): for each position the next, the second next... target; -1 beyond the sequence or in another
    document."""
    found = [targets_BT]
    for k in range(1, count):
        target = F.pad(targets_BT[:, k:], (0, k), value=-1)
        if doc_ids_BT is not None:
            target = torch.where(F.pad(doc_ids_BT[:, k:], (0, k), value=-1) == doc_ids_BT, target, -1)
        found.append(target)
    return torch.stack(found).flatten(1)


def chosen(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """The target's logit at each position, and any number where the target is -1.

    In compiled code for a GPU a comparison becomes part of the kernel that sums the exponentials, and of the one that
    makes their gradient. The gradient of a gather is a float32 table of its own, for each predicted token.
    """
    compiled = logits_NV.is_cuda and torch.compiler.is_compiling()
    return (compared if compiled else gathered)(logits_NV, target_N)


def gathered(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    return logits_NV.gather(1, target_N.clamp(min=0)[:, None]).squeeze(1)


def compared(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    numbers_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    return torch.where(numbers_V == target_N[:, None], logits_NV, 0).sum(-1)


def loss_sum(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_MN: Tensor,
    weights_M: Tensor | None,
    config: HeadConfig,
    training: bool = False,
) -> Tensor:
    """Sum over positions and k < M of weights[k] * loss of the target k + 1 tokens ahead (`targets_ahead`), all from
    the float32 logits of one position; a target of -1 does not count. Without weights each counts once.

    Early in a run, features that also predict the second and third next token are worth learning.
    A sum, not a mean: micro-batches and ranks may hold different numbers of tokens, and only a sum over all of them,
    divided once by the batch's tokens, is the batch's mean.
    """
    rows = piece_rows(len(x_ND), weight_VD)
    pieces = zip(x_ND.split(rows), targets_MN.split(rows, dim=1), strict=True)
    losses = [surprise(logits_of(x, weight_VD, config, training), t, weights_M, config) for x, t in pieces]
    return sum(losses[1:], losses[0])


def surprise(logits_NV: Tensor, targets_MN: Tensor, weights_M: Tensor | None, config: HeadConfig) -> Tensor:
    """The same from logits."""
    total = log_total(logits_NV, config)
    loss = torch.zeros_like(total)
    for k, target in enumerate(targets_MN.unbind()):
        missed = torch.where(target >= 0, total - chosen(logits_NV, target), 0)
        loss = loss + (missed if weights_M is None else weights_M[k] * missed)
    return loss.sum()


def piece_rows(rows: int, weight_VD: Tensor) -> int:
    """How many of the head's `rows` are multiplied at once: a multiple of 16, as 8-bit products ask for."""
    limit = CPU_BYTES if weight_VD.device.type == "cpu" else GPU_BYTES
    wanted = -(-4 * rows * weight_VD.shape[0] // limit)
    return 16 * -(-rows // (16 * max(1, min(wanted, MOST_PIECES))))


# -------------------------------------------------------------------------------------------- 8-bit floats


def has_fp8_units(device: torch.device) -> bool:
    """Tensor cores for 8-bit floats: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def describe_fp8(device: torch.device) -> tuple[str, str]:
    """(what, why): how a recipe with model.head.fp8 multiplies its head on this device."""
    if device.type in WITHOUT_FP8:
        return "the arithmetic of the other matmuls instead", f"torch has no 8-bit floats on {device.type}"
    if has_fp8_units(device):
        return "8-bit floats", "this GPU has units for them"
    here = "this GPU" if device.type == "cuda" else f"the {device.type}"
    return "rounded to 8-bit floats, multiplied in wider ones instead", f"{here} has no units for 8-bit products"


def scaled_product(a8: Tensor, b8: Tensor, scale: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a b * scale for 8-bit floats, summed up in float32."""
    one, factor = (torch.tensor(s, dtype=torch.float32, device=a8.device) for s in (1.0, scale))
    if a8.device.type == "cpu" or has_fp8_units(a8.device):
        try:
            return torch._scaled_mm(a8, b8, scale_a=factor, scale_b=one, out_dtype=dtype, use_fast_accum=fast)
        except RuntimeError:
            if a8.device.type != "cpu":  # not every CPU has that kernel
                raise
    return (a8.float() @ b8.float()).mul_(scale).to(dtype)  # the same values, more slowly


@torch.library.custom_op("speedrun::fp8_product", mutates_args=())
def fp8_product(
    x_ND: Tensor, w_VD: Tensor, x_scale: float, w_scale: float, g_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x W^T in 8-bit floats, and the two operands as they were multiplied. `g_scale` is for the backward pass."""
    x8, w8 = x_ND.div(x_scale).to(E4M3), w_VD.div(w_scale).to(E4M3)
    out = scaled_product(x8, w8.t(), x_scale * w_scale, torch.bfloat16, fast=x_ND.is_cuda)
    return out, x8, w8


@fp8_product.register_fake
def _(x_ND: Tensor, w_VD: Tensor, x_scale: float, w_scale: float, g_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    if x_ND.is_cuda and any(size % 16 for size in (*x_ND.shape, *w_VD.shape)):
        raise ValueError(
            f"8-bit products on a GPU need sizes that are multiples of 16, not {tuple(x_ND.shape)} and "
            f"{tuple(w_VD.shape)}; choose such rows, width and vocabulary, or model.head.fp8 False"
        )
    out = x_ND.new_empty(x_ND.shape[0], w_VD.shape[0], dtype=torch.bfloat16)
    return out, x_ND.new_empty(x_ND.shape, dtype=E4M3), w_VD.new_empty(w_VD.shape, dtype=E4M3)


@torch.library.custom_op("speedrun::fp8_gradients", mutates_args=())
def fp8_gradients(
    g_NV: Tensor, x8_ND: Tensor, w8_VD: Tensor, x_scale: float, w_scale: float, g_scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x (bfloat16) and of W (float32), the incoming gradient in 8-bit floats with a wide exponent."""
    g8 = g_NV.div(g_scale).to(E5M2)
    dx = scaled_product(g8, w8_VD.t().contiguous().t(), g_scale * w_scale, torch.bfloat16)
    dw = scaled_product(x8_ND.t().contiguous(), g8.t().contiguous().t(), x_scale * g_scale, torch.float32)
    return dx, dw.t().contiguous()


@fp8_gradients.register_fake
def _(
    g_NV: Tensor, x8_ND: Tensor, w8_VD: Tensor, x_scale: float, w_scale: float, g_scale: float
) -> tuple[Tensor, Tensor]:
    return g_NV.new_empty(x8_ND.shape, dtype=torch.bfloat16), g_NV.new_empty(w8_VD.shape, dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, *ctx.scales = inputs
    ctx.x_dtype, ctx.w_dtype = x.dtype, w.dtype
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, g_NV: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None, None]:
    dx, dw = fp8_gradients(g_NV.contiguous(), *ctx.saved_tensors, *ctx.scales)
    return dx.to(ctx.x_dtype), dw.to(ctx.w_dtype), None, None, None


fp8_product.register_autograd(_backward, setup_context=_remember)


def fp8_linear(x_ND: Tensor, w_VD: Tensor, x_scale: float, w_scale: float, g_scale: float) -> Tensor:
    """x W^T, forward and backward in 8-bit floats; the result is bfloat16.

    The 19th record of https://github.com/KellerJordan/modded-nanogpt (YouJiacheng). The formats are those of
    Micikevicius et al., https://arxiv.org/abs/2209.05433: E4M3 for weights and activations, E5M2 for gradients.
    """
    return fp8_product(x_ND, w_VD, x_scale, w_scale, g_scale)[0]
