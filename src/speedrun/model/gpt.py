"""The GPT. Every technique that a recipe may choose is a field of `GPTConfig`; a switch that is off costs nothing.

`GPT.features` and `Block.forward` (block.py) list the techniques in the order in which they act. "PR 130" in a comment
is https://github.com/KellerJordan/modded-nanogpt/pull/130, and "record 14" the 14th in the table of that repository's
README; both are followed by the GitHub name of their author.
What may change during a run is an argument of `forward`: windows, weights of the predicted tokens, tied or untied.

Shapes: B sequences, T positions, D width, H heads, K head width, V vocabulary, N = B * T, G gate inputs, L layers.
"""

import math
import re
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.model.attention import AttentionMask, Backend, Documents, attention_mask
from speedrun.model.block import AttentionArgs, Block, WindowData, Windows, gate, norm, previous_token, shift_tokens
from speedrun.model.config import GPTConfig
from speedrun.model.embeddings import lookup
from speedrun.model.head import logits_of, loss_sum, targets_ahead
from speedrun.model.rotary import frequencies, rotary_tables, yarn

__all__ = [
    "GPT", "MATRICES", "Documents", "GPTConfig", "Role", "Windows", "count_parameters", "flops_per_token",
]  # fmt: skip

Role = Literal[
    "embed", "head", "embed2", "values", "bigram", "attention_qkv", "attention_out", "mlp_up", "mlp_down",
    "gates", "smear_gate", "skip_gates", "x0", "scalars",
]  # fmt: skip
"""What a parameter is for. Optimizers, counts and the dry run ask for the role and never look at a name."""

# A new parameter has its name here; a new role also a word in `Role`, in `COUNTED_AS`, and the field of its name in
# `speedrun.training.optimizers.OptimConfig`.
ROLES: dict[str, Role] = {  # by the name of the parameter without the numbers of lists
    "embed": "embed", "head": "head", "embed2": "embed2", "value_embeds": "values",
    "bigram_embed": "bigram",
    "blocks.attention.qkv.weight": "attention_qkv", "blocks.attention.out.weight": "attention_out",
    "blocks.mlp.up.weight": "mlp_up", "blocks.mlp.down.weight": "mlp_down",
    "blocks.attention.gate": "gates", "blocks.attention.value_gate": "gates",
    "smear_gate": "smear_gate", "skip_gates": "skip_gates", "x0_lambdas": "x0",
    "blocks.attention.lambdas": "scalars", "blocks.attention.value_lambdas": "scalars",
    "residual_lambdas": "scalars", "smear_lambda": "scalars", "smear_mtp_lambda": "scalars",
    "skip_lambdas": "scalars", "backout_lambdas": "scalars", "bigram_lambdas": "scalars",
}  # fmt: skip
MATRICES: tuple[Role, ...] = ("attention_qkv", "attention_out", "mlp_up", "mlp_down")
"""Matrices inside the blocks: what Muon can train, and what may be stored in bfloat16."""
# The learned numbers of a form begin at these; the weight of a skip is a function of its number.
SKIP_FORMS: dict[Literal["sigmoid", "linear"], tuple[float, Callable[[Tensor], Tensor]]]
SKIP_FORMS = {"sigmoid": (-1.5, torch.sigmoid), "linear": (1.0, lambda number: number)}
BACKOUT_FORMS: dict[Literal["subtract", "mix"], list[float]] = {"subtract": [0.5], "mix": [1.0, 0.0]}
BIGRAM_SIGNS = 8192  # rows of random signs; 500 to 15,000 make no difference (PR 299)
COUNTED_AS: dict[Role, str] = {
    "embed": "embedding", "embed2": "embedding", "head": "head", "values": "value embeddings",
    "bigram": "bigram embeddings",
    **dict.fromkeys(MATRICES, "blocks"),
    **dict.fromkeys(("gates", "smear_gate", "skip_gates", "x0", "scalars"), "gates and scalars"),
}  # fmt: skip


class GPT(nn.Module):
    """Token ids in, summed next-token loss out. `logits` is for sampling."""

    def __init__(self, config: GPTConfig, context: int, backend: Backend = "sdpa") -> None:
        """`context`: the longest sequence; sizes the position tables. `backend` computes attention."""
        super().__init__()
        c = self.config = config
        self.context, self.backend = context, backend
        self.embed = nn.Parameter(torch.empty(c.vocab_size, c.dim))
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.num_layers))
        self.head = None if c.head.tied and not c.head.untie else nn.Parameter(torch.empty(c.vocab_size, c.dim))
        if c.embeddings.second:
            self.embed2 = nn.Parameter(torch.empty(c.vocab_size, c.dim))
        tables = range(c.embeddings.value_tables)
        self.value_embeds = nn.ParameterList(torch.empty(c.vocab_size, c.dim) for _ in tables)
        if c.embeddings.bigram_vocab_size:
            width = c.embeddings.bigram_dim or c.dim
            self.bigram_embed = nn.Parameter(torch.zeros(c.embeddings.bigram_vocab_size, width))
            self.bigram_lambdas = nn.Parameter(torch.full((c.num_layers,), 0.1))
            signs = torch.randint(2, (BIGRAM_SIGNS, width), generator=torch.Generator().manual_seed(0))
            self.bigram_signs: Tensor
            self.register_buffer("bigram_signs", (2 * signs - 1).to(torch.int8), persistent=False)
        if c.residual.lambdas:
            self.residual_lambdas = nn.Parameter(torch.full((c.num_layers,), c.residual.lambdas))
        if c.residual.x0_lambdas:
            self.x0_lambdas = nn.Parameter(torch.zeros(c.num_layers, 2 if c.embeddings.second else 1))
        if c.embeddings.smear:
            self.smear_lambda = nn.Parameter(torch.zeros(1))
            self.smear_gate = nn.Parameter(torch.zeros(1, c.gate_inputs))
        if c.head.smear_mtp:
            self.smear_mtp_lambda = nn.Parameter(torch.zeros(1))
        if c.residual.skips:
            initial, _ = SKIP_FORMS[c.residual.skip_form]
            self.skip_lambdas = nn.Parameter(torch.full((len(c.residual.skips),), initial))
        if c.residual.skip_gates:
            self.skip_gates = nn.Parameter(torch.zeros(len(c.residual.skips), c.gate_inputs))
        if c.residual.backout is not None:
            self.backout_lambdas = nn.Parameter(torch.tensor(BACKOUT_FORMS[c.residual.backout_form]))

        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.window_history: tuple[int, ...] = ()
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
            if c.embeddings.std is not None:
                nn.init.normal_(table, std=c.embeddings.std)
            else:
                nn.init.uniform_(table, -1 / math.sqrt(c.dim), 1 / math.sqrt(c.dim))
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset()
        if c.embeddings.second:
            nn.init.normal_(self.embed2)
        for values in self.value_embeds:
            nn.init.normal_(values, std=c.embeddings.value_std)
        if self.head is not None and c.init.zero_init:
            nn.init.zeros_(self.head)

    # ------------------------------------------------------------------ positions

    def apply_yarn(self, window_history: tuple[int, ...]) -> None:
        """Positions as YaRN leaves them after these long windows; does nothing without `yarn`."""
        if self.config.attention.yarn and window_history != self.window_history:
            self.window_history = window_history
            self._positions(len(self.cos))

    def _positions(self, length: int) -> None:
        """Tables for `length` positions; they are computed, never learned or saved."""
        c = self.config
        start = frequencies(c.head_dim, c.attention.rotary_base, c.attention.rotary)
        frequency, factor = yarn(start, self.window_history)
        # Queries and keys are both multiplied by these, so each gets the root of the scores' factor.
        cos, sin = (table * math.sqrt(factor) for table in rotary_tables(length, frequency))
        device = self.embed.device
        if self.cos.shape == cos.shape:  # in place: a compiled graph holds on to the buffers
            self.cos.copy_(cos)
            self.sin.copy_(sin)
        else:
            self.cos, self.sin = cos.to(device), sin.to(device)

    # ------------------------------------------------------------------ forward

    def untie_head(self) -> None:
        """From now on the head is a table of its own, starting as a copy of the shared one.

        While they are one, both ends are learned faster; later each does better on its own (PR 175 and 178, varunneal).
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

        One table for embedding and head is half the memory, and each learns from the other (Press and Wolf,
        https://arxiv.org/abs/1608.05859).
        """
        return self.embed if self.head is None or (tied and self.config.head.tied) else self.head

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        documents: Documents | None = None,
        *,
        windows: Windows | WindowData | None = None,
        mtp_weights_M: Tensor | None = None,
        tied: bool = True,
    ) -> Tensor:
        """Sum of the losses of all counted targets (-1 = not counted).

        Attention stays inside a document; None: every sequence is one. What follows changes with the stage of a run:
        `mtp_weights_M` weighs the losses of the next, the second next... token (None: the next one alone); `tied` is
        False once the head is untied.
        """
        x_BTD = self.features(ids_BT, documents, windows)
        # Predicting several tokens ahead gives early training more to learn from each position (Gloeckle et al.,
        # https://arxiv.org/abs/2404.19737; from one head, with falling weights: PR 178, varunneal).
        ahead = 1 if mtp_weights_M is None else len(mtp_weights_M)
        doc_ids_BT = None if documents is None or self.config.across_documents else documents.ids_BT
        targets_MN = targets_ahead(targets_BT, ahead, doc_ids_BT)
        weight = self.head_weight(tied)
        return loss_sum(
            x_BTD.flatten(0, 1), weight, targets_MN, mtp_weights_M, self.config.head, training=torch.is_grad_enabled()
        )

    def features(
        self, ids_BT: Tensor, documents: Documents | None = None, windows: Windows | WindowData | None = None
    ) -> Tensor:
        """What the head reads, (B, T, D): the techniques in the order in which they act."""
        c = self.config
        (B, T), device = ids_BT.shape, ids_BT.device
        mask = attention_mask(self.backend, B, T, device, windows or (None,), documents)
        args = self.attention_args(T, mask, documents, windows)
        x = lookup(self.embed, ids_BT)
        # Value embeddings: token tables that some layers add to their values (record 14, KoszarskyB; after Zhou et al.,
        # https://arxiv.org/abs/2410.17897).
        values = [lookup(table, ids_BT) for table in self.value_embeds]
        if c.embeddings.smear:
            # Add a gated share of the previous token's embedding: pairs of tokens without attention (PR 130,
            # classiclarryd).
            x = x + self.smear_lambda * gate(x, self.smear_gate) * previous_token(x, args.follows_BT)
        if c.embeddings.norm:  # frequent and rare tokens enter with the same size
            x = norm(x, c.norm_eps)
        x0 = [x]
        if c.embeddings.second:  # later layers may need to know something else of a token (PR 124, snimu)
            x0.append(norm(lookup(self.embed2, ids_BT), c.norm_eps))
        pairs = self.bigrams(ids_BT, args.follows_BT) if c.embeddings.bigram_vocab_size else None
        tables, backout = dict(c.embeddings.value_layers), c.residual.backout
        kept = {backout, *(source for source, _ in c.residual.skips)}
        outputs: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            for n, (source, target) in enumerate(c.residual.skips):
                if target == layer:
                    # An early output, and the gradient on its way back, skips the layers between (record 11,
                    # brendanh0gan; refined and gated in PR 159 and 186, classiclarryd).
                    x = x + self.skip_weight(n, x0[0]) * outputs[source]
            if c.residual.lambdas:  # the stream may grow or fade with depth
                x = self.residual_lambdas[layer] * x
            if c.residual.x0_lambdas:  # late layers still see which token it is (record 9, Grad62304977)
                for n, embedding in enumerate(x0):
                    x = x + self.x0_lambdas[layer, n] * embedding
            if pairs is not None:  # what follows a pair of tokens need not be computed from each of them
                x = x + self.bigram_lambdas[layer] * pairs
            x = block(x, values[tables[layer]] if layer in tables else None, args)
            if layer in kept:
                outputs[layer] = x
        x = norm(x, c.norm_eps) if backout is None else self.backout(x, outputs[backout])
        if c.head.smear_mtp:  # the head, too, reads a share of the previous position
            x = x + self.smear_mtp_lambda * previous_token(x, args.follows_BT)
        return x

    def attention_args(
        self, T: int, mask: AttentionMask, documents: Documents | None, windows: Windows | WindowData | None
    ) -> AttentionArgs:
        follows = None
        if documents is not None and not self.config.across_documents:
            number_BT = documents.ids_BT
            follows = number_BT == shift_tokens(number_BT[..., None], number_BT[:, :1, None] - 1)[..., 0]
        # With QK norm no score is above scale * head width (before YaRN): it decides how sharp attention can get.
        scale = self.config.attention.scale
        return AttentionArgs(self.cos[:T], self.sin[:T], scale, mask, follows, windows)

    def bigrams(self, ids_BT: Tensor, follows_BT: Tensor | None) -> Tensor:
        """(B, T, D): the row of each token and the one before it, by a hash. A token without one has the last row.

        Pairs that share a row see it through different signs, so that what one learns is noise of mean zero to the
        other. PR 201 (the hash, which agrees with its 32-bit one for less than 59,138 tokens) and PR 299 (the signs).
        """
        if follows_BT is None:
            follows_BT = (torch.arange(ids_BT.shape[1], device=ids_BT.device) > 0).expand_as(ids_BT)
        before_BT = shift_tokens(ids_BT) * follows_BT
        last = len(self.bigram_embed) - 1
        row_BT = torch.where(follows_BT, ((36313 * ids_BT) ^ (27191 * before_BT)) % last, last)
        signs_BTD = self.bigram_signs[(ids_BT ^ before_BT) % BIGRAM_SIGNS]
        pairs_BTD = lookup(self.bigram_embed, row_BT) * signs_BTD
        return F.pad(pairs_BTD, (0, self.config.dim - pairs_BTD.shape[-1]))

    def skip_weight(self, n: int, x0: Tensor) -> Tensor:
        """How much of a skip is taken; with gates, at each position."""
        _, form = SKIP_FORMS[self.config.residual.skip_form]
        weight = form(self.skip_lambdas[n])
        if self.config.residual.skip_gates:
            weight = weight * 2 * gate(x0, self.skip_gates[n : n + 1])
        return weight

    def backout(self, x: Tensor, output: Tensor) -> Tensor:
        """The final norm, with the output of a middle layer subtracted or mixed in (PR 140, classiclarryd)."""
        eps = self.config.norm_eps
        match self.config.residual.backout_form:
            case "subtract":  # what a middle layer wrote for the layers after it is not what the head should read
                return norm(x - self.backout_lambdas[0] * output, eps)
            case "mix":  # what the head should read may also be found in a middle layer
                return self.backout_lambdas[0] * norm(x, eps) + self.backout_lambdas[1] * norm(output, eps)

    def as_trained(self, windows: Windows | None, window_history: tuple[int, ...], tied: bool) -> None:
        """Make `logits` see what training saw last."""
        self.apply_yarn(window_history)
        self.sampling_windows, self.sampling_tied = windows, tied

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Float32 logits of the last position, (B, V)."""
        x_BD = self.features(ids_BT, windows=self.sampling_windows)[:, -1]
        return logits_of(x_BD, self.head_weight(self.sampling_tied), self.config.head)


def flops_per_token(config: GPTConfig, length: int, windows: Windows | None = None) -> float:
    """Matmul FLOPs of forward and backward per trained token: 6 per weight used, plus causal attention."""
    c = config
    attention_layers = [i for i in range(c.num_layers) if i not in c.no_attention]
    mlps = c.num_layers - len(c.no_mlp)
    weights = len(attention_layers) * 4 * c.dim**2 + mlps * 2 * c.dim * c.mlp_dim + c.vocab_size * c.dim
    seen = 0.0  # keys per query, on average
    for i in attention_layers:
        window = length if windows is None else (windows.long if i in c.attention.long_layers else windows.short)
        seen += length / 2 if window >= length else window - window**2 / (2 * length)
    return 6.0 * weights + 12 * c.dim * seen


def count_parameters(config: GPTConfig) -> dict[str, int]:
    """Parameters by kind, without allocating any."""
    with torch.device("meta"):
        model = GPT(config, 1)
    counts = {"embedding": 0, "blocks": 0}
    for role, p in zip(model.param_roles().values(), model.parameters(), strict=True):
        counts[COUNTED_AS[role]] = counts.get(COUNTED_AS[role], 0) + p.numel()
    return counts
