"""How a recipe describes its optimizers, and how they are built from the roles of a model's parameters.

The matrices inside the blocks are trained by AdamW or by the Muon family. Every other role is trained by Adam, with the
learning rate, betas and decay of the field of `OptimConfig` that has its name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, assert_never

import torch
from msgspec import Meta
from torch import nn

from speedrun.checks import AboveZero, NotNegative, Positive, check_fields
from speedrun.model import MATRICES, Role
from speedrun.optim import NEWTON_SCHULZ_PER_STEP, Adam, Combined, Muon, NorMuon, Snoo, TrainerOptimizer

Beta = Annotated[float, Meta(ge=0, lt=1)]
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Part:
    lr: NotNegative = 1.0
    """Multiplier of optim.lr."""
    beta1: Beta | None = None
    """Decay of the gradient's moving average; None: optim.beta1."""
    beta2: Beta | None = None
    """Decay of the squared gradient's moving average; None: optim.beta2."""
    decay: NotNegative = 0.0
    """Multiplier of optim.weight_decay."""


@dataclass(frozen=True)
class MuonPart:
    lr: NotNegative = 0.02
    """Learning rate of the matrices inside the blocks, before the schedule."""
    attention_lr: NotNegative = 1.0
    """Multiplier for the matrices of attention."""
    up_lr: NotNegative = 1.0
    """Multiplier for the MLP's first matrix."""
    down_lr: NotNegative = 1.0
    """Multiplier for the MLP's second matrix."""
    gates: bool = False
    """Train the gates of attention, value embeddings and smear here, too, instead of with Adam."""
    smear_gate: bool = True
    """Of these gates, also smear's."""
    gates_lr: NotNegative = 1.0
    """Multiplier for those gates."""
    momentum: Beta = 0.95
    """Share of the old momentum; the schedule may warm it up and cool it down."""
    nesterov: bool = True
    """Look ahead: orthogonalise the gradient mixed with the new momentum, not the momentum alone."""
    momentum_form: Literal["ema", "classical"] = "ema"
    """Average the gradients, or sum them up."""
    method: Literal["polar-express", "newton-schulz", "newton-schulz-per-step", "svd"] = "polar-express"
    """How the update is orthogonalised."""
    steps: Positive = 5
    """Iterations of the orthogonalisation."""
    scale: Literal["unit-variance", "spectral", "match-rms-adamw"] | None = "spectral"
    """Size of the update: see docs/optimizers.md; None: 1."""
    split_qkv: bool = True
    """Orthogonalise query, key and value apart instead of as one matrix."""
    beta2: Beta = 0.95
    """Decay of NorMuon's second moment."""
    weight_decay: NotNegative = 0.0
    """Decay of the matrices."""
    mlp_decay: NotNegative = 1.0
    """Multiplier of weight_decay for the matrices of the MLP."""
    decay: Literal["decoupled", "cautious"] = "decoupled"
    """Shrink every weight, or only where the update shrinks it too."""
    decay_by: Literal["lr", "lr-squared"] = "lr"
    """The decay follows the learning rate, or its square."""
    update_ema: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Share of earlier updates in the one that is applied; None: no average."""
    update_floor: AboveZero | None = None
    """Least norm of an update, as a share of its weight's norm; None: no floor."""


@dataclass(frozen=True)
class SnooPart:
    k: Positive | None = None
    """Steps between outer steps; None: no Snoo."""
    lr: NotNegative = 0.68
    """Outer learning rate."""
    momentum: Beta = 0.37
    """Outer Nesterov momentum."""


@dataclass(frozen=True)
class OptimConfig:
    lr: NotNegative = 3e-3
    """Adam's learning rate, before the schedule."""
    beta1: Beta = 0.9
    """Decay of the gradient's moving average."""
    beta2: Beta = 0.95
    """Decay of the squared gradient's moving average."""
    eps: NotNegative = 1e-8
    """Added to the root of the second moment, in the scale of reference_ranks."""
    eps_at: Literal["corrected", "uncorrected"] = "corrected"
    """Before or after the second moment's bias correction."""
    weight_decay: NotNegative = 0.1
    """Adam's decay, per unit of learning rate."""
    decay: Literal["decoupled", "cautious"] = "decoupled"
    """Shrink every weight, or only where the update shrinks it too."""
    decay_by: Literal["lr", "lr-squared"] = "lr"
    """Adam's decay follows the learning rate, or its square."""
    every: Positive = 1
    """Steps from one step of Adam to its next, which takes the sum of their gradients; Muon always steps."""
    clip: AboveZero | None = None
    """Largest norm over all parameters of the mean loss's gradient; None: no clipping."""
    reference_ranks: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    """None: gradients of the batch's mean loss. N: of the loss summed over a rank's tokens, averaged over N ranks,
    whatever the actual number. eps and an 8-bit head's scales belong to one of these (speedrun.training.scale); with
    more than 2**16 ranks gradients would vanish beside eps."""
    matrices: Literal["adam", "muon", "normuon"] = "adam"
    """The optimizer of the matrices inside the blocks."""
    weights: Literal["float32", "bf16", "exact-bf16"] = "float32"
    """How the matrices inside the blocks are stored; exact-bf16 keeps the missing 16 bits beside them."""
    blocks: Part = field(default_factory=lambda: Part(decay=1.0))
    """Matrices inside the blocks, when Adam trains them."""
    embed: Part = field(default_factory=Part)
    """The token table."""
    head: Part = field(default_factory=Part)
    """A head of its own."""
    embed2: Part = field(default_factory=Part)
    """The second token table."""
    values: Part = field(default_factory=Part)
    """Value embeddings."""
    bigram: Part = field(default_factory=Part)
    """The table of hashed pairs of tokens."""
    gates: Part = field(default_factory=Part)
    """Gates of attention heads and of value embeddings."""
    smear_gate: Part = field(default_factory=Part)
    """The gate of smear."""
    skip_gates: Part = field(default_factory=Part)
    """Gates of skips."""
    x0: Part = field(default_factory=Part)
    """Shares of the first embedding before each block."""
    scalars: Part = field(default_factory=Part)
    """All other learned numbers."""
    muon: MuonPart = field(default_factory=MuonPart)
    """The Muon family, when it trains the matrices."""
    snoo: SnooPart = field(default_factory=SnooPart)
    """An outer Nesterov step every k steps."""

    def __post_init__(self) -> None:
        check_fields(self, "optim.")


PARTS = tuple(f.name for f in fields(OptimConfig) if f.type is Part)
"""The groups of parameters that Adam can train, in the order of its parameter groups."""


def part_of(role: Role) -> str:
    """The field of `OptimConfig` that says how Adam trains parameters of this role."""
    return "blocks" if role in MATRICES else role


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role],
    config: OptimConfig,
    combine: Callable[[list[Any]], TrainerOptimizer] | None = None,
    dtype: torch.dtype | None = None,
) -> TrainerOptimizer:
    """One optimizer for the named parameters, whose roles are `GPT.param_roles()`.

    Each parameter group keeps its base learning rate as `initial_lr` and has the name of its `part`.

    Args:
        combine: Makes one optimizer of several, for ranks that share the work. Default: `Combined`, in this process.
        dtype: Arithmetic of the orthogonalization. Default: a dtype in which the device is usually fast.
    """
    parts: dict[str, Named] = {part: [] for part in PARTS}
    for name, parameter in named:
        parts[part_of(roles[name])].append((name, parameter))
    members = [*_build_muon(parts, roles, config, dtype), *_build_adam(parts, config)]
    optimizer: Any = combine(members) if combine else members[0] if len(members) == 1 else Combined(*members)
    snoo = config.snoo
    return Snoo(optimizer, snoo.lr, snoo.momentum, snoo.k) if snoo.k else optimizer


def _build_adam(parts: dict[str, Named], config: OptimConfig) -> list[Adam]:
    """Adam for the parts that have parameters; none if there is no such part."""
    groups = []
    for part, inside in parts.items():
        if not inside:
            continue
        p: Part = getattr(config, part)
        betas = tuple(base if own is None else own for own, base in ((p.beta1, config.beta1), (p.beta2, config.beta2)))
        rate = config.lr * p.lr
        groups.append(
            {
                "params": inside, "lr": rate, "initial_lr": rate, "betas": betas, "part": part,
                "weight_decay": config.weight_decay * p.decay,
            }
        )  # fmt: skip
    options: dict[str, Any] = {
        "lr": config.lr, "eps": config.eps, "eps_at": config.eps_at, "decay": config.decay,
        "decay_by": config.decay_by, "every": config.every, "exact_bf16": config.weights == "exact-bf16",
    }  # fmt: skip
    return [Adam(groups, **options)] if groups else []


def _build_muon(
    parts: dict[str, Named], roles: Mapping[str, Role], config: OptimConfig, dtype: torch.dtype | None
) -> list[Muon]:
    """Take the matrices, and the gates if asked, out of `parts`; none if there are no matrices or Adam trains them."""
    m = config.muon
    if config.matrices == "adam" or not parts["blocks"]:
        return []
    inside = parts.pop("blocks")
    if m.gates:
        inside += parts.pop("gates")
    if m.gates and m.smear_gate:
        inside += parts.pop("smear_gate")
    taken = [roles[name] for name, _ in inside]
    kind, options = Muon, dict[str, Any](dtype=dtype)
    match config.matrices:
        case "muon":
            pass
        case "normuon":  # of gates one number per head
            kind = NorMuon
            options |= {"beta2": m.beta2, "axis": [None if r in MATRICES else -1 for r in taken]}
        case never:
            assert_never(never)
    rates: dict[Role, float] = {
        "attention_qkv": m.attention_lr, "attention_out": m.attention_lr, "mlp_up": m.up_lr, "mlp_down": m.down_lr,
        "gates": m.gates_lr, "smear_gate": m.gates_lr,
    }  # fmt: skip
    group = {
        "params": inside, "lr": m.lr, "initial_lr": m.lr, "part": "blocks", "lr_mul": [rates[role] for role in taken],
        "wd_mul": [m.mlp_decay if role in ("mlp_up", "mlp_down") else 1.0 for role in taken],
        "blocks": [3 if m.split_qkv and role == "attention_qkv" else 1 for role in taken],
    }  # fmt: skip
    per_step = m.method == "newton-schulz-per-step"
    method: Any = "newton-schulz" if per_step else m.method
    return [
        kind(
            [group], lr=m.lr, momentum=m.momentum, nesterov=m.nesterov, momentum_form=m.momentum_form,
            method=method, steps=m.steps,
            coefficients=NEWTON_SCHULZ_PER_STEP if per_step else None, scale=m.scale, weight_decay=m.weight_decay,
            decay=m.decay, decay_by=m.decay_by, update_ema=m.update_ema, update_floor=m.update_floor,
            exact_bf16=config.weights == "exact-bf16", **options,
        )
    ]  # fmt: skip
