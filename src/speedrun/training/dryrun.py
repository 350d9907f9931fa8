"""What a run would be, without running it: `speedrun train --dry-run`.

Parameters and who trains them, the stages of the schedule, memory, arithmetic, an estimate of the time, and what does
not fit. Nothing is trained and nothing is written. The model is built without memory, so a recipe of any size is looked
at in seconds on a small machine.

What is exact: parameters, stages, tokens, and the bytes of weights, gradients, optimizer state and checkpoints. What is
an estimate, and is called so: activations and the memory of a validation batch (memory.py), FLOPs (the optimizer's own
are left out) and with them the time.
"""

import itertools
import math
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedrun.data import TokenFolder
from speedrun.errors import UserError, plural
from speedrun.model import GPTConfig, Role, flops_per_token
from speedrun.optim import Muon, TrainerOptimizer, value_at
from speedrun.tracks import Track
from speedrun.training import scale
from speedrun.training.clock import synchronize
from speedrun.training.config import Options, Recipe
from speedrun.training.device import Machine
from speedrun.training.memory import Memory, checkpoint_bytes, gib, memory_of, problems_of, skeleton
from speedrun.training.run import check_rules, check_supply, fit_to_tokens
from speedrun.training.schedule import ScheduleConfig, Stage

# A training step reaches this share of the FLOP/s of bare matmuls. benchmarks/throughput.py measures 0.65 for `adamw`
# on two CPU cores; recipes with gates, windows and orthogonalised updates get less.
ATTAINABLE = 0.5


Row = tuple[str, ...]


@dataclass(frozen=True)
class DryRun:
    count: int
    """Of all parameters."""
    parameters: list[Row]
    """Who trains them at which rate, and what they take."""
    stages: list[Row]
    memory: Memory
    flops: float
    """Of the whole training: forward and backward."""
    checkpoint: int
    """Bytes of one."""
    checkpoints: int
    """How many lie on the disk at once, the one being written included."""
    lines: list[str]
    """Disk, arithmetic and time."""
    problems: list[str]
    """What does not fit, a sentence each."""
    notes: list[str]
    """What fits, but should be known."""


def examine(recipe: Recipe, track: Track, machine: Machine, options: Options, out: Path, ranks: int = 1) -> DryRun:
    """Everything about a run of this recipe into `out`. Raises UserError only where the recipe breaks a rule."""
    check_rules(recipe, track)
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
    model, optimizer, states = skeleton(recipe)
    roles = dict(zip(model.parameters(), model.param_roles().values(), strict=True))
    memory = memory_of(recipe, machine, options, ranks)
    problems += problems_of(memory, recipe)
    notes += smaller_batches(memory, recipe.schedule, ranks)
    checkpoint = checkpoint_bytes(recipe, list(model.parameters()), states)
    count = options.keep + 1 if options.checkpoint_every else int(options.save)
    free = shutil.disk_usage(next(p for p in (out.absolute(), *out.absolute().parents) if p.is_dir())).free
    if checkpoint * count > free:
        problems.append(
            f"Checkpoints take {gib(checkpoint * count)} ({count} of {gib(checkpoint)}), but the disk of {out} has "
            f"{gib(free)} left; free some, or choose another disk with --out, or fewer with --keep 1 or --save False "
            "--checkpoint-every 0."
        )
    laid = spans(recipe.schedule)
    flops = sum(s[0].tokens * len(s) * flops_per_token(recipe.model, s[0].seq_len, s[0].windows) for s in laid)
    return DryRun(
        count=sum(p.numel() for p in model.parameters()),
        parameters=parameter_table(kinds_of(optimizer, roles, recipe), states),
        stages=stage_table(recipe, laid),
        memory=memory,
        flops=flops,
        checkpoint=checkpoint,
        checkpoints=count,
        lines=[
            f"disk         {count} x {gib(checkpoint)} of checkpoints, {gib(free)} free",
            *time_lines(recipe, machine, flops, validated),
        ],
        problems=problems,
        notes=notes,
    )


# -------------------------------------------------------------------- parameters


NAMES = {"attention_qkv": "attention", "attention_out": "attention", "mlp_up": "MLP up", "mlp_down": "MLP down"}
"""What the table calls these roles; the others have their own names."""


def kinds_of(
    optimizer: TrainerOptimizer, roles: dict[nn.Parameter, Role], recipe: Recipe
) -> dict[tuple[str, str, float, float], list[nn.Parameter]]:
    """Parameters of one kind that one optimizer trains at one rate, before the schedule: (kind, optimizer, rate, how
    many times the base rate)."""
    kinds: dict[tuple[str, str, float, float], list[nn.Parameter]] = {}
    for member in optimizer.members():
        for group in member.param_groups:
            base = recipe.optim.muon.lr if isinstance(member, Muon) else recipe.optim.lr
            who = type(member).__name__
            if who == "Adam" and group["weight_decay"] and group["decay"] == "decoupled":
                who = "AdamW"
            for index, p in enumerate(group["params"]):
                kind = NAMES.get(roles[p], roles[p].replace("_", " "))
                lr = group["initial_lr"] * value_at(group["lr_mul"], index)
                kinds.setdefault((kind, who, lr, lr / base if base else 1.0), []).append(p)
    return kinds


def parameter_table(
    kinds: dict[tuple[str, str, float, float], list[nn.Parameter]], states: dict[Any, int]
) -> list[Row]:
    rows: list[Row] = [("parameters", "trained by", "tensors", "number", "learning rate", "weights", "state")]
    for (kind, who, lr, multiplier), ps in kinds.items():
        rate = f"{lr:.4g}" + (f" ({multiplier:.4g}x)" if round(multiplier, 9) != 1 else "")
        weights, state = gib(sum(p.nbytes for p in ps)), gib(sum(states[p] for p in ps))
        rows.append((kind, who, f"{len(ps)}", f"{sum(p.numel() for p in ps):,}", rate, weights, state))
    return rows


# -------------------------------------------------------------------- stages


def spans(schedule: ScheduleConfig) -> list[list[Stage]]:
    """The steps, parted wherever something else than a rate, a momentum or a weight changes."""

    def what(s: Stage) -> tuple[object, ...]:
        return s.batch_size, s.seq_len, s.windows, len(s.mtp_weights), s.tied

    return [list(alike) for _, alike in itertools.groupby(map(schedule.at, range(schedule.total)), what)]


def stage_table(recipe: Recipe, laid: list[list[Stage]]) -> list[Row]:
    def over(values: Iterable[float]) -> str:
        return " > ".join(f"{value:.4g}" for value in values) or "-"

    rows: list[Row] = [("steps", "batch x length", "windows", "lr factor", "momentum", "loss weights", "head")]
    for stages in laid:
        first, last = stages[0], stages[-1]
        windows = "-" if first.windows is None else f"{first.windows.short}, {first.windows.long}"
        lr = over(turns([s.lr for s in stages]))
        momentum = over(turns([s.momentum for s in stages if s.momentum is not None]))
        weights = ", ".join(over(dict.fromkeys(pair)) for pair in zip(first.mtp_weights, last.mtp_weights, strict=True))
        head = "tied" if recipe.model.head.tied and (first.tied or not recipe.model.head.untie) else "its own"
        head += ", then untied" if last.untie else ""
        shape = f"{first.batch_size} x {first.seq_len}"
        rows.append((f"{first.step}-{last.step}", shape, windows, lr, momentum, weights, head))
    return rows


def turns(values: Sequence[float]) -> list[float]:
    """The first value, each value at which rising becomes falling or the reverse, and the last one."""
    found: list[float] = []
    for value in values:
        if found and value == found[-1]:
            continue
        if len(found) > 1 and (found[-1] > found[-2]) == (value > found[-1]):
            found[-1] = value
        else:
            found.append(value)
    return found


# -------------------------------------------------------------------- memory


def memory_table(memory: Memory) -> list[Row]:
    kept = f"for {plural(memory.rows, 'row')} at once, "
    kept += "from the compiled graph" if memory.measured else "an estimate, not compiled"
    if memory.measured is None:
        kept = "not measured"
    when = "not at the same time as activations" + ("" if memory.measured else ", an estimate")
    taken = [
        ("weights", memory.weights, "with rotary tables"),
        ("gradients", memory.gradients, ""),
        ("optimizer state", memory.optimizer, "when it is fullest"),
        ("transfers", memory.transfers, "where gradients of all processes are put together"),
        ("copy of weights", memory.warm_up, "during the warm-up"),
        ("this program", memory.process, ""),
        ("activations", memory.activations, kept),
        ("validation", memory.validation, when),
        ("together", memory.total, "of " + ("?" if memory.usable is None else gib(memory.usable))),
    ]
    return [(what, gib(many) if many else "?", why) for what, many, why in taken if many or what == "activations"]


def smaller_batches(memory: Memory, schedule: ScheduleConfig, ranks: int) -> list[str]:
    """From which step on a batch does not fit into memory at once, a sentence for each change."""
    since: dict[tuple[int, int], int] = {}  # (rows, of how many): which step
    for stage in schedule.visits() if memory.measured is not None else ():
        mine = -(-stage.batch_size // ranks)
        if (rows := memory.micro_batch_sizes.get(stage.shape, mine)) < mine:
            since.setdefault((rows, mine), stage.step)
    return [
        f"Micro-batches of {rows} of {mine} rows from step {step} on: more do not fit into memory at once."
        for (rows, mine), step in since.items()
    ]


# -------------------------------------------------------------------- data


def data_problems(recipe: Recipe, track: Track, tokens: TokenFolder, problems: list[str], notes: list[str]) -> None:
    """Adds what is wrong with, or worth knowing of, the tokens that are there."""
    train, val = tokens.tokens("train"), tokens.tokens("val")
    if tokens.vocab_size > recipe.model.vocab_size:
        problems.append(
            f"The data has {tokens.vocab_size} different tokens, the model only {recipe.model.vocab_size}; "
            f"pass --model.vocab-size {tokens.vocab_size}."
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


def time_lines(recipe: Recipe, machine: Machine, flops: float, validated: int | None) -> list[str]:
    """Arithmetic, and how long it may take; `validated`: tokens of one validation, None: not known."""
    schedule, v = recipe.schedule, recipe.validation
    per_token = flops / schedule.tokens / 1e9
    lines = [f"arithmetic   {per_token:.3g} GFLOP per token, {flops:.3g} FLOP in all, without the optimizer's"]
    if not machine.here:
        return [*lines, "time         not known: the device is not here"]
    speed = matmul_speed(machine, recipe.model)
    forward = flops_per_token(recipe.model, v.seq_len, schedule.after(schedule.total).windows) / 3
    outside = forward * (validated or 0) * (math.ceil(schedule.total / v.every) + v.first)
    beside = f", and about {duration(outside / (ATTAINABLE * speed))} for validation outside the clock"
    return [
        *lines,
        f"matmuls      {speed / 1e9:,.0f} GFLOP/s, measured here just now",
        f"time         about {duration(flops / (ATTAINABLE * speed))}{beside if outside else ''}",
        f"             (an estimate: a training step gets about {ATTAINABLE:g} of the speed of bare matmuls)",
    ]


def matmul_speed(machine: Machine, config: GPTConfig, seconds: float = 1.0) -> float:
    """FLOP/s of the MLP's first matmul, with 1,024 tokens, in the arithmetic of the run; measured for about a second.

    The largest of several attempts: what else the machine does at this moment is not the run's.
    """
    width, hidden, tokens = min(config.dim, 2048), min(config.mlp_dim, 8192), 1024
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
