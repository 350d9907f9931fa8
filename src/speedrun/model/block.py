"""A transformer block: attention and MLP, each added to the residual stream, and the small functions that layers share.

"PR 117" in a comment is https://github.com/KellerJordan/modded-nanogpt/pull/117, and "record 20" the 20th in the table
of that repository's README; both are followed by the GitHub name of their author. Shapes: B sequences, T positions, D
width, H heads, K head width, G gate inputs.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.model.attention import AttentionMask, attend, window_is_data
from speedrun.model.config import GPTConfig
from speedrun.model.rotary import rotate


class Windows(NamedTuple):
    """How many tokens back attention looks, beside the token itself."""

    short: int
    long: int

    def for_rows(self, length: int, device: torch.device) -> "Windows | WindowData":
        """The same, as tensors where that spares compiling for each of them."""
        if not window_is_data(device, length):
            return self
        return WindowData(torch.tensor(self.short), torch.tensor(self.long))


class WindowData(NamedTuple):
    """Windows that compiled code does not depend on."""

    short: Tensor
    long: Tensor


class CastedLinear(nn.Module):
    """A weight (out, in) without bias, cast to the dtype of its input: it may be stored in bfloat16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def reset(self, scale: float, zero: bool = False) -> None:
        bound = 0.0 if zero else scale / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)  # zeros are drawn, too: later draws do not depend on them

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight if scale is None else weight * scale)


class AttentionArgs(NamedTuple):
    """What the attention of every layer needs to know about a batch: positions, masks, windows."""

    cos: Tensor
    sin: Tensor
    scale: float | None
    mask: AttentionMask
    follows_BT: Tensor | None  # True where the position before is in the same document; None: one document
    windows: Windows | WindowData | None


def norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def gate(x_BTD: Tensor, weight_HG: Tensor) -> Tensor:
    """(B, T, H): sigmoid of a linear function of the first G channels; a few channels are enough to decide."""
    return torch.sigmoid(F.linear(x_BTD[..., : weight_HG.shape[-1]], weight_HG))


def shift_tokens(x: Tensor, first: Tensor | None = None) -> Tensor:
    """Shift by one position along axis 1: each position gets the previous one, position 0 gets `first` or zeros."""
    first = torch.zeros_like(x[:, :1]) if first is None else first
    return torch.cat([first, x[:, :-1]], dim=1)


def previous_token(x_BTD: Tensor, follows_BT: Tensor | None) -> Tensor:
    """The features of the previous position, or zeros at the start of a document."""
    shifted = shift_tokens(x_BTD)
    return shifted if follows_BT is None else shifted * follows_BT[..., None]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        c = self.config = config
        self.qkv = CastedLinear(c.dim, 3 * c.dim)
        self.out = CastedLinear(c.dim, c.dim)
        self.long = layer in c.attention.long_layers
        if c.attention.gates:
            self.gate = nn.Parameter(torch.zeros(c.num_heads, c.gate_inputs))
        if c.embeddings.value_gates and layer in dict(c.embeddings.value_layers):
            self.value_gate = nn.Parameter(torch.zeros(c.num_heads, c.gate_inputs))
        if c.attention.lambdas:
            self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))
        if c.embeddings.value_lambdas:
            self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x_BTD: Tensor, value_BTD: Tensor | None, args: AttentionArgs) -> Tensor:
        B, T, D = x_BTD.shape
        c = self.config
        # Muon's updates have a fixed size; two learned numbers let a layer's output be large or small (PR 166,
        # roeeshenberg, and PR 168, ChrisJMcCormick).
        scales = self.lambdas if c.attention.lambdas else (None, None)
        qkv = self.qkv(x_BTD, scales[0])
        q, k, v = qkv.view(B, T, 3, c.num_heads, c.head_dim).unbind(2)  # each (B, T, H, K)
        # Bounded scores allow a high learning rate (Henry et al., https://arxiv.org/abs/2010.04245).
        if c.attention.qk_norm:
            q, k = norm(q, c.norm_eps), norm(k, c.norm_eps)
        # Scores depend on the distance of two tokens: see rotary.py.
        q, k = rotate(q, args.cos, args.sin), rotate(k, args.cos, args.sin)
        v = self.mix_values(v, x_BTD, value_BTD)
        if c.attention.key_offset and self.long:
            k = self.partial_key_offset(k, args.follows_BT)
        # Most layers look back only a short window: nearby tokens matter most, and the cost falls with the window
        # (Gemma 2, https://arxiv.org/abs/2408.00118; record 20, leloykun and others).
        window = None if args.windows is None else (args.windows.long if self.long else args.windows.short)
        y = attend(q, k, v, window=window, scale=args.scale, shared=args.mask)
        # Softmax weights sum to 1; a gate lets a head add nothing (Qiu et al., https://arxiv.org/abs/2505.06708; read
        # from few channels: PR 117, classiclarryd).
        if c.attention.gates:
            y = y * gate(x_BTD, self.gate)[..., None]
        return self.out(y.reshape(B, T, D), scales[1])

    def mix_values(self, v_BTHK: Tensor, x_BTD: Tensor, value_BTD: Tensor | None) -> Tensor:
        """Add the value embeddings of the tokens: many parameters, hardly any arithmetic (record 14, KoszarskyB; gates:
        PR 186, classiclarryd)."""
        c = self.config
        if c.attention.value_norm:
            v_BTHK = norm(v_BTHK, c.norm_eps)
        if c.embeddings.value_lambdas:
            v_BTHK = self.value_lambdas[0] * v_BTHK
        if value_BTD is None:
            return v_BTHK
        extra = value_BTD.view_as(v_BTHK)
        if c.embeddings.value_gates:
            extra = extra * (2 * gate(x_BTD, self.value_gate))[..., None]
        return v_BTHK + (self.value_lambdas[1] * extra if c.embeddings.value_lambdas else extra)

    def partial_key_offset(self, k_BTHK: Tensor, follows_BT: Tensor | None) -> Tensor:
        """The channels that do not rotate get the key of the previous token (PR 169, classiclarryd).

        A query that matches a token then finds the token after it: induction in one layer instead of two.
        """
        quarter = self.config.head_dim // 4
        shifted = shift_tokens(k_BTHK, k_BTHK[:, :1])
        if follows_BT is not None:
            shifted = torch.where(follows_BT[..., None, None], shifted, k_BTHK)
        parts = k_BTHK.split(quarter, dim=-1), shifted.split(quarter, dim=-1)
        return torch.cat([parts[0][0], parts[1][1], parts[0][2], parts[1][3]], dim=-1)


# The square of ReLU is cheaper than GELU, and learns a little better (Primer, So et al.,
# https://arxiv.org/abs/2109.08668).
ACTIVATIONS: dict[Literal["gelu", "relu2"], Callable[[Tensor], Tensor]]
ACTIVATIONS = {"gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = CastedLinear(config.dim, config.mlp_dim)
        self.down = CastedLinear(config.mlp_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        c = self.config = config
        # A layer in which attention or MLP gains less than its time costs does without it (PR 120, EmelyanenkoK;
        # PR 131, classiclarryd).
        self.has_attention, self.has_mlp = layer not in c.no_attention, layer not in c.no_mlp
        if self.has_attention:
            self.attention = Attention(c, layer)
        if self.has_mlp:
            self.mlp = MLP(c)

    def forward(self, x_BTD: Tensor, value_BTD: Tensor | None, args: AttentionArgs) -> Tensor:
        c, x = self.config, x_BTD
        if self.has_attention:
            y = self.attention(norm(x, c.norm_eps) if c.attention.norm else x, value_BTD, args)
            # depth: the residual stream does not grow with the number of layers
            scales: dict[Literal["one", "depth"], float] = {"one": 1.0, "depth": 1 / math.sqrt(2 * c.num_layers)}
            scale = scales[c.attention.residual_scale]
            x = x + (y if scale == 1 else y * scale)
        if self.has_mlp:
            x = x + self.mlp(norm(x, c.norm_eps))
        return x

    def reset(self) -> None:
        c = self.config  # zero_init: a block whose last matrices are zero begins by adding nothing
        if self.has_attention:
            self.attention.qkv.reset(c.init.scale)
            self.attention.out.reset(c.init.scale, zero=c.init.zero_init)
        if self.has_mlp:
            self.mlp.up.reset(c.init.mlp_scale or c.init.scale)
            self.mlp.down.reset(c.init.scale, zero=c.init.zero_init)
