"""What a run would be, without running it: `speedrun train --dry-run`.

Parameters and who trains them, the stages of the schedule, memory, arithmetic, an estimate of the time, and what does
not fit. Nothing is trained and nothing is written. The model is built without memory, so a recipe of any size is looked
at in seconds on a small machine.

What is exact: parameters, stages, tokens, and the bytes of weights, gradients, optimizer state and checkpoints. What is
an estimate, and is called so: activations and the memory of a validation batch (memory.py), FLOPs (the optimizer's own
are left out) and with them the time.
"""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.model.gpt import GPTConfig, Role, Windows, flops_per_token
from speedrun.optim import Muon, TrainerOptimizer
from speedrun.optim.state import value_at
from speedrun.tracks import Track
from speedrun.train import scale
from speedrun.train.clock import synchronize
from speedrun.train.config import Options, Recipe
from speedrun.train.device import Machine
from speedrun.train.memory import Memory, checkpoint_bytes, gib, memory_of, problems_of, skeleton
from speedrun.train.run import check_supply, fit_to_tokens, obey
from speedrun.train.schedule import ScheduleConfig, Stage

# A training step reaches this share of the FLOP/s of bare matmuls. benchmarks/throughput.py measures 0.65 for `adamw`
# on two CPU cores; recipes with gates, windows and orthogonalised updates get less.
ATTAINABLE = 0.5


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind that one optimizer trains at one rate."""

    kind: str
    optimizer: str
    tensors: int
    parameters: int
    lr: float
    """Base rate times multiplier, before the schedule."""
    multiplier: float
    weights: int
    """Bytes."""
    state: int
    """Bytes of the optimizer's state when it is fullest."""


@dataclass(frozen=True)
class Span:
    """Steps `first` to `last`, both included, with the same batch, windows, number of predicted tokens and head."""

    first: int
    last: int
    rows: int
    length: int
    windows: Windows | None
    lr: tuple[float, ...]
    """The factor at the first step, wherever it turns, and at the last step."""
    momentum: tuple[float, ...]
    """The same; empty when the schedule leaves Muon's momentum alone."""
    predict: tuple[tuple[float, float], ...]
    """The first and last weight of each predicted token's loss."""
    tied: bool
    splits: bool
    """Whether the head becomes a table of its own at the end of the last step."""

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def tokens(self) -> int:
        return self.steps * self.rows * self.length


@dataclass(frozen=True)
class DryRun:
    recipe: Recipe
    ranks: int
    """Processes."""
    kinds: tuple[Kind, ...]
    spans: tuple[Span, ...]
    memory: Memory
    checkpoint: int
    """Bytes of one."""
    checkpoints: int
    """How many lie on the disk at once, the one being written included."""
    disk_free: int
    flops: float
    """Of the whole training: forward and backward."""
    validation_flops: float | None
    """Of all validations; None when the number of tokens is not known."""
    flops_per_second: float | None
    """Of bare matmuls here, measured; None: the device is not here."""
    problems: tuple[str, ...]
    """What does not fit, a sentence each."""
    unknown: str | None
    """Why it cannot be told whether it fits."""
    notes: tuple[str, ...]
    """What fits, but should be known."""

    def seconds(self, flops: float) -> float | None:
        """Estimate of the time they take; None: not known."""
        return None if self.flops_per_second is None else flops / (ATTAINABLE * self.flops_per_second)


def examine(recipe: Recipe, track: Track, machine: Machine, options: Options, out: Path, ranks: int = 1) -> DryRun:
    """Everything about a run of this recipe into `out`. Raises UserError only where the recipe breaks a rule."""
    obey(recipe, track)
    problems: list[str] = []
    notes: list[str] = []
    validated = track.val_tokens
    try:
        tokens = track.locate()
        _, val = tokens.tokens("train"), tokens.tokens("val")  # both must be there
    except UserError as e:
        (problems if machine.here else notes).append(str(e))
    else:
        recipe = fit_to_tokens(recipe, tokens, track)
        validated = validated or val
        data_problems(recipe, track, tokens, problems, notes)
    try:
        scale.check(recipe)
    except UserError as e:
        problems.append(str(e))
    schedule = recipe.schedule
    model, optimizer, states = skeleton(recipe)
    roles = dict(zip(model.parameters(), model.param_roles().values(), strict=True))
    memory = memory_of(recipe, machine, options, ranks)
    problems += problems_of(memory, recipe)
    smaller: dict[tuple[int, int], int] = {}  # (rows, of how many): since which step
    for stage in schedule.visits() if memory.measured is not None else ():
        mine = -(-stage.rows // ranks)
        if (rows := memory.micro_rows.get(stage.shape, mine)) < mine:
            smaller.setdefault((rows, mine), stage.step)
    notes += [
        f"Micro-batches of {rows} of {mine} rows from step {step} on: more do not fit into memory at once."
        for (rows, mine), step in smaller.items()
    ]

    size = checkpoint_bytes(recipe, list(model.parameters()), states)
    count = options.keep + 1 if options.checkpoint_every else int(options.final_checkpoint)
    free = shutil.disk_usage(next(p for p in (out.absolute(), *out.absolute().parents) if p.is_dir())).free
    if size * count > free:
        problems.append(
            f"Checkpoints take {gib(size * count)} ({count} of {gib(size)}), but the disk of {out} has {gib(free)} "
            "left; free some, or choose another disk with --out, or fewer with --keep 1 or --save False "
            "--checkpoint-every 0."
        )
    laid = spans_of(schedule)
    last = schedule.after(schedule.total)
    once = flops_per_token(recipe.model, recipe.validation.length, last.windows) / 3  # forward alone
    every = recipe.validation.every
    times = math.ceil(schedule.total / every) + recipe.validation.first
    return DryRun(
        recipe=recipe,
        ranks=ranks,
        kinds=kinds_of(optimizer, roles, states, recipe),
        spans=laid,
        memory=memory,
        checkpoint=size,
        checkpoints=count,
        disk_free=free,
        flops=sum(s.tokens * flops_per_token(recipe.model, s.length, s.windows) for s in laid),
        validation_flops=None if validated is None else validated * times * once,
        flops_per_second=matmul_speed(machine, recipe.model) if machine.here else None,
        problems=tuple(problems),
        unknown=None
        if memory.measured is not None
        else f"what a row of this recipe needs on {machine.device_reason} was not measured; the table has the native "
        "recipes as they are. Ask again on such a machine.",
        notes=tuple(notes),
    )


# -------------------------------------------------------------------- parameters


NAMES = {"attention_qkv": "attention", "attention_out": "attention", "mlp_up": "MLP up", "mlp_down": "MLP down"}
"""What the table calls these roles; the others have their own names."""


def kinds_of(
    optimizer: TrainerOptimizer, roles: dict[nn.Parameter, Role], states: dict[Any, int], recipe: Recipe
) -> tuple[Kind, ...]:
    rows: dict[tuple[str, str, float, float], list[nn.Parameter]] = {}
    for member in optimizer.members():
        for group in member.param_groups:
            base = recipe.optim.muon.lr if isinstance(member, Muon) else recipe.optim.lr
            who = type(member).__name__
            if who == "Adam" and group["weight_decay"] and group["decay"] == "decoupled":
                who = "AdamW"
            for index, p in enumerate(group["params"]):
                kind = NAMES.get(roles[p], roles[p].replace("_", " "))
                lr = group["initial_lr"] * value_at(group["lr_mul"], index)
                rows.setdefault((kind, who, lr, lr / base if base else 1.0), []).append(p)
    return tuple(
        Kind(
            kind, who, len(ps), sum(p.numel() for p in ps), lr, multiplier, sum(p.nbytes for p in ps),
            sum(states[p] for p in ps),
        )
        for (kind, who, lr, multiplier), ps in rows.items()
    )  # fmt: skip


# -------------------------------------------------------------------- stages


def spans_of(schedule: ScheduleConfig) -> tuple[Span, ...]:
    """The schedule as a table: one row wherever something else than a rate, a momentum or a weight changes."""

    def alike(s: Stage) -> tuple[object, ...]:
        return s.rows, s.length, s.windows, len(s.predict), s.tied

    groups: list[list[Stage]] = []
    for step in range(schedule.total):
        stage = schedule.at(step)
        if groups and alike(groups[-1][-1]) == alike(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return tuple(
        Span(
            first=g[0].step,
            last=g[-1].step,
            rows=g[0].rows,
            length=g[0].length,
            windows=g[0].windows,
            lr=turns([s.lr for s in g]),
            momentum=turns([s.momentum for s in g if s.momentum is not None]),
            predict=tuple(zip(g[0].predict, g[-1].predict, strict=True)),
            tied=g[0].tied,
            splits=g[-1].splits,
        )
        for g in groups
    )


def turns(values: Sequence[float]) -> tuple[float, ...]:
    """The first value, each value at which rising becomes falling or the reverse, and the last one."""
    found: list[float] = []
    for value in values:
        if found and value == found[-1]:
            continue
        if len(found) > 1 and (found[-1] > found[-2]) == (value > found[-1]):
            found[-1] = value
        else:
            found.append(value)
    return tuple(found)


# -------------------------------------------------------------------- data


def data_problems(recipe: Recipe, track: Track, tokens: TokenFolder, problems: list[str], notes: list[str]) -> None:
    """Adds what is wrong with, or worth knowing of, the tokens that are there."""
    train, val = tokens.tokens("train"), tokens.tokens("val")
    if tokens.vocab_size > recipe.model.vocab:
        problems.append(
            f"The data has {tokens.vocab_size} different tokens, the model only {recipe.model.vocab}; "
            f"pass --model.vocab {tokens.vocab_size}."
        )
    needed = recipe.schedule.tokens
    try:
        check_supply(recipe, tokens, track)
    except UserError as e:
        problems.append(str(e))
    if needed > train and not track.once:
        notes.append(f"The run goes through the {train:,} training tokens about {needed / train:.1f} times.")
    if track.val_tokens and val - 1 < track.val_tokens:
        problems.append(
            f"Validation takes {track.val_tokens:,} tokens, but {tokens.path} has {val:,}; get the whole val shard."
        )


# -------------------------------------------------------------------- time


def matmul_speed(machine: Machine, config: GPTConfig, seconds: float = 1.0) -> float:
    """FLOP/s of the MLP's first matmul, with 1,024 tokens, in the arithmetic of the run; measured for about a second.

    The largest of several attempts: what else the machine does at this moment is not the run's.
    """
    width, hidden, tokens = min(config.width, 2048), min(config.mlp_width, 8192), 1024
    x = torch.randn(tokens, width, device=machine.device, dtype=machine.dtype)
    w = torch.randn(hidden, width, device=machine.device, dtype=machine.dtype)
    repeats = max(1, int(1e9 / (2 * tokens * width * hidden)))  # so that an attempt is longer than the clock is coarse
    best, until = math.inf, time.perf_counter() + seconds
    for attempt in range(1000):
        synchronize(machine.device)
        began = time.perf_counter()
        for _ in range(repeats):
            x @ w.t()
        synchronize(machine.device)
        took = time.perf_counter() - began
        if attempt:  # the first one starts threads and fills caches
            best = min(best, took)
        if attempt and time.perf_counter() > until:
            break
    return 2.0 * repeats * tokens * width * hidden / best


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
