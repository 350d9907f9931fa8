"""What each switch of a recipe is worth: every one turned off alone, with the same seeds, in turns.

    speedrun ablate --recipe normuon --set schedule.steps=200 --seeds 5 --budget 240

Every round is one seed: the recipe as it is, a shorter one, and each variant, in an order that is reversed with every
round. Effects are differences to the recipe as it is, paired by seed, with 95 % intervals, corrected by Holm for the
number of switches. The shorter run gives the exchange rate between loss and training, by which an effect on the loss at
equal tokens becomes one on the time to the same loss. The same command continues; the budget decides how many rounds.
With --jobs several runs share the machine: more losses an hour, and seconds that are less sure.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from speedrun.checks import AboveZero, Count, NotNegative, Positive
from speedrun.errors import UserError, nearest, plural
from speedrun.experiments import trial
from speedrun.experiments.race import change_recipe
from speedrun.experiments.statistics import Effect, effect, holm
from speedrun.tracks import get_track
from speedrun.training import Recipe, check_processes, fields_of, run, runlog, scale, usable_cores, with_fields

Changes = dict[str, Any]
Row = dict[str, Any]
PLAN = "ablation.json"
BASE, SHORTER = "as it is", "shorter"
SHARE = 0.1  # how much shorter the run is that gives the exchange rate

NO_WINDOWS: Changes = {
    "schedule.window_ramp": None, "schedule.window_cubic": None, "schedule.window_extra": None,
    "schedule.window_final": None, "schedule.window_short": None, "model.attention.long_layers": (),
    "model.attention.key_offset": False, "model.attention.yarn": False,
}  # fmt: skip
NO_MOMENTUM: Changes = {"schedule.momentum_warmup": 0, "schedule.momentum_cooldown": 0}
# What turns each technique off. A recipe has the ones whose first field it sets otherwise.
SWITCHES: dict[str, Changes] = {
    "muon": {"optim.matrices": "adam", "optim.weights": "float32", **NO_MOMENTUM},
    "row-norms": {"optim.matrices": "muon"},
    "polar-express": {"optim.muon.method": "newton-schulz"},
    "nesterov": {"optim.muon.nesterov": False},
    "split-qkv": {"optim.muon.split_qkv": False},
    "update-average": {"optim.muon.update_ema": None},
    "muon-gates": {"optim.muon.gates": False},
    "muon-decay": {"optim.muon.weight_decay": 0.0},
    "momentum-schedule": NO_MOMENTUM,
    "adam-every": {"optim.every": 1},
    "adam-decay": {"optim.weight_decay": 0.0},
    "cautious-decay": {"optim.decay": "decoupled", "optim.muon.decay": "decoupled"},
    "exact-bf16": {"optim.weights": "float32"},
    "snoo": {"optim.snoo.k": None},
    "value-embeddings": {
        "model.embeddings.value_layers": (), "model.embeddings.value_gates": False,
        "model.embeddings.value_lambdas": False,
    },
    "value-gates": {"model.embeddings.value_gates": False},
    "value-lambdas": {"model.embeddings.value_lambdas": False},
    "attention-gates": {"model.attention.gates": False},
    "attention-lambdas": {"model.attention.lambdas": False},
    "key-offset": {"model.attention.key_offset": False},
    "half-rotary": {"model.attention.rotary": "full", "model.attention.key_offset": False},
    "qk-norm": {"model.attention.qk_norm": False},
    "value-norm": {"model.attention.value_norm": False},
    "yarn": {"model.attention.yarn": False},
    "windows": NO_WINDOWS,
    "no-attention-layers": {"model.no_attention": ()},
    "smear": {"model.embeddings.smear": False},
    "smear-mtp": {"model.head.smear_mtp": False},
    "skips": {"model.residual.skips": (), "model.residual.skip_gates": False},
    "skip-gates": {"model.residual.skip_gates": False},
    "backout": {"model.residual.backout": None},
    "residual-lambdas": {"model.residual.lambdas": None},
    "x0-lambdas": {"model.residual.x0_lambdas": False, "model.embeddings.second": False},
    "second-embedding": {"model.embeddings.second": False},
    "embed-norm": {"model.embeddings.norm": False},
    "softcap": {"model.head.softcap": None},
    "fp8-head": {"model.head.fp8": False},
    "split-head": {"model.head.untie": False, "schedule.untie_at": None},
    "multi-token": {"schedule.mtp_tokens": 1},
    "lr-ramp": {"schedule.lr_ramp": None},
    "zero-init": {"model.init.zero_init": False},
    "relu2": {"model.activation": "gelu"},
}  # fmt: skip


@dataclass(frozen=True)
class AblationArgs(trial.ExperimentArgs):
    set: tuple[str, ...] = ()
    """FIELD=value, changed in every run, such as schedule.steps=200 for a shorter one."""
    switches: tuple[str, ...] = ()
    """Which switches; default: all that the recipe has."""
    pairs: tuple[str, ...] = ()
    """Pairs of switches that are also turned off together."""
    seeds: Positive = 5
    """Rounds, one seed each."""
    first_seed: Count = 3000
    """Seed of the first round."""
    budget: NotNegative = 60.0
    """Minutes; no round is started that would not end within it. Time spent before a restart counts."""
    out: Path = Path("ablations/ablation")
    """Where rows.jsonl is kept; the same folder continues."""
    jobs: Positive = 1
    """Number of runs at a time."""


def switches_of(recipe: Recipe) -> dict[str, Changes]:
    """The switches that are on, and the fields that turn each off."""
    known = fields_of(recipe)
    on = {name: off for name, off in SWITCHES.items() if known[next(iter(off))] != next(iter(off.values()))}
    if recipe.optim.matrices == "adam":  # then Muon's fields say nothing
        on = {name: off for name, off in on.items() if not next(iter(off)).startswith("optim.muon.")}
    return on


def variants(recipe: Recipe, args: AblationArgs) -> dict[str, Recipe]:
    """Every recipe of the ablation by name, the recipe itself and the shorter one first."""
    on = switches_of(recipe)
    for name in (*args.switches, *(part for pair in args.pairs for part in pair.split("+"))):
        if name not in SWITCHES:
            raise UserError(f"There is no switch {name!r}.{nearest(name, SWITCHES)}")
        if name not in on:
            raise UserError(f"Recipe {recipe.name!r} does not use {name!r}; it has {', '.join(on)}.")
    wanted = {name: on[name] for name in args.switches or on}
    for pair in args.pairs:
        if pair.count("+") != 1:
            raise UserError(f"{pair!r} is no pair of switches; write one+other.")
        wanted[pair] = {field: value for part in pair.split("+") for field, value in on[part].items()}
    fewer = max(1, round((1 - SHARE) * recipe.schedule.steps))
    if fewer == recipe.schedule.steps:
        raise UserError(f"schedule.steps is {recipe.schedule.steps}, too few for a run that is a tenth shorter.")
    found = {BASE: recipe, SHORTER: with_fields(recipe, {"schedule.steps": fewer})}
    for name, off in wanted.items():
        found[name] = with_fields(recipe, off)
    return found


# -------------------------------------------------------------------- running


@dataclass(frozen=True)
class AblationPlan:
    args: AblationArgs
    base: Recipe
    token_files: dict[str, str]
    variants: tuple[str, ...]
    source: str


def run_ablation(args: AblationArgs, console: Console) -> list["Line"]:
    """Do what the budget allows, and return the table's lines."""
    check_processes(args.nproc, args.device)
    _, recipe = change_recipe(args.recipe, get_track(args.track).name, args.set)
    track = args.find_track()
    recipe = run.fit_to_tokens(recipe, track.locate(), track)
    recipe = with_fields(recipe, {"validation.first": False, "validation.every": 10**6})
    entrants = variants(recipe, args)
    for entrant in entrants.values():
        scale.check(entrant)
        run.check_ranks(entrant, args.nproc)
    args = trial.with_arithmetic(args, args.out / PLAN, AblationPlan, recipe, args.jobs)
    plan = AblationPlan(args, recipe, track.files, tuple(entrants), runlog.source_sha256())
    trial.check_same_plan(args.out / PLAN, plan, "an ablation", free=("seeds", "budget", "out", "data"))
    rows = Rows(args.out / trial.ROWS)
    for number in range(args.seeds):
        seed = args.first_seed + number
        missing = [name for name in entrants if (name, seed) not in rows.known]
        expected = sum(rows.minutes_of(name) for name in missing) / args.jobs
        if missing and rows.minutes / args.jobs + expected > args.budget:
            console.print(f"the budget of {args.budget:g} minutes allows no further round; raise --budget to continue")
            break
        turn = missing if number % 2 == 0 else missing[::-1]
        with ThreadPoolExecutor(args.jobs) as pool, trial.ChildProcesses() as processes:
            each = partial(execute, args, processes, seed=seed)
            for row in pool.map(each, turn, [entrants[name] for name in turn]):
                rows.add(row)
                text = f"loss {row['loss']:.4f}  {row['seconds']:.2f} s" if row["status"] == "ok" else row["status"]
                console.print(f"  seed {seed}  {row['variant']}: {text}")
    return lines_of(rows.rows, list(entrants))


@dataclass(frozen=True)
class VariantRun:
    """A row of an ablation."""

    variant: str
    seed: int
    status: str
    loss: float | None
    seconds: AboveZero
    tokens: int
    steps: int
    minutes: float


class Rows(trial.RowLog):
    def __init__(self, file: Path) -> None:
        super().__init__(file, VariantRun)

    @property
    def known(self) -> set[tuple[str, int]]:
        return {(row["variant"], row["seed"]) for row in self.rows}

    def minutes_of(self, name: str) -> float:
        """What a run of this variant took, or of any; before the first one nothing is known."""
        own = [row["minutes"] for row in self.rows if row["variant"] == name] or [row["minutes"] for row in self.rows]
        return float(sum(own) / len(own)) if own else 0.0


def execute(args: AblationArgs, processes: trial.ChildProcesses, name: str, recipe: Recipe, seed: int) -> Row:
    slug = hashlib.sha256(name.encode()).hexdigest()[:8]
    file = trial.write_recipe(args.out / "recipes" / f"{slug}-s{seed}.json", recipe)
    settings = args.settings
    if args.jobs > 1 and settings.threads is None:
        settings = dataclasses.replace(settings, threads=max(1, usable_cores() // (args.jobs * args.nproc)))
    one = trial.Trial(file, seed, args.out / "runs" / f"{slug}-s{seed}-{time.time_ns()}", settings, args.data)
    began = time.monotonic()
    try:
        result = trial.run_trial(one, processes)
    except trial.NoResult as e:
        raise UserError(f"The run without {name!r} ended without a result: {e}.") from e
    ok = result.status == "ok"
    return {
        "variant": name,
        "seed": seed,
        "status": "ok" if ok else f"failed: {result.reason}",
        "loss": result.val_loss if ok else None,
        "seconds": result.train_time,
        "tokens": result.tokens,
        "steps": result.steps,
        "minutes": (time.monotonic() - began) / 60,
    }


# -------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Line:
    """What turning one switch off does."""

    name: str
    failed: int
    loss: Effect | None
    """Difference of the final loss at equal tokens; above 0: the switch helps."""
    p: float | None
    """Of that difference, corrected for the number of switches."""
    seconds: Effect | None
    """Logarithm of the ratio of seconds at equal tokens; above 0: the switch saves time."""
    to_target: Effect | None
    """The same to an equal loss, by the exchange rate; above 0: the switch is worth the time it takes."""


def lines_of(rows: list[Row], names: Sequence[str]) -> list[Line]:
    """One line per switch, the most useful first, the harmful ones last; the shorter run leads."""
    by = {(row["variant"], row["seed"]): row for row in rows}
    good = {seed for name, seed in by if name == BASE and by[name, seed]["status"] == "ok"}

    def pairs(name: str) -> list[tuple[Row, Row]]:
        shared = sorted(s for s in good if (name, s) in by and by[name, s]["status"] == "ok")
        return [(by[name, s], by[BASE, s]) for s in shared]

    shorter = [v["loss"] - b["loss"] for v, b in pairs(SHORTER)]
    rate = sum(shorter) / len(shorter) if shorter else math.nan  # nats that a tenth of the steps is worth
    found = []
    for name in names[1:]:
        both = pairs(name)
        failed = sum(1 for (n, _), row in by.items() if n == name and row["status"] != "ok")
        if not both:
            found.append(Line(name, failed, None, None, None, None))
            continue
        losses = [v["loss"] - b["loss"] for v, b in both]
        times = [math.log(v["seconds"] / b["seconds"]) for v, b in both]
        to_target = None
        if rate > 0 and name != SHORTER:
            to_target = effect([t + d / rate * -math.log(1 - SHARE) for t, d in zip(times, losses, strict=True)])
        found.append(Line(name, failed, effect(losses), None, effect(times), to_target))
    tested = [line for line in found if line.loss is not None and line.name != SHORTER]
    corrected = holm([line.loss.p for line in tested if line.loss is not None])
    whole = {line.name: dataclasses.replace(line, p=p) for line, p in zip(tested, corrected, strict=True)}
    found = [whole.get(line.name, line) for line in found]
    return sorted(found, key=lambda line: (line.name != SHORTER, -line.loss.mean if line.loss else math.inf))


def ablation_table(lines: list[Line]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("turned off", "seeds", "loss", "95 % interval", "p (Holm)", "seconds", "to the same loss", "95 % interval")
    ]
    for line in lines:
        name = line.name if line.name != SHORTER else f"a tenth of the steps less ({SHORTER})"
        if line.loss is None or line.seconds is None:
            rows.append((name, "0", f"{plural(line.failed, 'run')} failed", "", "", "", "", ""))
            continue
        e, t = line.loss, line.to_target
        note = f" ({line.failed} failed)" if line.failed else ""
        rows.append(
            (
                name,
                f"{e.n}{note}",
                f"{e.mean:+.4f}",
                f"{e.low:+.4f} to {e.high:+.4f}",
                "" if line.p is None else f"{line.p:.3g}",
                f"{100 * math.expm1(line.seconds.mean):+.1f} %",
                "" if t is None else f"{100 * math.expm1(t.mean):+.1f} %",
                "" if t is None else f"{_percent(t.low)} to {_percent(t.high)}",
            )
        )
    return rows


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.1f} %" if abs(log) < 20 else "?"
