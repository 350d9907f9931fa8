"""The GPT. Every technique that a recipe may choose is a field of `GPTConfig`; a switch that is off costs nothing.

`GPT.features` and `Block.forward` list the techniques in the order in which they act. "modded-nanogpt" in a comment is
the repository https://github.com/KellerJordan/modded-nanogpt, whose records introduced the technique in this form.
What may change during a run is an argument of `forward`: windows, weights of the predicted tokens, tied or split.

Shapes: B rows, T positions, D width, H heads, K head width, V vocabulary, N = B * T, G gate inputs, L layers.
"""

import math
import re
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.model.attention import AttentionMask, Backend, attend, attention_mask, window_is_data
from speedrun.model.config import GPTConfig
from speedrun.model.embeddings import lookup
from speedrun.model.head import logits_of, loss_sum, targets_ahead
from speedrun.model.rotary import frequencies, rotary_tables, rotate, stretched

__all__ = ["GPT", "MATRICES", "TABLES", "GPTConfig", "Role", "Windows", "count_parameters", "flops_per_token"]

Role = Literal[
    "embed", "head", "embed2", "values", "attention_qkv", "attention_out", "mlp_up", "mlp_down",
    "gates", "smear_gate", "skip_gates", "x0", "scalars",
]  # fmt: skip
"""What a parameter is for. Optimizers, counts and the dry run ask for the role and never look at a name."""

ROLES: dict[str, Role] = {  # by the name of the parameter without the numbers of lists
    "embed": "embed", "head": "head", "embed2": "embed2", "value_embeds": "values",
    "blocks.attention.qkv.weight": "attention_qkv", "blocks.attention.out.weight": "attention_out",
    "blocks.mlp.up.weight": "mlp_up", "blocks.mlp.down.weight": "mlp_down",
    "blocks.attention.gate": "gates", "blocks.attention.value_gate": "gates",
    "smear_gate": "smear_gate", "skip_gates": "skip_gates", "x0_lambdas": "x0",
    "blocks.attention.lambdas": "scalars", "blocks.attention.value_lambdas": "scalars",
    "residual_lambdas": "scalars", "smear_lambda": "scalars", "smear_mtp_lambda": "scalars",
    "skip_lambdas": "scalars", "backout_lambdas": "scalars",
}  # fmt: skip
MATRICES: tuple[Role, ...] = ("attention_qkv", "attention_out", "mlp_up", "mlp_down")
"""Matrices inside the blocks: what Muon can train, and what may be stored in bfloat16."""
TABLES: tuple[Role, ...] = ("embed", "embed2", "values", "head")
"""Matrices with a row for each token of the vocabulary."""
COUNTED_AS: dict[Role, str] = {
    "embed": "embedding", "embed2": "embedding", "head": "head", "values": "value embeddings",
    **dict.fromkeys(MATRICES, "blocks"),
    **dict.fromkeys(("gates", "smear_gate", "skip_gates", "x0", "scalars"), "gates and scalars"),
}  # fmt: skip


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
        nn.init.uniform_(self.weight, -bound, bound)  # also where all are zero: later draws stay what they were

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
        self.qkv = CastedLinear(c.width, 3 * c.width)
        self.out = CastedLinear(c.width, c.width)
        self.long = layer in c.long_layers
        if c.attention_gates:
            self.gate = nn.Parameter(torch.zeros(c.heads, c.gate_inputs))
        if c.value_gates and layer in dict(c.value_layers):
            self.value_gate = nn.Parameter(torch.zeros(c.heads, c.gate_inputs))
        if c.attention_lambdas:
            self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))
        if c.value_lambdas:
            self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x_BTD: Tensor, value_BTD: Tensor | None, args: AttentionArgs) -> Tensor:
        B, T, D = x_BTD.shape
        c = self.config
        # Muon's updates have a fixed size; two learned numbers let a layer's output be large or small.
        scales = self.lambdas if c.attention_lambdas else (None, None)
        qkv = self.qkv(x_BTD, scales[0])
        q, k, v = qkv.view(B, T, 3, c.heads, c.head_width).unbind(2)  # each (B, T, H, K)
        if c.qk_norm:  # bounded scores allow a high learning rate (arXiv:2010.04245)
            q, k = norm(q, c.norm_eps), norm(k, c.norm_eps)
        # Scores depend on the distance of two tokens (arXiv:2104.09864), stretched by YaRN (arXiv:2309.00071).
        q, k = rotate(q, args.cos, args.sin), rotate(k, args.cos, args.sin)
        v = self.mix_values(v, x_BTD, value_BTD)
        if c.key_offset and self.long:
            k = self.partial_key_offset(k, args.follows_BT)
        # Most layers look back only a short window: nearby tokens matter most, and the cost falls with the window.
        window = None if args.windows is None else (args.windows.long if self.long else args.windows.short)
        y = attend(q, k, v, window=window, scale=args.scale, shared=args.mask)
        if c.attention_gates:  # softmax weights sum to 1; a gate lets a head add nothing (arXiv:2505.06708)
            y = y * gate(x_BTD, self.gate)[..., None]
        return self.out(y.reshape(B, T, D), scales[1])

    def mix_values(self, v_BTHK: Tensor, x_BTD: Tensor, value_BTD: Tensor | None) -> Tensor:
        """Add the value embeddings of the tokens: many parameters, hardly any arithmetic (modded-nanogpt)."""
        c = self.config
        if c.value_norm:
            v_BTHK = norm(v_BTHK, c.norm_eps)
        if c.value_lambdas:
            v_BTHK = self.value_lambdas[0] * v_BTHK
        if value_BTD is None:
            return v_BTHK
        extra = value_BTD.view_as(v_BTHK)
        if c.value_gates:
            extra = extra * (2 * gate(x_BTD, self.value_gate))[..., None]
        return v_BTHK + (self.value_lambdas[1] * extra if c.value_lambdas else extra)

    def partial_key_offset(self, k_BTHK: Tensor, follows_BT: Tensor | None) -> Tensor:
        """The channels that do not rotate get the key of the previous token (modded-nanogpt).

        A query that matches a token then finds the token after it: induction in one layer instead of two.
        """
        quarter = self.config.head_width // 4
        shifted = shift_tokens(k_BTHK, k_BTHK[:, :1])
        if follows_BT is not None:
            shifted = torch.where(follows_BT[..., None, None], shifted, k_BTHK)
        parts = k_BTHK.split(quarter, dim=-1), shifted.split(quarter, dim=-1)
        return torch.cat([parts[0][0], parts[1][1], parts[0][2], parts[1][3]], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = CastedLinear(config.width, config.mlp_width)
        self.down = CastedLinear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        # The square of ReLU is cheaper than GELU, and learns a little better (Primer, arXiv:2109.08668).
        return self.down(F.gelu(h) if self.activation == "gelu" else F.relu(h).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        c = self.config = config
        # A layer in which attention or MLP gains less than its time costs does without it (modded-nanogpt).
        self.has_attention, self.has_mlp = layer not in c.no_attention, layer not in c.no_mlp
        if self.has_attention:
            self.attention = Attention(c, layer)
        if self.has_mlp:
            self.mlp = MLP(c)

    def forward(self, x_BTD: Tensor, value_BTD: Tensor | None, args: AttentionArgs) -> Tensor:
        c, x = self.config, x_BTD
        if self.has_attention:
            y = self.attention(norm(x, c.norm_eps) if c.attention_norm else x, value_BTD, args)
            if c.attention_residual == "depth":  # keeps the residual stream from growing with the number of layers
                y = y * (1 / math.sqrt(2 * c.layers))
            x = x + y
        if self.has_mlp:
            x = x + self.mlp(norm(x, c.norm_eps))
        return x

    def reset(self) -> None:
        c = self.config  # zero_init: a block whose last matrices are zero begins by adding nothing
        if self.has_attention:
            self.attention.qkv.reset(c.init_scale)
            self.attention.out.reset(c.init_scale, zero=c.zero_init)
        if self.has_mlp:
            self.mlp.up.reset(c.mlp_init_scale or c.init_scale)
            self.mlp.down.reset(c.init_scale, zero=c.zero_init)


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
        if c.second_embedding:
            self.embed2 = nn.Parameter(torch.empty(c.vocab, c.width))
        self.value_embeds = nn.ParameterList(torch.empty(c.vocab, c.width) for _ in range(c.value_tables))
        if c.residual_lambdas:
            self.residual_lambdas = nn.Parameter(torch.full((c.layers,), c.residual_lambdas))
        if c.x0_lambdas:
            self.x0_lambdas = nn.Parameter(torch.zeros(c.layers, 2 if c.second_embedding else 1))
        if c.smear:
            self.smear_lambda = nn.Parameter(torch.zeros(1))
            self.smear_gate = nn.Parameter(torch.zeros(1, c.gate_inputs))
        if c.smear_mtp:
            self.smear_mtp_lambda = nn.Parameter(torch.zeros(1))
        if c.skips:
            self.skip_lambdas = nn.Parameter(torch.full((len(c.skips),), -1.5 if c.skip_form == "sigmoid" else 1.0))
        if c.skip_gates:
            self.skip_gates = nn.Parameter(torch.zeros(len(c.skips), c.gate_inputs))
        if c.backout >= 0:
            self.backout_lambdas = nn.Parameter(torch.tensor([0.5] if c.backout_form == "subtract" else [1.0, 0.0]))

        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.windows_so_far: tuple[int, ...] = ()
        self.sampling_windows: Windows | None = None
        self.sampling_tied = False
        self._positions(context)
        self.reset_parameters()

    def param_roles(self) -> dict[str, Role]:
        """The role of each parameter by its name, in the order of `named_parameters`."""
        return {name: ROLES[re.sub(r"\.\d+", "", name)] for name, _ in self.named_parameters()}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights; gates, lambdas and everything else that starts at a fixed number has it already."""
        c = self.config
        for table in [self.embed] if self.head is None else [self.embed, self.head]:
            if c.embed_std > 0:
                nn.init.normal_(table, std=c.embed_std)
            else:
                nn.init.uniform_(table, -1 / math.sqrt(c.width), 1 / math.sqrt(c.width))
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset()
        if c.second_embedding:
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
        for role, p in zip(self.param_roles().values(), self.parameters(), strict=True):
            if role in MATRICES:
                p.data = p.data.to(dtype)

    def head_weight(self, tied: bool) -> Tensor:
        """The table that makes the logits.

        One table for embedding and head is half the memory, and each learns from the other (arXiv:1608.05859).
        """
        return self.embed if self.head is None or (tied and self.config.tied) else self.head

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
        # Predicting several tokens ahead gives a young model more to learn from each position (arXiv:2404.19737).
        ahead = 1 if predict_M is None else len(predict_M)
        targets_MN = targets_ahead(targets_BT, ahead, None if self.config.across_documents else documents_BT)
        # Logits are bounded by a soft cap (Gemma 2, arXiv:2408.00118), and may be computed in 8-bit floats.
        weight = self.head_weight(tied)
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
        c = self.config
        (B, T), device = ids_BT.shape, ids_BT.device
        mask = attention_mask(
            self.backend, B, T, device, windows or (None,), documents_BT, edges=edges, longest=longest
        )
        args = self.attention_args(T, mask, documents_BT, windows)
        x = lookup(self.embed, ids_BT)
        values = [lookup(table, ids_BT) for table in self.value_embeds]
        if c.smear:
            # Add a gated share of the previous token's embedding: pairs of tokens without attention (modded-nanogpt).
            x = x + self.smear_lambda * gate(x, self.smear_gate) * previous_token(x, args.follows_BT)
        if c.embed_norm:  # frequent and rare tokens enter with the same size
            x = norm(x, c.norm_eps)
        x0 = [x]
        if c.second_embedding:  # what later layers need to know of a token may differ from what the first needs
            x0.append(norm(lookup(self.embed2, ids_BT), c.norm_eps))
        tables, kept = dict(c.value_layers), {c.backout, *(source for source, _ in c.skips)}
        outputs: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            for n, (source, target) in enumerate(c.skips):
                if target == layer:
                    # An early output, and the gradient on its way back, skips the layers between (modded-nanogpt).
                    x = x + self.skip_weight(n, x0[0]) * outputs[source]
            x = self.mix_x0(layer, x, x0)
            x = block(x, values[tables[layer]] if layer in tables else None, args)
            if layer in kept:
                outputs[layer] = x
        x = self.backout(x, outputs[c.backout]) if c.backout >= 0 else norm(x, c.norm_eps)
        if c.smear_mtp:  # the head, too, reads a share of the previous position
            x = x + self.smear_mtp_lambda * previous_token(x, args.follows_BT)
        return x

    def attention_args(
        self, T: int, mask: AttentionMask, documents_BT: Tensor | None, windows: Windows | WindowData | None
    ) -> AttentionArgs:
        follows = None
        if documents_BT is not None and not self.config.across_documents:
            follows = documents_BT == shift_tokens(documents_BT[..., None], documents_BT[:, :1, None] - 1)[..., 0]
        # With QK norm no score is above scale * head width (before YaRN): it decides how sharp attention can get.
        scale = self.config.attention_scale or None
        return AttentionArgs(self.cos[:T], self.sin[:T], scale, mask, follows, windows)

    def mix_x0(self, layer: int, x: Tensor, x0: list[Tensor]) -> Tensor:
        """The learned mixture of residual stream and embeddings that enters a block (modded-nanogpt)."""
        if self.config.residual_lambdas:
            x = self.residual_lambdas[layer] * x
        if self.config.x0_lambdas:  # late layers still see which token it is
            for n, embedding in enumerate(x0):
                x = x + self.x0_lambdas[layer, n] * embedding
        return x

    def skip_weight(self, n: int, x0: Tensor) -> Tensor:
        """How much of a skip is taken; with gates, at each position."""
        weight = self.skip_lambdas[n]
        if self.config.skip_form == "sigmoid":
            weight = torch.sigmoid(weight)
        if self.config.skip_gates:
            weight = weight * 2 * gate(x0, self.skip_gates[n : n + 1])
        return weight

    def backout(self, x: Tensor, output: Tensor) -> Tensor:
        """The final norm, with the output of a middle layer subtracted or mixed in (modded-nanogpt)."""
        eps = self.config.norm_eps
        if self.config.backout_form == "subtract":
            # What a middle layer wrote for the layers after it is not what the head should read.
            return norm(x - self.backout_lambdas[0] * output, eps)
        # What the head should read may also be found in a middle layer.
        return self.backout_lambdas[0] * norm(x, eps) + self.backout_lambdas[1] * norm(output, eps)

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
    for role, p in zip(model.param_roles().values(), model.parameters(), strict=True):
        counts[COUNTED_AS[role]] = counts.get(COUNTED_AS[role], 0) + p.numel()
    return counts
