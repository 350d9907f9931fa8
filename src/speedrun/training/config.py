"""A recipe: everything that decides how a model is trained, and nothing else; and the options of a run.

The components own their configs; this joins them. Recipes live in `speedrun.recipes`; a run stores the resolved recipe
in `run.json`. A field that comes later needs a default that means "as it was before": stored recipes lack it.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any

from docstring_parser import parse_from_object
from msgspec import Meta

from speedrun.checks import AboveZero, Count, Positive, check_fields
from speedrun.data import LoaderConfig
from speedrun.errors import UserError, nearest, plural
from speedrun.model import GPTConfig
from speedrun.training.device import CompilerConfig
from speedrun.training.distributed import TIMEOUT
from speedrun.training.optimizers import OptimConfig
from speedrun.training.schedule import ScheduleConfig

C = typing.TypeVar("C")


@dataclass(frozen=True)
class ValidationConfig:
    every: Positive = 200
    """Steps between validations; the last step is always validated."""
    first: bool = True
    """Also measure before the first step."""
    batch_size: Positive = 32
    """Sequences per validation batch. Does not change the loss, only speed and memory."""
    seq_len: Positive = 128
    """Tokens per validation sequence: how much context the model gets."""
    cut_documents: bool = True
    """Cut documents into pieces of loader.max_doc_len tokens, as in training. False: a piece begins at a separator or
    with a sequence, and nowhere else, as in the records. For documents packing only."""

    def __post_init__(self) -> None:
        check_fields(self, "validation.")

    def moments(self, total: int) -> list[int]:
        """After how many steps of a run the loss is measured."""
        return [*([0] if self.first else []), *range(self.every, total, self.every), total]


@dataclass(frozen=True)
class Recipe:
    name: str
    """Name in the lineage."""
    track: str
    """Track whose size this is."""
    about: str
    """One sentence: what it is and where it comes from."""
    model: GPTConfig = field(default_factory=GPTConfig)
    """The network."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How tokens become rows."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizers."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Steps, batch and learning rate over time."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """When and how the validation loss is measured."""
    compiler: CompilerConfig = field(default_factory=CompilerConfig)
    """Options of torch.compile."""

    @property
    def validation_max_doc_len(self) -> int | None:
        """Longest piece of a document in validation; None: seq_len."""
        return self.loader.max_doc_len if self.validation.cut_documents else None

    def __post_init__(self) -> None:
        """What one part asks of another."""
        m, s, o = self.model, self.schedule, self.optim
        if (s.untie_at is not None) != m.head.untie:
            raise UserError(
                f"model.head.untie is {m.head.untie} and schedule.untie_at is {s.untie_at}; set both or neither."
            )
        if s.untie_step is not None and s.untie_step >= s.total:
            raise UserError(
                f"schedule.untie_at {s.untie_at} is step {s.untie_step}, but the run has {plural(s.total, 'step')}."
            )
        if m.attention.yarn and not s.has_windows:
            raise UserError(
                "model.attention.yarn follows the attention window: set schedule.window_ramp or window_cubic, or turn "
                "it off."
            )
        if m.attention.long_layers and not s.has_windows:
            raise UserError(
                "model.attention.long_layers needs windows: set schedule.window_ramp or window_cubic, or leave it "
                "empty."
            )
        limit = min(s.seq_len, self.loader.max_doc_len) if self.loader.packing == "documents" else s.seq_len
        if s.max_window > limit:
            raise UserError(
                f"A window of {s.max_window} tokens is longer than what a sequence holds of one document ({limit} "
                "tokens); shorten the windows, or lengthen schedule.seq_len and loader.max_doc_len."
            )
        if (s.momentum_warmup or s.momentum_cooldown) and o.matrices == "adam":
            raise UserError("schedule.momentum_warmup and momentum_cooldown are Muon's; optim.matrices is 'adam'.")
        if o.weights != "float32" and o.matrices == "adam":
            raise UserError(f"optim.weights {o.weights!r} is for matrices that Muon trains; optim.matrices is 'adam'.")

    @property
    def context(self) -> int:
        return max(self.schedule.seq_len, self.validation.seq_len)


@dataclass(frozen=True)
class PublishedCurve:
    """The validation losses of a published record: what a run of the same recipe should repeat, step by step."""

    record: str
    """Recipe that reproduces it."""
    track: str
    source: str
    """Where it was published."""
    losses: Annotated[tuple[tuple[Count, AboveZero], ...], Meta(min_length=1)]
    """(steps done, loss)"""
    seconds: AboveZero
    """Of the whole run, on its clock."""
    machine: str = "8xH100"

    def at(self, done: int) -> float | None:
        """The loss after `done` steps, if the record measured it there."""
        return dict(self.losses).get(done)

    def __str__(self) -> str:
        return f"{self.source}: one run on {self.machine}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class Options:
    """How a run is executed. None of this is part of the recipe."""

    seed: Count = 0
    """Draws the initial weights and the order of documents."""
    compile: bool = True
    """Use torch.compile when it works here."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints; None: only the final one is written."""
    keep: Positive = 2
    """Checkpoints kept on disk."""
    save: bool = True
    """Write the trained model at the end, outside the clock."""
    micro_batch_size: Positive | None = None
    """Sequences per forward pass; default: the whole batch. Halved automatically when memory runs out."""
    val_tokens: Positive | None = None
    """Validate on this many tokens at the start of the split; None: on all of it."""
    shadow: bool = False
    """Also measure the loss on the shadow split at the end, outside the clock: for proof, never for tuning."""
    plan: str | None = None
    """Set by `speedrun race`: the sha256 of the plan that this run belongs to."""
    timeout: AboveZero = TIMEOUT
    """With several processes: seconds to wait for one that hangs; four times as long while they compile."""
    backend: Annotated[str, Meta(pattern="^(auto|gloo|nccl)$")] = "auto"
    """With several processes: auto, gloo or nccl; auto takes nccl on GPUs."""
    order: Annotated[str, Meta(pattern="^(eager|interleaved|sequential)$")] = "eager"
    """With several processes: in which order a step exchanges and computes: eager, interleaved or sequential."""
    trace: Count = 0
    """Steps to record with torch.profiler, a file per process in the run folder. `--trace` alone: 20 steps."""
    curve: PublishedCurve | None = None
    """Losses of a record, shown beside the run's own."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits measured at the end; the first one is the validation split of the whole run."""
        return ("val", "shadow") if self.shadow else ("val",)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    return dataclasses.asdict(recipe)


def fields_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """{'model.num_layers': 3, ...}: every leaf of a nested dataclass under its dotted name."""
    leaves: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            leaves |= fields_of(value, f"{prefix}{f.name}.")
        else:
            leaves[prefix + f.name] = value
    return leaves


def meanings(kind: type, prefix: str = "") -> dict[str, str]:
    """{'model.num_layers': 'Transformer blocks.', ...}: the string below each field of a config class."""
    hints = typing.get_type_hints(kind)
    found: dict[str, str] = {}
    for field_ in parse_from_object(kind).params:
        if dataclasses.is_dataclass(hints[field_.arg_name]):
            found |= meanings(typing.cast(type, hints[field_.arg_name]), f"{prefix}{field_.arg_name}.")
        else:
            found[prefix + field_.arg_name] = field_.description or ""
    return found


def with_fields(config: C, changes: dict[str, Any]) -> C:
    """A recipe, or a part of one, with dotted fields replaced; the new values are checked as at construction."""
    known = fields_of(config)
    for name in changes:
        if name not in known:
            what = f"Recipe {config.name!r}" if isinstance(config, Recipe) else type(config).__name__
            raise UserError(f"{what} has no field {name!r}.{nearest(name, known)}")

    def changed(config: Any, prefix: str) -> Any:
        """All changes below `prefix` at once: one alone might not be possible."""
        new: dict[str, Any] = {}
        for f in dataclasses.fields(config):
            name = prefix + f.name
            if name in changes:
                new[f.name] = changes[name]
            elif any(other.startswith(name + ".") for other in changes):
                new[f.name] = changed(getattr(config, f.name), name + ".")
        return dataclasses.replace(config, **new)

    try:
        return typing.cast(C, changed(config, ""))
    except ValueError as e:
        raise UserError(str(e)) from e


def as_tuple(value: Any) -> Any:
    """JSON has no tuples; configs have no lists."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def differences(a: Recipe, b: Recipe) -> list[str]:
    """'optim.lr: 0.003 -> 0.002', one per field that differs. What is said about a recipe does not change it."""
    left, right = fields_of(a), fields_of(b)
    return [f"{k}: {left[k]} -> {right[k]}" for k in left if left[k] != right[k] and k != "about"]
