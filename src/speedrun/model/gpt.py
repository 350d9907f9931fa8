"""The GPT. Every part that a recipe may choose is a field of `GPTConfig`.

Shapes: B rows, T positions, D width, H heads, K head width, V vocabulary, N = B * T.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.errors import UserError
from speedrun.model.attention import attend, document_mask
from speedrun.model.embeddings import lookup
from speedrun.model.head import cross_entropy_sum
from speedrun.model.rotary import rotary_tables, rotate

KeyValue = tuple[Tensor, Tensor]  # what a layer remembers of earlier positions, each (B, S, H, K)


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = 4096
    """Entries of the token table."""
    layers: int = 3
    """Transformer blocks."""
    width: int = 192
    """Residual width."""
    heads: int = 3
    """Attention heads; the width must divide by them, into an even head width."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP over the residual width."""
    activation: Literal["gelu", "relu2"] = "relu2"
    """gelu (exact), or the square of ReLU."""
    qk_norm: bool = True
    """RMS-normalise queries and keys per head before the rotation."""
    rotary_base: float = 10_000.0
    """Slowest rotary wavelength over 2 pi."""
    tied: bool = False
    """One table for the embedding and the head."""
    embed_norm: bool = False
    """RMS-normalise the embedding before the first block."""
    embed_std: float = 0.05
    """Standard deviation of the initial token table; 0 means uniform within 1 / sqrt(width), torch's Linear."""
    zero_init: bool = True
    """Start the output projections of attention and MLP, and an untied head, at zero."""
    init_scale: float = 1.0
    """Other matrices start uniform within init_scale / sqrt(inputs)."""
    attention_residual: Literal["one", "depth"] = "one"
    """Factor of the attention branch in the residual sum: 1, or 1 / sqrt(2 * layers)."""
    norm_eps: float = 1e-6
    """Epsilon of every RMS norm."""

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        for name, allowed in (("activation", ("gelu", "relu2")), ("attention_residual", ("one", "depth"))):
            if getattr(self, name) not in allowed:
                raise UserError(f"model.{name} is {getattr(self, name)!r}; it must be one of: {', '.join(allowed)}.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            good = [h for h in range(1, self.width // 2 + 1) if self.width % (2 * h) == 0]
            raise UserError(
                f"model.width {self.width} does not split into {self.heads} heads of even width; "
                f"model.heads may be one of {', '.join(map(str, good)) or 'none: choose an even width'}."
            )
        if self.mlp_ratio <= 0 or int(self.mlp_ratio * self.width) < 1:
            raise UserError(f"model.mlp_ratio is {self.mlp_ratio}; it must be above 0.")
        if self.embed_std < 0 or self.init_scale < 0 or self.norm_eps < 0:
            raise UserError("model.embed_std, model.init_scale and model.norm_eps must not be negative.")
        if self.rotary_base <= 1:
            raise UserError(f"model.rotary_base is {self.rotary_base}; it must be above 1.")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        return int(self.mlp_ratio * self.width)


@dataclass
class Cache:
    """Keys and values of every layer, for generating one token at a time.

    A position sees itself and at most `window - 1` earlier ones, so text may grow beyond the length the model was
    trained on without showing it distances it has never seen.
    """

    window: int
    position: int = 0
    layers: list[KeyValue] = field(default_factory=list)


class Matrix(nn.Module):
    """A weight (out, in) without bias. The shape is all it knows: `reset` chooses the values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def reset(self, scale: float) -> None:
        bound = scale / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = Matrix(config.width, 3 * config.width)
        self.out = Matrix(config.width, config.width)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        B, T, D = x_BTD.shape
        c = self.config
        q, k, v = self.qkv(x_BTD).view(B, T, 3, c.heads, c.head_width).unbind(2)  # each (B, T, H, K)
        if c.qk_norm:
            q, k = (F.rms_norm(z, (c.head_width,), eps=c.norm_eps) for z in (q, k))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        y = attend(q, k, v, mask=mask, causal=past is None)
        return self.out(y.reshape(B, T, D)), (k, v)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Matrix(config.width, config.mlp_width)
        self.down = Matrix(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h) if self.activation == "gelu" else F.relu(h).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config), MLP(config)


class GPT(nn.Module):
    """Token ids in, summed next-token loss out. `logits` is for sampling."""

    def __init__(self, config: GPTConfig, context: int) -> None:
        """`context`: the longest row this model will see; sizes the position tables."""
        super().__init__()
        self.config, self.context = config, context
        self.embed = nn.Parameter(torch.empty(config.vocab, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab, config.width))
        self.attention_factor = 1.0 if config.attention_residual == "one" else 1 / math.sqrt(2 * config.layers)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.grow(context)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        c = self.config
        tables = [self.embed] if self.head is None else [self.embed, self.head]
        for table in tables:
            if c.embed_std > 0:
                nn.init.normal_(table, std=c.embed_std)
            else:
                nn.init.uniform_(table, -1 / math.sqrt(c.width), 1 / math.sqrt(c.width))
        for block in self.blocks:
            assert isinstance(block, Block)
            for matrix in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
                matrix.reset(c.init_scale)
            if c.zero_init:
                nn.init.zeros_(block.attention.out.weight)
                nn.init.zeros_(block.mlp.down.weight)
        if c.zero_init and self.head is not None:
            nn.init.zeros_(self.head)

    def grow(self, context: int) -> None:
        """Make the position tables reach `context` positions; the tables are computed, never learned or saved."""
        if len(self.cos) < context:
            cos, sin = rotary_tables(context, self.config.head_width, self.config.rotary_base)
            device = self.embed.device
            self.cos, self.sin = cos.to(device), sin.to(device)

    @property
    def head_weight(self) -> Tensor:
        return self.embed if self.head is None else self.head

    def trunk(self, ids_BT: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Final normalised features (B, T, D)."""
        c = self.config
        start = 0 if cache is None else cache.position
        T = ids_BT.shape[1]
        cos, sin = self.cos[start : start + T], self.sin[start : start + T]
        x = lookup(self.embed, ids_BT)
        if c.embed_norm:
            x = F.rms_norm(x, (c.width,), eps=c.norm_eps)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            past = cache.layers[i] if cache is not None and start else None
            y, present = block.attention(F.rms_norm(x, (c.width,), eps=c.norm_eps), cos, sin, mask, past)
            if cache is not None:
                old = max(0, present[0].shape[1] - cache.window + 1)
                cache.layers[i : i + 1] = [(present[0][:, old:], present[1][:, old:])]
            x = x + y * self.attention_factor if self.attention_factor != 1.0 else x + y
            x = x + block.mlp(F.rms_norm(x, (c.width,), eps=c.norm_eps))
        return F.rms_norm(x, (c.width,), eps=c.norm_eps)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Sum of the losses of all counted targets (-1 = not counted).

        `documents_BT` numbers the document of each position; attention stays inside a document. None: one document.
        """
        mask = None if documents_BT is None else document_mask(documents_BT)
        x_ND = self.trunk(ids_BT, mask).flatten(0, 1)
        return cross_entropy_sum(x_ND, self.head_weight, targets_BT.flatten())

    def logits(self, ids_BT: Tensor, cache: Cache) -> Tensor:
        """Float32 logits of the last position, (B, V). Once the cache has begun, it takes one new token at a time."""
        T = ids_BT.shape[1]
        if cache.position and T != 1:
            raise ValueError(f"a cache that has begun takes one new token at a time, not {T}")
        mask = None
        if cache.window < T:
            t = torch.arange(T, device=ids_BT.device)
            distance = t[:, None] - t[None, :]
            mask = ((distance >= 0) & (distance < cache.window))[None, None]
        x_BD = self.trunk(ids_BT, mask, cache)[:, -1]
        cache.position += T
        return F.linear(x_BD, self.head_weight.to(x_BD.dtype)).float()


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Matmul FLOPs of forward and backward per trained token: 6 per weight used, plus causal attention."""
    block = config.width * (4 * config.width + 2 * config.mlp_width)
    weights = config.layers * block + config.vocab * config.width
    attention = 6 * config.layers * config.width * length  # 12 * L * D * T, halved because it is causal
    return 6.0 * weights + attention


def count_parameters(config: GPTConfig) -> dict[str, int]:
    """Parameters by kind, without allocating any."""
    block = config.width * (4 * config.width + 2 * config.mlp_width)
    counts = {"embedding": config.vocab * config.width, "blocks": config.layers * block}
    if not config.tied:
        counts["head"] = config.vocab * config.width
    return counts
