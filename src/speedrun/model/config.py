"""What a GPT is made of: one field per choice, checked, and a table of which layer has what.

Layers count from 0. A field that names layers or pairs of layers is checked against the number of layers, so that a
technique never falls silently out of a smaller model.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from speedrun.checks import AboveZero, Count, NotNegative, Positive, check_fields
from speedrun.errors import UserError

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GPTConfig:
    vocab: Positive = 4096
    """Entries of the token table."""
    layers: Positive = 3
    """Transformer blocks."""
    width: Positive = 192
    """Residual width."""
    heads: Positive = 3
    """Attention heads; the width must divide by them, into an even head width."""
    mlp_ratio: AboveZero = 4.0
    """Hidden width of the MLP over the residual width."""
    activation: Literal["gelu", "relu2"] = "relu2"
    """gelu (exact), or the square of ReLU."""
    norm_eps: NotNegative = 1e-6
    """Epsilon of every RMS norm."""

    # ------------------------------------------------------------------ attention
    qk_norm: bool = True
    """RMS-normalise queries and keys per head before the rotation."""
    attention_norm: bool = True
    """RMS-normalise what goes into attention."""
    value_norm: bool = False
    """RMS-normalise the values per head."""
    attention_scale: NotNegative = 0.0
    """Factor of the scores before softmax; 0 is 1 / sqrt(head width)."""
    attention_residual: Literal["one", "depth"] = "one"
    """Factor of the attention branch in the residual sum: 1, or 1 / sqrt(2 * layers)."""
    rotary: Literal["full", "half"] = "full"
    """full: every channel pair turns; half: half of them stand still, the others turn from 1 to 1 / base per token."""
    rotary_base: Annotated[float, Meta(gt=1)] = 10_000.0
    """Slowest rotary wavelength over 2 pi."""
    yarn: bool = False
    """Stretch the rotary frequencies and sharpen the scores when the schedule widens the long window."""
    long_layers: tuple[int, ...] = ()
    """Layers with the long sliding window; the others have the short one. Means nothing without window stages."""
    no_attention: tuple[int, ...] = ()
    """Layers without attention."""
    no_mlp: tuple[int, ...] = ()
    """Layers without MLP."""
    attention_gates: bool = False
    """Scale each head's output by a sigmoid of the first channels of its input."""
    gate_inputs: int = 12
    """How many channels every gate reads."""
    attention_lambdas: bool = False
    """Two learned numbers per layer that multiply the query-key-value and the output weights (from 0.5 and 1)."""
    key_offset: bool = False
    """In long layers, the channels that do not turn see the key of the previous token (needs rotary=half)."""

    # ------------------------------------------------------------------ embeddings and head
    tied: bool = False
    """One table for the embedding and the head."""
    split: bool = False
    """A tied head becomes a table of its own at the schedule's split step."""
    embed_norm: bool = False
    """RMS-normalise the embedding before the first block."""
    embed_std: NotNegative = 0.05
    """Standard deviation of the initial token table; 0 means uniform within 1 / sqrt(width), torch's Linear."""
    second_embedding: bool = False
    """A second table, normalised, mixed into every layer's input by learned numbers (needs x0_lambdas)."""
    value_tables: Count = 0
    """Token tables that are added to the values of some layers."""
    value_layers: Pairs = ()
    """(layer, table) pairs: which layer adds which value table."""
    value_std: NotNegative = 0.0
    """Standard deviation of the initial value tables."""
    value_gates: bool = False
    """Scale each head's value embedding by twice a sigmoid of the first channels."""
    value_lambdas: bool = False
    """Learned numbers mix values and value embeddings (from 0.5 each)."""
    bigram_rows: Count = 0
    """Rows of a table for pairs of tokens, which share them by a hash; 0 turns it off."""
    bigram_width: Count = 0
    """Its width, which the first channels get; 0 is the residual width."""
    softcap: Literal["none", "tanh", "sigmoid", "isru"] = "none"
    """Bound the logits z: c tanh(z / c); c sigmoid((z + shift) / temperature); c z / sqrt(z^2 + c^2)."""
    softcap_limit: AboveZero = 15.0
    """The c of softcap."""
    softcap_shift: float = 0.0
    """The shift of softcap=sigmoid."""
    softcap_temperature: AboveZero = 7.5
    """The temperature of softcap=sigmoid."""
    fp8_head: bool = False
    """Multiply the head in 8-bit floats while training."""
    fp8_scales: tuple[AboveZero, AboveZero, AboveZero] = (100 / 448, 1.6 / 448, 0.75 / 448)
    """What features, weights and gradients are divided by before they become 8-bit floats (speedrun.training.scale)."""

    # ------------------------------------------------------------------ the residual stream
    smear: bool = False
    """Add a gated share of the previous token's embedding to each embedding."""
    smear_mtp: bool = False
    """Add a learned share of the previous position's final features before the head."""
    residual_lambdas: float = 0.0
    """Learned factor of the residual stream before each block, starting from this; 0 turns it off."""
    x0_lambdas: bool = False
    """Add a learned share of the first embedding before each block (from 0)."""
    skips: Pairs = ()
    """(from, to) pairs: the output of one layer is added to the input of a later one."""
    skip_form: Literal["sigmoid", "plain"] = "sigmoid"
    """The learned weight of a skip: a sigmoid that starts at 0.18, or a plain number that starts at 1."""
    skip_gates: bool = False
    """Scale each skip by twice a sigmoid of the first channels of the first embedding."""
    backout: Annotated[int, Meta(ge=-1)] = -1
    """Layer whose output is taken back out at the end; -1 turns it off."""
    backout_form: Literal["subtract", "mix"] = "subtract"
    """subtract: x - 0.5 out; mix: 1 norm(x) + 0 norm(out), the numbers learned from there."""
    across_documents: bool = False
    """Let smear, key offset and multi-token prediction cross document boundaries, as the records did."""

    # ------------------------------------------------------------------ initial values
    zero_init: bool = True
    """Start the output projections of attention and MLP, and an untied head, at zero."""
    init_scale: NotNegative = 1.0
    """Other matrices start uniform within init_scale / sqrt(inputs)."""
    mlp_init_scale: NotNegative = 0.0
    """The same for the MLP's first matrix; 0 takes init_scale."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            good = [h for h in range(1, self.width // 2 + 1) if self.width % (2 * h) == 0]
            raise UserError(
                f"model.width {self.width} does not split into {self.heads} heads of even width; "
                f"model.heads may be one of {', '.join(map(str, good)) or 'none: choose an even width'}."
            )
        if self.mlp_dim < 1:
            raise UserError(f"model.mlp_ratio is {self.mlp_ratio}; with model.width {self.width} the MLP has no width.")
        self._check_layers()
        self._check_company()

    def _check_layers(self) -> None:
        """Every layer that is named must exist, and have what it is named for."""
        for name in ("long_layers", "no_attention", "no_mlp"):
            for layer in getattr(self, name):
                self._layer(name, layer)
        for layer, table in self.value_layers:
            self._layer("value_layers", layer)
            if not 0 <= table < self.value_tables:
                raise UserError(
                    f"model.value_layers gives table {table} to layer {layer}, but model.value_tables is "
                    f"{self.value_tables}; tables count from 0."
                )
            if layer in self.no_attention:
                raise UserError(f"model.value_layers names layer {layer}, which has no attention.")
        if len({table for _, table in self.value_layers}) != self.value_tables:
            raise UserError(
                f"model.value_tables is {self.value_tables}, but model.value_layers uses "
                f"{sorted({t for _, t in self.value_layers})}; a table that no layer uses would never be trained."
            )
        if len(dict(self.value_layers)) != len(self.value_layers):
            raise UserError(f"model.value_layers {self.value_layers} gives a layer two tables.")
        for source, target in self.skips:
            self._layer("skips", source)
            self._layer("skips", target)
            if source >= target:
                raise UserError(f"model.skips has {source} -> {target}; a skip must lead to a later layer.")
            if self.skips.count((source, target)) > 1:
                raise UserError(f"model.skips has {source} -> {target} more than once; name each skip once.")
        if self.backout != -1:
            self._layer("backout", self.backout)
            if self.backout == self.layers - 1:
                raise UserError(
                    f"model.backout is {self.backout}, the last layer; only an earlier one can be taken out."
                )
        for layer in self.long_layers:
            if layer in self.no_attention:
                raise UserError(f"model.long_layers names layer {layer}, which has no attention.")

    def _layer(self, name: str, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UserError(
                f"model.{name} names layer {layer}, but the model has {self.layers} layers, 0 to {self.layers - 1}."
            )

    def _check_company(self) -> None:
        """Switches that need another one, or room, say so instead of doing nothing."""
        attends = len(set(self.no_attention)) < self.layers
        needs = (
            ("bigram_width", self.bigram_width, self.bigram_rows > 0, "a table (model.bigram_rows)"),
            ("split", self.split, self.tied, "a tied head (model.tied=True)"),
            ("second_embedding", self.second_embedding, self.x0_lambdas, "model.x0_lambdas=True"),
            ("value_gates", self.value_gates, self.value_tables > 0, "value embeddings (model.value_tables)"),
            ("skip_gates", self.skip_gates, bool(self.skips), "skips (model.skips)"),
            ("attention_gates", self.attention_gates, attends, "a layer with attention (model.no_attention)"),
            ("key_offset", self.key_offset, self.rotary == "half", "model.rotary=half, for channels that stand still"),
            ("key_offset", self.key_offset, bool(self.long_layers), "long layers (model.long_layers)"),
            ("rotary", self.rotary == "half", self.head_dim % 4 == 0, f"head widths of 4n, not {self.head_dim}"),
        )  # fmt: skip
        for name, wanted, given, what in needs:
            if wanted and not given:
                raise UserError(f"model.{name} is {getattr(self, name)!r}, which needs {what}.")
        if self.bigram_rows == 1:
            raise UserError("model.bigram_rows is 1, but one row is for tokens without a previous one; choose 0 or 2.")
        if self.bigram_width > self.width:
            raise UserError(f"model.bigram_width is {self.bigram_width}, but model.width only {self.width}.")
        gates = self.attention_gates or self.value_gates or self.skip_gates or self.smear
        if gates and not 1 <= self.gate_inputs <= self.width:
            raise UserError(f"model.gate_inputs is {self.gate_inputs}; the gates read 1 to {self.width} channels.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def mlp_dim(self) -> int:
        return int(self.mlp_ratio * self.width)

    def table(self) -> list[tuple[str, ...]]:
        """Which layer has what: a header and one row per layer, for people."""
        values = dict(self.value_layers)
        rows: list[tuple[str, ...]] = [("layer", "attention", "MLP", "window", "value table", "skip", "also")]
        for layer in range(self.layers):
            into = [f"from {a}" for a, b in self.skips if b == layer]
            out = [f"to {b}" for a, b in self.skips if a == layer]
            has = layer not in self.no_attention
            long = layer in self.long_layers
            window = "-" if not has else "all" if not self.long_layers else "long" if long else "short"
            also = {
                "head gates": has and self.attention_gates,
                "key offset": has and self.key_offset and long,
                "residual lambda": bool(self.residual_lambdas),
                "x0 lambdas" if self.second_embedding else "x0 lambda": self.x0_lambdas,
                "bigrams": self.bigram_rows > 0,
                "backout": layer == self.backout,
            }
            attention = f"{self.heads} heads of {self.head_dim}" if has else "-"
            mlp = f"{self.mlp_dim} {self.activation}" if layer not in self.no_mlp else "-"
            value = f"{values[layer]}{' gated' * self.value_gates}" if layer in values else "-"
            lists = into + out, [text for text, on in also.items() if on]
            rows.append((str(layer), attention, mlp, window, value, *(", ".join(x) or "-" for x in lists)))
        return rows
