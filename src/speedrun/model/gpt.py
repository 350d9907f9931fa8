"""The GPT. Every part that a recipe may choose is a field of `GPTConfig`; a switch that is off costs nothing.

What may change during a run is an argument of `forward`: windows, weights of the predicted tokens, tied or split.

Shapes: B rows, T positions, D width, H heads, K head width, V vocabulary, N = B * T, G gate inputs, L layers.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.model.attention import Backend, Sight, attend, sight, window_is_data
from speedrun.model.config import GPTConfig
from speedrun.model.embeddings import lookup
from speedrun.model.head import logits_of, loss_sum, targets_ahead
from speedrun.model.rotary import frequencies, rotary_tables, rotate, stretched

__all__ = ["GPT", "GPTConfig", "Windows", "count_parameters", "flops_per_token"]


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


class Matrix(nn.Module):
    """A weight (out, in) without bias. The shape is all it knows: `reset` chooses the values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def reset(self, scale: float) -> None:
        bound = scale / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))  # it may be stored in bfloat16


class Place(NamedTuple):
    """Where the tokens of a forward pass are, and how far they may see."""

    cos: Tensor
    sin: Tensor
    scale: float | None
    sight: Sight
    follows_BT: Tensor | None  # True where a position may mix in the one before; None: everywhere but at 0
    windows: Windows | WindowData | None


def norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def previous(x: Tensor, before: Tensor | None = None) -> Tensor:
    """Along axis 1, what stood one position earlier; `before` is what stood before the first, or zeros."""
    first = torch.zeros_like(x[:, :1]) if before is None else before
    return torch.cat([first, x[:, :-1]], dim=1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.qkv = Matrix(config.width, 3 * config.width)
        self.out = Matrix(config.width, config.width)
        self.long = layer in config.long_layers
        self.offset = config.key_offset and self.long
        self.value_table = dict(config.value_layers).get(layer)
        gate = (config.heads, config.gate_inputs)  # a few channels are enough to decide
        self.gate = nn.Parameter(torch.zeros(gate)) if config.attention_gates else None
        gated_value = config.value_gates and self.value_table is not None
        self.value_gate = nn.Parameter(torch.zeros(gate)) if gated_value else None
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0])) if config.attention_lambdas else None
        self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5])) if config.value_lambdas else None

    def forward(self, x_BTD: Tensor, value_BTD: Tensor | None, at: Place) -> Tensor:
        B, T, D = x_BTD.shape
        c = self.config
        weight = self.qkv.weight.to(x_BTD.dtype)
        if self.lambdas is not None:
            # Muon's updates have a fixed size; two learned numbers let a layer's output be large or small.
            weight = weight * self.lambdas[0]
        q, k, v = F.linear(x_BTD, weight).view(B, T, 3, c.heads, c.head_width).unbind(2)  # each (B, T, H, K)
        if c.qk_norm:
            q, k = norm(q, c.norm_eps), norm(k, c.norm_eps)  # bounded scores, so the learning rate can be high
        q, k = rotate(q, at.cos, at.sin), rotate(k, at.cos, at.sin)
        v = self.mix_values(v, x_BTD, value_BTD)
        if self.offset:
            k = self.shift_still_channels(k, at.follows_BT)
        window = None if at.windows is None else (at.windows.long if self.long else at.windows.short)
        y = attend(q, k, v, window=window, scale=at.scale, shared=at.sight)
        if self.gate is not None:
            # Softmax makes a head attend to something; its gate lets it add nothing.
            y = y * torch.sigmoid(F.linear(x_BTD[..., : c.gate_inputs], self.gate))[..., None]
        y = y.reshape(B, T, D)
        return self.out(y) if self.lambdas is None else F.linear(y, self.out.weight.to(y.dtype) * self.lambdas[1])

    def mix_values(self, v_BTHK: Tensor, x_BTD: Tensor, value_BTD: Tensor | None) -> Tensor:
        """Values plus the rows of a table that the tokens look up: many parameters, hardly any arithmetic."""
        c = self.config
        if c.value_norm:
            v_BTHK = norm(v_BTHK, c.norm_eps)
        if self.value_lambdas is not None:
            v_BTHK = self.value_lambdas[0] * v_BTHK
        if value_BTD is None:
            return v_BTHK
        extra = value_BTD.view_as(v_BTHK)
        if self.value_gate is not None:
            extra = extra * (2 * torch.sigmoid(F.linear(x_BTD[..., : c.gate_inputs], self.value_gate)))[..., None]
        return v_BTHK + (extra if self.value_lambdas is None else self.value_lambdas[1] * extra)

    def shift_still_channels(self, k_BTHK: Tensor, follows_BT: Tensor | None) -> Tensor:
        """On the channels that do not turn, the key of the token before: so attention finds what follows a match."""
        quarter = self.config.head_width // 4
        shifted = previous(k_BTHK, k_BTHK[:, :1])
        if follows_BT is not None:
            shifted = torch.where(follows_BT[..., None, None], shifted, k_BTHK)
        parts = k_BTHK.split(quarter, dim=-1), shifted.split(quarter, dim=-1)
        return torch.cat([parts[0][0], parts[1][1], parts[0][2], parts[1][3]], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Matrix(config.width, config.mlp_width)
        self.down = Matrix(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        # The square of ReLU is cheaper than GELU, and learns a little better (Primer, arXiv:2109.08668).
        return self.down(F.gelu(h) if self.activation == "gelu" else F.relu(h).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        # Where attention is worth less than its time, a layer does without it.
        self.attention = None if layer in config.no_attention else Attention(config, layer)
        self.mlp = None if layer in config.no_mlp else MLP(config)


class GPT(nn.Module):
    """Token ids in, summed next-token loss out. `logits` is for sampling."""

    def __init__(self, config: GPTConfig, context: int, backend: Backend = "sdpa") -> None:
        """`context`: the longest row this model will see; sizes the position tables. `backend` computes attention."""
        super().__init__()
        c = self.config = config
        self.context, self.backend = context, backend
        self.embed = nn.Parameter(torch.empty(c.vocab, c.width))
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.layers))
        self.head = None if c.tied and not c.split else nn.Parameter(torch.empty(c.vocab, c.width))
        self.embed2 = nn.Parameter(torch.empty(c.vocab, c.width)) if c.second_embedding else None
        self.value_embeds = nn.ParameterList(torch.empty(c.vocab, c.width) for _ in range(c.value_tables))

        def small(wanted: bool, *values: float) -> nn.Parameter | None:
            return nn.Parameter(torch.tensor(values)) if wanted else None

        self.residual_lambdas = small(bool(c.residual_lambdas), *[c.residual_lambdas] * c.layers)
        per_layer = 2 if c.second_embedding else 1
        self.x0_lambdas = nn.Parameter(torch.zeros(c.layers, per_layer)) if c.x0_lambdas else None
        self.smear_lambda = small(c.smear, 0.0)
        self.smear_gate = nn.Parameter(torch.zeros(1, c.gate_inputs)) if c.smear else None
        self.smear_mtp_lambda = small(c.smear_mtp, 0.0)
        self.skip_lambdas = small(bool(c.skips), *[-1.5 if c.skip_form == "sigmoid" else 1.0] * len(c.skips))
        self.skip_gates = nn.Parameter(torch.zeros(len(c.skips), c.gate_inputs)) if c.skip_gates else None
        self.backout_lambdas = small(c.backout >= 0, *([0.5] if c.backout_form == "subtract" else [1.0, 0.0]))

        # `depth` keeps the residual stream from growing with the number of layers.
        self.attention_factor = 1.0 if c.attention_residual == "one" else 1 / math.sqrt(2 * c.layers)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.windows_so_far: tuple[int, ...] = ()
        self.sampling_windows: Windows | None = None
        self.sampling_tied = False
        self._positions(context)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights; gates, lambdas and everything else that starts at a fixed number has it already."""
        c = self.config
        tables = [self.embed] if self.head is None else [self.embed, self.head]
        for table in tables:
            if c.embed_std > 0:
                nn.init.normal_(table, std=c.embed_std)
            else:
                nn.init.uniform_(table, -1 / math.sqrt(c.width), 1 / math.sqrt(c.width))
        for block in self.blocks:
            assert isinstance(block, Block)
            if block.attention is not None:
                block.attention.qkv.reset(c.init_scale)
                block.attention.out.reset(c.init_scale)
            if block.mlp is not None:
                block.mlp.up.reset(c.mlp_init_scale or c.init_scale)
                block.mlp.down.reset(c.init_scale)
            if c.zero_init:  # a block whose last matrices are zero begins by adding nothing
                if block.attention is not None:
                    nn.init.zeros_(block.attention.out.weight)
                if block.mlp is not None:
                    nn.init.zeros_(block.mlp.down.weight)
        if self.embed2 is not None:
            nn.init.normal_(self.embed2)
        for values in self.value_embeds:
            nn.init.normal_(values, std=c.value_std)
        if self.head is not None and c.zero_init:
            nn.init.zeros_(self.head)

    # ------------------------------------------------------------------ positions

    def stretch(self, windows_so_far: tuple[int, ...]) -> None:
        """Positions as YaRN leaves them after these long windows; does nothing without `yarn`."""
        if self.config.yarn and windows_so_far != self.windows_so_far:
            self.windows_so_far = windows_so_far
            self._positions(len(self.cos))

    def _positions(self, length: int) -> None:
        """Tables that reach so many positions; they are computed, never learned or saved."""
        c = self.config
        frequency, factor = stretched(frequencies(c.head_width, c.rotary_base, c.rotary), self.windows_so_far)
        # Queries and keys are both multiplied by these, so each gets the root of the scores' factor.
        cos, sin = (table * math.sqrt(factor) for table in rotary_tables(length, frequency))
        device = self.embed.device
        if self.cos.shape == cos.shape:  # in place: a compiled graph holds on to the buffers
            self.cos.copy_(cos)
            self.sin.copy_(sin)
        else:
            self.cos, self.sin = cos.to(device), sin.to(device)

    # ------------------------------------------------------------------ forward

    def split_head(self) -> None:
        """From now on the head is a table of its own, starting as a copy of the shared one.

        While they are one, both ends are learned faster; later each does better on its own.
        """
        assert self.head is not None
        with torch.no_grad():
            self.head.copy_(self.embed)

    @torch.no_grad()
    def store_matrices(self, dtype: torch.dtype) -> None:
        """Keep the matrices inside the blocks in another dtype; the arithmetic stays that of the activations.

        bfloat16 is half the memory to read. With `exact_bf16` the optimizer keeps the other half of their bits.
        """
        for name, p in self.blocks.named_parameters():
            if name.endswith(".weight"):
                p.data = p.data.to(dtype)

    def head_weight(self, tied: bool) -> Tensor:
        """The table that makes the logits. One for both ends is half the memory, and each learns from the other."""
        return self.embed if self.head is None or (tied and self.config.tied) else self.head

    def trunk(self, ids_BT: Tensor, at: Place) -> Tensor:
        """Final normalised features (B, T, D)."""
        c = self.config
        x = lookup(self.embed, ids_BT)
        values = [lookup(table, ids_BT) for table in self.value_embeds]
        if self.smear_lambda is not None:
            x = self.smear(x, at)
        if c.embed_norm:
            x = norm(x, c.norm_eps)  # frequent and rare tokens enter with the same size
        x0 = x
        # What a token means deep in the network may differ from what it means at the entrance.
        x02 = None if self.embed2 is None else norm(lookup(self.embed2, ids_BT), c.norm_eps)
        sources = {a for a, _ in c.skips}
        kept: dict[int, Tensor] = {}
        out_of = None
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            for n, (source, target) in enumerate(c.skips):
                if target == i:
                    # Early outputs also reach a later layer directly, and gradients flow back the same way.
                    x = x + self.skip_weight(n, x0) * kept[source]
            x = self.mix_in(i, x, x0, x02)
            if block.attention is not None:
                table = block.attention.value_table
                inner = norm(x, c.norm_eps) if c.attention_norm else x
                y = block.attention(inner, None if table is None else values[table], at)
                x = x + y * self.attention_factor if self.attention_factor != 1.0 else x + y
            if block.mlp is not None:
                x = x + block.mlp(norm(x, c.norm_eps))
            if i in sources:
                kept[i] = x
            if i == c.backout:
                out_of = x
        x = self.take_out(x, out_of)
        if self.smear_mtp_lambda is not None:
            x = self.smear_final(x, at)
        return x

    def mix_in(self, i: int, x: Tensor, x0: Tensor, x02: Tensor | None) -> Tensor:
        """The learned mixture of residual stream and embeddings that enters block i."""
        if self.residual_lambdas is not None:
            x = self.residual_lambdas[i] * x
        if self.x0_lambdas is not None:
            x = x + self.x0_lambdas[i, 0] * x0  # late layers still see which token it is
            if x02 is not None:
                x = x + self.x0_lambdas[i, 1] * x02
        return x

    def skip_weight(self, n: int, x0: Tensor) -> Tensor:
        """How much of a skip is taken; with gates, at each position."""
        assert self.skip_lambdas is not None
        weight = self.skip_lambdas[n]
        if self.config.skip_form == "sigmoid":
            weight = torch.sigmoid(weight)
        if self.skip_gates is not None:
            read = x0[..., : self.config.gate_inputs]
            weight = weight * 2 * torch.sigmoid(F.linear(read, self.skip_gates[n : n + 1]))
        return weight

    def take_out(self, x: Tensor, out_of: Tensor | None) -> Tensor:
        eps = self.config.norm_eps
        if self.backout_lambdas is None:
            return norm(x, eps)
        assert out_of is not None
        if self.config.backout_form == "subtract":
            # What a middle layer made for the layers after it is not what the head should read.
            return norm(x - self.backout_lambdas[0] * out_of, eps)
        # What the head should read may also be found in a middle layer.
        return self.backout_lambdas[0] * norm(x, eps) + self.backout_lambdas[1] * norm(out_of, eps)

    def smear(self, x: Tensor, at: Place) -> Tensor:
        """Each embedding plus a gated share of the one before: pairs of tokens, without attention."""
        assert self.smear_lambda is not None
        assert self.smear_gate is not None
        gate = torch.sigmoid(F.linear(x[..., : self.config.gate_inputs], self.smear_gate))
        return x + self.smear_lambda * gate * self.one_before(x, at)

    def smear_final(self, x: Tensor, at: Place) -> Tensor:
        assert self.smear_mtp_lambda is not None
        return x + self.smear_mtp_lambda * self.one_before(x, at)

    def one_before(self, x: Tensor, at: Place) -> Tensor:
        before = previous(x)
        return before if at.follows_BT is None else before * at.follows_BT[..., None]

    def place(self, T: int, documents_BT: Tensor | None, windows: Windows | WindowData | None, sight: Sight) -> Place:
        follows = None
        if documents_BT is not None and not self.config.across_documents:
            follows = documents_BT == previous(documents_BT[..., None], documents_BT[:, :1, None] - 1)[..., 0]
        cos, sin = self.cos[:T], self.sin[:T]
        # With QK norm no score is above scale * head width (before YaRN): it decides how sharp attention can get.
        return Place(cos, sin, self.config.attention_scale or None, sight, follows, windows)

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        windows: Windows | WindowData | None = None,
        predict_M: Tensor | None = None,
        tied: bool = True,
        edges: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:
        """Sum of the losses of all counted targets (-1 = not counted).

        `documents_BT` numbers the document of each position; attention stays inside a document. None: one document.
        `predict_M` weighs the losses of the next, the second next... token; None: the next one alone. `tied` is False
        from the split on. `edges` are those of the documents (`flash.edges_of`), which some backends ask for; a
        compiled graph must be given them, for it cannot count documents. `longest`: no document has more tokens.
        """
        x_BTD = self.features(ids_BT, documents_BT, windows, edges, longest)
        weight = self.head_weight(tied)
        ahead = 1 if predict_M is None else len(predict_M)
        inside = None if self.config.across_documents else documents_BT
        targets_MN = targets_ahead(targets_BT, ahead, inside)
        return loss_sum(
            x_BTD.flatten(0, 1), weight, targets_MN, predict_M, self.config, training=torch.is_grad_enabled()
        )

    def features(
        self,
        ids_BT: Tensor,
        documents_BT: Tensor | None = None,
        windows: Windows | WindowData | None = None,
        edges: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:
        """What the head reads, (B, T, D)."""
        B, T = ids_BT.shape
        seen: list[int | Tensor | None] = [None] if windows is None else [*windows]
        shared = sight(self.backend, B, T, ids_BT.device, seen, documents_BT, edges, longest)
        return self.trunk(ids_BT, self.place(T, documents_BT, windows, shared))

    def as_trained(self, windows: Windows | None, windows_so_far: tuple[int, ...], tied: bool) -> None:
        """Make `logits` see what training saw last."""
        self.stretch(windows_so_far)
        self.sampling_windows, self.sampling_tied = windows, tied

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Float32 logits of the last position, (B, V)."""
        x_BD = self.features(ids_BT, windows=self.sampling_windows)[:, -1]
        return logits_of(x_BD, self.head_weight(self.sampling_tied), self.config)


def flops_per_token(config: GPTConfig, length: int, windows: Windows | None = None) -> float:
    """Matmul FLOPs of forward and backward per trained token: 6 per weight used, plus causal attention."""
    c = config
    attention_layers = [i for i in range(c.layers) if i not in c.no_attention]
    mlps = c.layers - len(c.no_mlp)
    weights = len(attention_layers) * 4 * c.width**2 + mlps * 2 * c.width * c.mlp_width + c.vocab * c.width
    seen = 0.0  # keys per query, on average
    for i in attention_layers:
        window = length if windows is None else (windows.long if i in c.long_layers else windows.short)
        seen += length / 2 if window >= length else window - window**2 / (2 * length)
    return 6.0 * weights + 12 * c.width * seen


def count_parameters(config: GPTConfig) -> dict[str, int]:
    """Parameters by kind, without allocating any."""
    with torch.device("meta"):
        model = GPT(config, 1)
    counts = {"embedding": 0, "blocks": 0}
    for name, p in model.named_parameters():
        if name in ("embed", "embed2"):
            kind = "embedding"
        elif name == "head":
            kind = "head"
        elif name.startswith("value_embeds"):
            kind = "value embeddings"
        elif p.ndim == 2 and name.startswith("blocks") and name.endswith("weight"):
            kind = "blocks"
        else:
            kind = "gates and scalars"
        counts[kind] = counts.get(kind, 0) + p.numel()
    return counts
