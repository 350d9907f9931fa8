"""Search a recipe's fields within a budget, and keep every result.

    speedrun sweep --vary optim.lr=0.001..0.01:log schedule.batch_size=4,8,16 --method halving --trials 9 --budget 60

A value list (`a,b,c`) or a range (`low..high`, with `:log` for a logarithmic one) can be given for any field, steps
included. `--clock 150` sets the steps of each candidate so that it trains 150 seconds on this machine, which is how
shapes of different speed are compared fairly. Every trial is a process of its own and leaves one row in rows.jsonl;
the same command continues where it was stopped. Only the validation split is ever read.
"""

import hashlib
import itertools
import json
import math
import random
import shlex
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from msgspec import Meta
from rich.console import Console
from rich.table import Table

from speedrun.checks import AboveZero, NotNegative, Positive
from speedrun.errors import UserError, nearest, plural
from speedrun.experiments import trial
from speedrun.files import read_json
from speedrun.recipes import get_recipe
from speedrun.tracks import get_track
from speedrun.training import Recipe, check_processes, fields_of, run, runlog, scale, with_fields

CALIBRATION_STEPS = 24
FREE = ("optim.", "schedule.warmup", "schedule.cooldown", "schedule.min_lr_ratio", "schedule.steps", "validation.")
"""Fields that cost no time; but optim.clip does."""
PLAN = "sweep.json"
Fields = dict[str, Any]


@dataclass(frozen=True)
class SweepArgs(trial.ExperimentArgs):
    """`recipe` is where the search starts: the first candidate is the recipe as it is."""

    vary: tuple[str, ...] = ()
    """FIELD=a,b,c or FIELD=low..high or FIELD=low..high:log; `speedrun recipes show NAME` lists the fields."""
    fix: tuple[str, ...] = ()
    """FIELD=value, changed in every candidate."""
    method: Literal["coordinate", "halving", "random", "grid"] = "coordinate"
    """coordinate: one field at a time, keeping the best; grid: all combinations (a range is five values for both);
    halving: many short trials, the best ones continue longer; random: independent samples."""
    trials: Positive = 9
    """Number of candidates of halving and random."""
    eta: Annotated[int, Meta(ge=2)] = 3
    """Halving keeps one in eta, and gives them eta times the steps."""
    rungs: Positive = 3
    """Halving: number of times, the last one with all steps."""
    rounds: Positive = 2
    """Coordinate: times through all fields, unless nothing improves any more."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of each candidate; their mean loss counts."""
    clock: AboveZero | None = None
    """Training seconds of each candidate: steps follow from a short timing of it; default: the recipe's steps."""
    budget: NotNegative = 60.0
    """Minutes; no trial is started after that. Time spent before a restart counts."""
    random_seed: int = 0
    """Seed of the random samples."""
    compile: bool | None = None  # type: ignore[assignment]
    """Use torch.compile. Default: where it works, unless a trial on a CPU is so short that it only costs time."""
    out: Path = Path("sweeps/sweep")
    """Where rows.jsonl is kept; the same folder continues."""


@dataclass
class Range:
    """The values a field may take."""

    name: str
    choices: list[Any] = field(default_factory=list)
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @classmethod
    def parse(cls, text: str, recipe: Recipe) -> "Range":
        name, _, values = text.partition("=")
        old = field_of(recipe, name)
        if ".." in values:
            body, _, kind = values.partition(":")
            low, _, high = body.partition("..")
            try:
                bounds = float(low), float(high)
            except ValueError:
                raise UserError(
                    f"{text!r} is no range; write {name}=low..high, with :log for a logarithmic one."
                ) from None
            if isinstance(old, bool) or not isinstance(old, (int, float, NoneType)):
                raise UserError(f"{text!r} is a range, but {name} is no number (it is {old!r} now); list its values.")
            least = 0.0 if kind == "log" else -math.inf
            if kind not in ("", "log") or not least < bounds[0] < bounds[1] < math.inf:
                raise UserError(f"{text!r} is no range; low must be below high, both finite, and above 0 for :log.")
            return cls(
                name,
                low=bounds[0],
                high=bounds[1],
                log=kind == "log",
                whole=isinstance(old, int) or (old is None and "." not in low + high),
            )
        choices = [value_of(v, old, name) for v in values.split(",") if v != ""]
        if not choices:
            raise UserError(f"{text!r} names no values; write {name}=a,b,c or {name}=low..high.")
        return cls(name, choices)

    def at(self, share: float) -> Any:
        """The value at a share of the way from low to high."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        x = low + (high - low) * share
        x = math.exp(x) if self.log else x
        return round(x) if self.whole else float(f"{x:.3g}")

    def sample(self, rng: random.Random) -> Any:
        return rng.choice(self.choices) if self.choices else self.at(rng.random())

    def grid_values(self) -> list[Any]:
        """Values for one-at-a-time search: the list, or five points of the range."""
        return self.choices or list(dict.fromkeys(self.at(i / 4) for i in range(5)))


def field_of(recipe: Recipe, name: str) -> Any:
    """The value that a field has now; UserError if there is no such field."""
    known = {field: value for field, value in fields_of(recipe).items() if "." in field}
    if name not in known:
        raise UserError(f"Recipe {recipe.name!r} has no field {name!r}.{nearest(name, known)}")
    return known[name]


def value_of(text: str, old: Any, name: str) -> Any:
    """`text` as the type the field has now, or None; the recipe itself refuses what the field cannot be."""
    try:
        if isinstance(old, bool):
            return {"true": True, "false": False}[text.lower()]
        if text == "None":
            return None
        if old is None and text[:1].isalpha():  # a word; the recipe refuses one that it does not know
            return text
        return type(old)(text) if isinstance(old, (int, float, str)) else json.loads(text)
    except (KeyError, ValueError):
        kind = "a number, or whole numbers in []" if old is None else type(old).__name__
        raise UserError(f"{name}={text} does not fit: its type is {kind}, as in {old!r}.") from None


class BudgetSpent(Exception):
    pass


class SweepRunner:
    """Runs candidates within the budget, and keeps their rows."""

    def __init__(self, args: SweepArgs, base: Recipe, fixed: Fields, console: Console) -> None:
        self.args, self.base, self.fixed, self.console = args, base, fixed, console
        self.log = trial.RowLog(args.out / trial.ROWS, Candidate)
        if self.log.torn:
            console.print(f"the last row of {self.log.file} was torn; it is dropped")
        self.known = {r["key"]: r for r in self.log.rows}

    def loss(self, changes: Fields, share: float = 1.0) -> float:
        """Mean loss of a candidate over the seeds, at a share of its full steps; infinite for one that fails."""
        usual = fields_of(self.base)
        changes = {name: value for name, value in changes.items() if value != usual[name]}
        try:
            steps = max(1, round(share * self.full_steps(changes)))
        except UserError as e:
            self.console.print(f"  skipped {self.show(changes)}: {e}")
            return math.inf
        return statistics.mean(loss_of(self.run_once("trial", changes, seed, steps)) for seed in self.args.seeds)

    def full_steps(self, changes: Fields) -> int:
        recipe = with_fields(self.base, changes)
        scale.check(recipe)
        run.check_ranks(recipe, self.args.nproc)
        if self.args.clock is None:
            return recipe.schedule.steps
        return max(1, int(self.args.clock / self.step_seconds(changes)))

    def step_seconds(self, changes: Fields) -> float:
        """Median step of a short run, shared by candidates that differ only in numbers that cost no time."""
        costly = {k: v for k, v in changes.items() if not k.startswith(FREE) or k == "optim.clip"}
        row = self.run_once("calibration", costly, seed=0, steps=CALIBRATION_STEPS)
        if row["status"] != "ok":
            raise UserError(f"the timing run failed ({row['status']})")
        return float(row["step_seconds"])

    def run_once(self, kind: str, changes: Fields, seed: int, steps: int) -> dict[str, Any]:
        key = hashlib.sha256(json.dumps([kind, sorted(changes.items()), seed, steps]).encode()).hexdigest()[:16]
        if key in self.known:
            return self.known[key]
        if self.log.minutes >= self.args.budget:
            raise BudgetSpent
        row = self.execute(kind, changes, seed, steps, key)
        self.log.add(row)
        self.known[key] = row
        text = f"loss {row['loss']:.4f}" if row["status"] == "ok" else row["status"]
        text = f"{1000 * row['step_seconds']:.1f} ms/step" if "step_seconds" in row and kind != "trial" else text
        self.console.print(
            f"  {text:>12}  {steps:6} steps  {row['minutes']:5.1f} min  {self.show(changes)}  seed {seed}"
        )
        return row

    def execute(self, kind: str, changes: Fields, seed: int, steps: int, key: str) -> dict[str, Any]:
        wanted = {**changes, "schedule.steps": steps}
        if kind == "calibration":
            wanted["validation.every"] = 10**9
        file = trial.write_recipe(self.recipe_file(key), with_fields(self.base, wanted))
        folder = self.args.out / "runs" / f"{key}-{time.time_ns()}"
        one = trial.Trial(file, seed, folder, self.args.settings, self.args.data)
        began = time.monotonic()
        row: dict[str, Any] = {"key": key, "kind": kind, "fields": changes, "seed": seed, "steps": steps}
        try:
            result = trial.run_trial(one, trial.ChildProcesses())
        except trial.NoResult as e:
            return row | {"minutes": (time.monotonic() - began) / 60, "status": f"no result: {e}", "loss": None}
        row["minutes"] = (time.monotonic() - began) / 60
        ok = result.status == "ok"
        row |= {"status": "ok" if ok else f"{result.status}: {result.reason}", "loss": result.val_loss}
        row |= {"train_time": result.train_time, "tokens": result.tokens}
        times = [m["time"] for m in runlog.read_metrics(folder, "train")]
        if ok and len(times) > 1:
            row["step_seconds"] = statistics.median(b - a for a, b in itertools.pairwise(times))
        return row

    def recipe_file(self, key: str) -> Path:
        return self.args.out / "recipes" / f"{key}.json"

    def show(self, changes: Fields) -> str:
        """What sets a candidate apart; what is fixed in all of them is not repeated."""
        usual = fields_of(self.base)
        start, now = {**usual, **self.fixed}, {**usual, **changes}
        return " ".join(f"{k}={v}" for k, v in now.items() if start[k] != v) or "the start"


@dataclass(frozen=True)
class Candidate:
    """A row of a sweep."""

    key: str
    kind: str
    fields: dict[str, Any]
    seed: int
    steps: int
    minutes: float
    status: str
    loss: float | None
    train_time: float | None = None
    tokens: int | None = None
    step_seconds: float | None = None


def loss_of(row: dict[str, Any]) -> float:
    """A failed trial has no loss, which counts as infinite."""
    return math.inf if row["loss"] is None else float(row["loss"])


# -------------------------------------------------------------------- methods


def coordinate(runner: SweepRunner, ranges: list[Range], start: Fields) -> None:
    best, best_loss = start, runner.loss(start)
    for _ in range(runner.args.rounds):
        before = best
        for axis in ranges:
            for value in axis.grid_values():
                candidate = {**best, axis.name: value}
                loss = runner.loss(candidate)
                if loss < best_loss:
                    best, best_loss = candidate, loss
        if best == before:
            return


def halving(runner: SweepRunner, ranges: list[Range], start: Fields) -> None:
    rng = random.Random(runner.args.random_seed)
    pool: list[Fields] = [start]
    pool += [{**start, **{r.name: r.sample(rng) for r in ranges}} for _ in range(runner.args.trials - 1)]
    for rung in range(runner.args.rungs):
        share = runner.args.eta ** (rung + 1 - runner.args.rungs)
        scored = sorted(((runner.loss(c, share), i, c) for i, c in enumerate(pool)), key=lambda s: s[:2])
        pool = [c for _, _, c in scored[: max(1, len(scored) // runner.args.eta)]]


def random_search(runner: SweepRunner, ranges: list[Range], start: Fields) -> None:
    rng = random.Random(runner.args.random_seed)
    runner.loss(start)
    for _ in range(runner.args.trials - 1):
        runner.loss({**start, **{r.name: r.sample(rng) for r in ranges}})


def grid(runner: SweepRunner, ranges: list[Range], start: Fields) -> None:
    for values in itertools.product(*(r.grid_values() for r in ranges)):
        runner.loss({**start, **dict(zip((r.name for r in ranges), values, strict=True))})


METHODS = {"coordinate": coordinate, "halving": halving, "random": random_search, "grid": grid}


# -------------------------------------------------------------------- the command


def run_sweep(args: SweepArgs, console: Console) -> None:
    base = get_recipe(args.recipe, get_track(args.track).name)
    if not args.seeds or min(args.seeds) < 0:
        raise UserError(f"--seeds is {' '.join(map(str, args.seeds)) or 'empty'}; name at least one, none negative.")
    fixed = dict(fixed_value(text, base) for text in args.fix)
    ranges = [Range.parse(text, base) for text in args.vary]
    check_processes(args.nproc, args.device)
    run.check_ranks(with_fields(base, fixed), args.nproc)
    if args.clock is not None and "schedule.steps" in {*fixed, *(axis.name for axis in ranges)}:
        raise UserError(f"--clock {args.clock:g} decides the steps; drop schedule.steps, or --clock.")
    track = args.find_track()
    track.locate()
    args = trial.with_arithmetic(args, args.out / PLAN, SweepPlan, with_fields(base, fixed))
    plan = SweepPlan(args, base, track.files if args.data else {})
    trial.check_same_plan(
        args.out / PLAN, plan, "a sweep", free=("budget", "out", "data")
    )  # tokens are compared by their hashes
    runner = SweepRunner(args, base, fixed, console)
    try:
        METHODS[args.method](runner, ranges, fixed)
        console.print("search complete")
    except BudgetSpent:
        console.print(f"the budget of {args.budget:g} minutes is spent; raise --budget to continue")
    report(runner, console)


def fixed_value(text: str, recipe: Recipe) -> tuple[str, Any]:
    one = Range.parse(text, recipe)
    if len(one.choices) != 1:
        raise UserError(f"{text!r} does not fix a value; write {one.name}=value, or search it with --vary.")
    return one.name, one.choices[0]


@dataclass(frozen=True)
class SweepPlan:
    """What is searched in a folder of trials."""

    args: SweepArgs
    base: Recipe
    token_files: dict[str, str]


def report(runner: SweepRunner, console: Console) -> None:
    table = Table("mean loss", "seeds", "steps", "tokens", "seconds", box=None)
    table.add_column("fields", overflow="fold")
    ranked = sorted(grouped(runner.log.rows), key=lambda g: g[0])
    for loss, rows in ranked[:15]:
        first = rows[0]
        seconds = statistics.mean(r.get("train_time", math.nan) for r in rows)
        table.add_row(
            f"{loss:.4f}" if loss < math.inf else "failed",
            str(len(rows)),
            str(first["steps"]),
            f"{first.get('tokens', 0):,}",
            f"{seconds:.1f}",
            runner.show(first["fields"]),
        )
    if ranked:
        console.print(table)
    if ranked and ranked[0][0] < math.inf:
        best = ranked[0][1][0]
        one = trial.Trial(runner.recipe_file(best["key"]), best["seed"], Path(), runner.args.settings, runner.args.data)
        console.print(f"the best of them:\n  {shlex.join(['speedrun', 'train', *one.flags])}")
    console.print(f"effort so far, all sweeps in {runner.args.out.parent}:")
    for name, (trials, minutes) in effort(runner.args.out.parent).items():
        console.print(f"  {name}: {plural(trials, 'trial')}, {minutes:.1f} minutes")


def grouped(rows: list[dict[str, Any]]) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """(mean loss, rows) of each candidate at each number of steps."""
    same: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "trial":
            same.setdefault(json.dumps([sorted(row["fields"].items()), row["steps"]]), []).append(row)
    for members in same.values():
        yield statistics.mean(map(loss_of, members)), members


def effort(folder: Path) -> dict[str, tuple[int, float]]:
    """Trials and minutes spent on each recipe, over the sweeps in a folder: what 'equal effort' is measured by."""
    spent: dict[str, tuple[int, float]] = {}
    for plan in sorted(folder.glob(f"*/{PLAN}")):
        try:
            stored, rows = read_json(plan, SweepPlan, ""), trial.read_rows(plan.with_name(trial.ROWS), Candidate)
        except UserError:
            continue  # another sweep that cannot be read is no reason to lose this one's report
        name = f"{stored.args.recipe} on {'own data' if stored.token_files else stored.args.track}"
        trials, minutes = spent.get(name, (0, 0.0))
        spent[name] = (trials + sum(r["kind"] == "trial" for r in rows), minutes + sum(r["minutes"] for r in rows))
    return spent
