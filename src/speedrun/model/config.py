"""What a GPT is made of: one field per choice, in groups, checked, and a table of which layer has what.

Layers count from 0. A field that names layers or pairs of layers is checked against the number of layers, so that a
technique never falls silently out of a smaller model.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from speedrun.checks import AboveZero, Count, NotNegative, Positive, check_fields
from speedrun.errors import UserError

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AttentionConfig:
    qk_norm: bool = True
    """RMS-normalise queries and keys per head before the rotation."""
    norm: bool = True
    """RMS-normalise the input of attention."""
    value_norm: bool = False
    """RMS-normalise the values per head."""
    scale: AboveZero | None = None
    """Factor of the scores before softmax; None: 1 / sqrt(head_dim)."""
    residual_scale: Literal["one", "depth"] = "one"
    """Factor of the attention branch in the residual sum: 1, or 1 / sqrt(2 * num_layers)."""
    rotary: Literal["full", "half"] = "full"
    """full: every channel pair rotates; half: half of them do not, the others rotate by 1 to 1 / base per token."""
    rotary_base: Annotated[float, Meta(gt=1)] = 10_000.0
    """Slowest rotary wavelength over 2 pi."""
    yarn: bool = False
    """Stretch the rotary frequencies and sharpen the scores when the schedule widens the long window."""
    long_layers: tuple[int, ...] = ()
    """Layers with the long sliding window; the others have the short one. Needs windows in the schedule."""
    gates: bool = False
    """Scale each head's output by a sigmoid of the first channels of its input."""
    lambdas: bool = False
    """Two learned numbers per layer that multiply the query-key-value and the output weights (from 0.5 and 1)."""
    key_offset: bool = False
    """In long layers, the channels that do not rotate see the key of the previous token (needs rotary=half)."""


@dataclass(frozen=True)
class EmbeddingConfig:
    norm: bool = False
    """RMS-normalise the embedding before the first block."""
    std: AboveZero | None = 0.05
    """Standard deviation of the initial token table; None: uniform within 1 / sqrt(dim), as torch's Linear."""
    second: bool = False
    """A second table, normalised, mixed into every layer's input by learned numbers (needs residual.x0_lambdas)."""
    value_layers: Pairs = ()
    """(layer, table) pairs: which token table each layer adds to its values. Tables count from 0."""
    value_std: NotNegative = 0.0
    """Standard deviation of the initial value tables."""
    value_gates: bool = False
    """Scale each head's value embedding by twice a sigmoid of the first channels."""
    value_lambdas: bool = False
    """Learned numbers mix values and value embeddings (from 0.5 each)."""
    bigram_vocab_size: Annotated[int, Meta(ge=2, le=2**53)] | None = None
    """Entries of a table for pairs of tokens, which share them by a hash; None: no such table."""
    bigram_dim: Positive | None = None
    """How many of the first channels that table adds to; None: all of them."""
    smear: bool = False
    """Add a gated share of the previous token's embedding to each embedding."""

    @property
    def value_tables(self) -> int:
        return len({table for _, table in self.value_layers})


@dataclass(frozen=True)
class HeadConfig:
    tied: bool = False
    """One table for the embedding and the head."""
    untie: bool = False
    """A tied head becomes a table of its own during the run (schedule.untie_at)."""
    softcap: Literal["tanh", "sigmoid", "isru"] | None = None
    """Bound the logits z: c tanh(z / c); c sigmoid((z + shift) / temperature); c z / sqrt(z^2 + c^2); None: not."""
    softcap_limit: AboveZero = 15.0
    """The c of softcap."""
    softcap_shift: float = 0.0
    """The shift of softcap=sigmoid."""
    softcap_temperature: AboveZero = 7.5
    """The temperature of softcap=sigmoid."""
    fp8: bool = False
    """Multiply in 8-bit floats while training."""
    fp8_scales: tuple[AboveZero, AboveZero, AboveZero] = (100 / 448, 1.6 / 448, 0.75 / 448)
    """Divisors of features, weights and gradients before the cast to 8-bit floats (speedrun.training.scale)."""
    smear_mtp: bool = False
    """Add a learned share of the previous position's final features before the head."""


@dataclass(frozen=True)
class ResidualConfig:
    lambdas: AboveZero | None = None
    """Initial value of a learned factor of the residual stream before each block; None: no factor."""
    x0_lambdas: bool = False
    """Add a learned share of the first embedding before each block (from 0)."""
    skips: Pairs = ()
    """(from, to) pairs: the output of one layer is added to the input of a later one."""
    skip_form: Literal["sigmoid", "linear"] = "sigmoid"
    """The learned weight of a skip: a sigmoid that starts at 0.18, or a number that starts at 1."""
    skip_gates: bool = False
    """Scale each skip by twice a sigmoid of the first channels of the first embedding."""
    backout: Count | None = None
    """Layer whose output is removed again before the head; None: no layer."""
    backout_form: Literal["subtract", "mix"] = "subtract"
    """subtract: x - 0.5 out; mix: 1 norm(x) + 0 norm(out), the numbers learned from there."""


@dataclass(frozen=True)
class InitConfig:
    zero_init: bool = True
    """Start the output projections of attention and MLP, and an untied head, at zero."""
    scale: NotNegative = 1.0
    """Other matrices start uniform within scale / sqrt(inputs)."""
    mlp_scale: AboveZero | None = None
    """The same for the MLP's first matrix; None: scale."""


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: Positive = 4096
    """Entries of the token table."""
    num_layers: Positive = 3
    """Transformer blocks."""
    dim: Positive = 192
    """Width of the residual stream."""
    num_heads: Positive = 3
    """Attention heads; dim must divide by them, into an even head_dim."""
    mlp_ratio: AboveZero = 4.0
    """Hidden width of the MLP over dim."""
    activation: Literal["gelu", "relu2"] = "relu2"
    """gelu (exact), or the square of ReLU."""
    norm_eps: NotNegative = 1e-6
    """Epsilon of every RMS norm."""
    no_attention: tuple[int, ...] = ()
    """Layers without attention."""
    no_mlp: tuple[int, ...] = ()
    """Layers without MLP."""
    gate_inputs: Positive = 12
    """Channels that every gate reads."""
    across_documents: bool = False
    """Let smear, key offset and multi-token prediction cross document boundaries, as the records did."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention of every layer."""
    embeddings: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """Token tables."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """From features to logits."""
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    """What is added to the residual stream beside the blocks."""
    init: InitConfig = field(default_factory=InitConfig)
    """Initial values of matrices."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            good = [h for h in range(1, self.dim // 2 + 1) if self.dim % (2 * h) == 0]
            raise UserError(
                f"model.dim {self.dim} does not split into {self.num_heads} heads of even width; "
                f"model.num_heads may be one of {', '.join(map(str, good)) or 'none: choose an even dim'}."
            )
        if self.mlp_dim < 1:
            raise UserError(f"model.mlp_ratio is {self.mlp_ratio}; with model.dim {self.dim} the MLP has no width.")
        self._check_layers()
        self._check_combinations()

    def _check_layers(self) -> None:
        """Every layer that is named must exist, and have what it is named for."""
        values, r = self.embeddings.value_layers, self.residual
        named = {
            "attention.long_layers": self.attention.long_layers, "no_attention": self.no_attention,
            "no_mlp": self.no_mlp, "embeddings.value_layers": [layer for layer, _ in values],
            "residual.skips": [layer for skip in r.skips for layer in skip],
            "residual.backout": [] if r.backout is None else [r.backout],
        }  # fmt: skip
        for name, layers in named.items():
            for layer in layers:
                if not 0 <= layer < self.num_layers:
                    raise UserError(
                        f"model.{name} names layer {layer}, but the model has {self.num_layers} layers, "
                        f"0 to {self.num_layers - 1}."
                    )
                if layer in self.no_attention and name in ("attention.long_layers", "embeddings.value_layers"):
                    raise UserError(f"model.{name} names layer {layer}, which has no attention.")
        if len(dict(values)) != len(values):
            raise UserError(f"model.embeddings.value_layers {values} gives a layer two tables.")
        tables = sorted({table for _, table in values})
        if tables != list(range(len(tables))):
            raise UserError(f"model.embeddings.value_layers uses tables {tables}; number them from 0 without a gap.")
        for source, target in r.skips:
            if source >= target:
                raise UserError(f"model.residual.skips has {source} -> {target}; a skip must lead to a later layer.")
            if r.skips.count((source, target)) > 1:
                raise UserError(f"model.residual.skips has {source} -> {target} more than once; name each skip once.")
        if r.backout == self.num_layers - 1:
            raise UserError(
                f"model.residual.backout is {r.backout}, the last layer; only an earlier one can be taken out."
            )

    def _check_combinations(self) -> None:
        """Refuse a switch that does nothing without another one, or does not fit into the width."""
        a, e, h, r = self.attention, self.embeddings, self.head, self.residual
        attends = len(set(self.no_attention)) < self.num_layers
        needs = (
            ("embeddings.bigram_dim", e.bigram_dim, e.bigram_vocab_size, "model.embeddings.bigram_vocab_size"),
            ("head.untie", h.untie, h.tied, "a tied head (model.head.tied=True)"),
            ("embeddings.second", e.second, r.x0_lambdas, "model.residual.x0_lambdas=True"),
            ("embeddings.value_gates", e.value_gates, e.value_layers, "tables (model.embeddings.value_layers)"),
            ("residual.skip_gates", r.skip_gates, r.skips, "skips (model.residual.skips)"),
            ("attention.gates", a.gates, attends, "a layer with attention (model.no_attention)"),
            ("attention.key_offset", a.key_offset, a.rotary == "half", "model.attention.rotary=half"),
            ("attention.key_offset", a.key_offset, a.long_layers, "long layers (model.attention.long_layers)"),
        )  # fmt: skip
        for name, wanted, given, what in needs:
            if wanted and not given:
                raise UserError(f"model.{name} is {wanted!r}, which needs {what}.")
        if a.rotary == "half" and self.head_dim % 4:
            raise UserError(f"model.attention.rotary is 'half', which needs head widths of 4n, not {self.head_dim}.")
        if (e.bigram_dim or 0) > self.dim:
            raise UserError(f"model.embeddings.bigram_dim is {e.bigram_dim}, but model.dim only {self.dim}.")
        if (a.gates or e.value_gates or r.skip_gates or e.smear) and self.gate_inputs > self.dim:
            raise UserError(f"model.gate_inputs is {self.gate_inputs}; the gates read 1 to {self.dim} channels.")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return int(self.mlp_ratio * self.dim)

    def table(self) -> list[tuple[str, ...]]:
        """Which layer has what: a header, then one line per layer."""
        values, skips = dict(self.embeddings.value_layers), self.residual.skips
        lines: list[tuple[str, ...]] = [("layer", "attention", "MLP", "window", "value table", "skip", "also")]
        for layer in range(self.num_layers):
            into = [f"from {a}" for a, b in skips if b == layer]
            out = [f"to {b}" for a, b in skips if a == layer]
            has = layer not in self.no_attention
            long = layer in self.attention.long_layers
            window = "-" if not has else "all" if not self.attention.long_layers else "long" if long else "short"
            also = {
                "head gates": has and self.attention.gates,
                "key offset": has and self.attention.key_offset and long,
                "residual lambda": self.residual.lambdas,
                "x0 lambdas" if self.embeddings.second else "x0 lambda": self.residual.x0_lambdas,
                "bigrams": self.embeddings.bigram_vocab_size,
                "backout": layer == self.residual.backout,
            }
            attention = f"{self.num_heads} heads of {self.head_dim}" if has else "-"
            mlp = f"{self.mlp_dim} {self.activation}" if layer not in self.no_mlp else "-"
            value = f"{values[layer]}{' gated' * self.embeddings.value_gates}" if layer in values else "-"
            lists = into + out, [text for text, on in also.items() if on]
            lines.append((str(layer), attention, mlp, window, value, *(", ".join(x) or "-" for x in lists)))
        return lines
