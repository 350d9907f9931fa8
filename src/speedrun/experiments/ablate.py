"""What each switch of a recipe is worth: every one turned off alone, with the same seeds, in turns.

    speedrun ablate --recipe normuon --set schedule.steps=200 --seeds 5 --budget 240

Every round is one seed: the recipe as it is, a shorter one, and each variant, in an order that turns round with every
round. Effects are differences to the recipe as it is, paired by seed, with 95 % intervals, corrected by Holm for the
number of switches. The shorter run gives the exchange rate between loss and training, by which an effect on the loss at
equal tokens becomes one on the time to the same loss. The same command continues; the budget decides how many rounds.
With --jobs several runs share the machine: more losses an hour, and seconds that are less sure.
"""

import dataclasses
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from speedrun.checks import AboveZero, Count, NotNegative, Positive
from speedrun.errors import UserError, nearest
from speedrun.experiments import plan as plans
from speedrun.experiments.children import Children, last_words
from speedrun.experiments.race import side
from speedrun.experiments.statistics import Effect, effect, holm
from speedrun.experiments.sweep import ROWS, RowLog, keep_to, with_arithmetic
from speedrun.options import unset
from speedrun.recipes import DEFAULT, get_recipe
from speedrun.tracks import get_track, own_track
from speedrun.training import scale
from speedrun.training.config import Recipe, fields_of, with_fields
from speedrun.training.device import check_processes
from speedrun.training.load import usable_cores
from speedrun.training.run import check_ranks, fit_to_tokens
from speedrun.training.runlog import read_result, source_sha256

Changes = dict[str, Any]
Row = dict[str, Any]
PLAN = "ablation.json"
BASE, SHORTER = "as it is", "shorter"
SHARE = 0.1  # how much shorter the run is that gives the exchange rate

NO_WINDOWS: Changes = {
    "schedule.window_ramp": (), "schedule.window_cubic": 0, "schedule.window_extension": 0, "schedule.window_final": 0,
    "schedule.window_short": 0, "model.long_layers": (), "model.key_offset": False, "model.yarn": False,
}  # fmt: skip
NO_MOMENTUM: Changes = {"schedule.momentum_warmup": 0, "schedule.momentum_cooldown": 0}
# What turns each technique off. A recipe has the ones whose first field it sets otherwise.
SWITCHES: dict[str, Changes] = {
    "muon": {"optim.matrices": "adam", "optim.weights": "float32", **NO_MOMENTUM},
    "row-norms": {"optim.matrices": "muon"},
    "polar-express": {"optim.muon.method": "newton-schulz"},
    "nesterov": {"optim.muon.nesterov": False},
    "split-qkv": {"optim.muon.split_qkv": False},
    "update-average": {"optim.muon.update_ema": 0.0},
    "muon-gates": {"optim.muon.gates": False},
    "muon-decay": {"optim.muon.weight_decay": 0.0},
    "momentum-schedule": NO_MOMENTUM,
    "adam-every": {"optim.every": 1},
    "adam-decay": {"optim.weight_decay": 0.0},
    "cautious-decay": {"optim.decay": "decoupled", "optim.muon.decay": "decoupled"},
    "exact-bf16": {"optim.weights": "float32"},
    "snoo": {"optim.snoo.k": 0},
    "value-embeddings": {
        "model.value_tables": 0, "model.value_layers": (), "model.value_gates": False, "model.value_lambdas": False,
    },
    "value-gates": {"model.value_gates": False},
    "value-lambdas": {"model.value_lambdas": False},
    "attention-gates": {"model.attention_gates": False},
    "attention-lambdas": {"model.attention_lambdas": False},
    "key-offset": {"model.key_offset": False},
    "half-rotary": {"model.rotary": "full", "model.key_offset": False},
    "qk-norm": {"model.qk_norm": False},
    "value-norm": {"model.value_norm": False},
    "yarn": {"model.yarn": False},
    "windows": NO_WINDOWS,
    "no-attention-layers": {"model.no_attention": ()},
    "smear": {"model.smear": False},
    "smear-mtp": {"model.smear_mtp": False},
    "skips": {"model.skips": (), "model.skip_gates": False},
    "skip-gates": {"model.skip_gates": False},
    "backout": {"model.backout": -1},
    "residual-lambdas": {"model.residual_lambdas": 0.0},
    "x0-lambdas": {"model.x0_lambdas": False, "model.second_embedding": False},
    "second-embedding": {"model.second_embedding": False},
    "embed-norm": {"model.embed_norm": False},
    "softcap": {"model.softcap": "none"},
    "fp8-head": {"model.fp8_head": False},
    "split-head": {"model.split": False, "schedule.split": 0.0},
    "multi-token": {"schedule.predict": 1},
    "lr-ramp": {"schedule.lr_ramp": ()},
    "zero-init": {"model.zero_init": False},
    "relu2": {"model.activation": "gelu"},
}  # fmt: skip


@dataclass(frozen=True)
class Ablate:
    recipe: str = DEFAULT
    """Which recipe."""
    track: str = "pocket"
    """On which track. With --data: at the size of which track."""
    data: Annotated[Path | None, unset("PATH")] = None
    """A folder made by `speedrun data encode`, instead of a track's tokens."""
    changes: Annotated[tuple[str, ...], unset("FIELD=VALUE ...", name="set")] = ()
    """FIELD=value, changed in every run, such as schedule.steps=200 for a shorter one."""
    switches: Annotated[tuple[str, ...], unset("SWITCH ...")] = ()
    """Which switches; default: all that the recipe has."""
    pairs: Annotated[tuple[str, ...], unset("SWITCH+SWITCH ...")] = ()
    """Pairs of switches that are also turned off together."""
    seeds: Positive = 5
    """Rounds, one seed each."""
    first_seed: Count = 3000
    """Seed of the first round."""
    budget: NotNegative = 60.0
    """Minutes; no round begins that would not end within it. Time spent before a restart counts."""
    out: Path = Path("ablations/ablation")
    """Where rows.jsonl is kept; the same folder continues."""
    nproc: Positive = 1
    """Processes of each run, on this machine."""
    threads: Annotated[Positive | None, unset("INT")] = None
    """CPU threads of each process; default: all usable cores, shared by all processes of all jobs."""
    jobs: Positive = 1
    """Runs at a time."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the arithmetic of matmuls, the same in all runs."""
    compile: bool = True
    """Use torch.compile where it works."""
    markdown: Annotated[Path | None, unset("FILE.md")] = None
    """Also write the table as Markdown into this file."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Also draw the effects into this file."""


def switches_of(recipe: Recipe) -> dict[str, Changes]:
    """The switches that are on, with what turns each off. One that cannot be turned off alone is told apart later."""
    known = fields_of(recipe)
    on = {name: off for name, off in SWITCHES.items() if known[next(iter(off))] != next(iter(off.values()))}
    if recipe.optim.matrices == "adam":  # then Muon's fields say nothing
        on = {name: off for name, off in on.items() if not next(iter(off)).startswith("optim.muon.")}
    return on


def variants(recipe: Recipe, given: Ablate) -> dict[str, Recipe]:
    """Every recipe of the ablation by name, the recipe itself and the shorter one first."""
    on = switches_of(recipe)
    for name in (*given.switches, *(part for pair in given.pairs for part in pair.split("+"))):
        if name not in SWITCHES:
            raise UserError(f"There is no switch {name!r}.{nearest(name, SWITCHES)}")
        if name not in on:
            raise UserError(f"Recipe {recipe.name!r} does not use {name!r}; it has {', '.join(on)}.")
    wanted = {name: on[name] for name in given.switches or on}
    for pair in given.pairs:
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
    asked: Ablate
    base: Recipe
    token_files: dict[str, str]
    variants: tuple[str, ...]
    source: str


def run(given: Ablate, console: Console) -> list["Line"]:
    """Do what the budget allows, and return the table's lines."""
    check_processes(given.nproc, "auto")
    _, recipe = side(given.recipe, get_track(given.track).name, given.changes)
    track = own_track(given.data, None) if given.data else get_track(given.track)
    recipe = fit_to_tokens(recipe, track.locate(), track)
    recipe = with_fields(recipe, {"validation.first": False, "validation.every": 10**6})
    entrants = variants(recipe, given)
    for entrant in entrants.values():
        scale.check(entrant)
        check_ranks(entrant, given.nproc)
    given = with_arithmetic(given, given.out / PLAN, AblationPlan, recipe, given.jobs)
    plan = AblationPlan(given, recipe, track.files, tuple(entrants), source_sha256())
    keep_to(given.out / PLAN, plan, "an ablation", free=("seeds", "budget", "out", "markdown", "plot"))
    rows = Rows(given.out / ROWS)
    for number in range(given.seeds):
        seed = given.first_seed + number
        missing = [name for name in entrants if (name, seed) not in rows.known]
        expected = sum(rows.minutes_of(name) for name in missing) / given.jobs
        if missing and rows.minutes / given.jobs + expected > given.budget:
            console.print(f"the budget of {given.budget:g} minutes allows no further round; raise --budget to go on")
            break
        turn = missing if number % 2 == 0 else missing[::-1]
        with ThreadPoolExecutor(given.jobs) as pool, Children() as children:
            each = partial(execute, given, children, seed=seed)
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


class Rows(RowLog):
    def __init__(self, file: Path) -> None:
        super().__init__(file, VariantRun)

    @property
    def known(self) -> set[tuple[str, int]]:
        return {(row["variant"], row["seed"]) for row in self.rows}

    def minutes_of(self, name: str) -> float:
        """What a run of this variant took, or of any; before the first one nothing is known."""
        own = [row["minutes"] for row in self.rows if row["variant"] == name] or [row["minutes"] for row in self.rows]
        return float(sum(own) / len(own)) if own else 0.0


def execute(given: Ablate, children: Children, name: str, recipe: Recipe, seed: int) -> Row:
    slug = hashlib.sha256(name.encode()).hexdigest()[:8]
    folder = given.out / "runs" / f"{slug}-s{seed}-{time.time_ns()}"
    words = [sys.executable, "-m", "speedrun", "train", "--recipe", recipe.name, "--track", recipe.track]
    words += plans.flags(recipe, get_recipe(recipe.name, recipe.track))
    words += ["--data", str(given.data)] if given.data else []
    words += ["--nproc", str(given.nproc)] if given.nproc > 1 else []
    threads = given.threads or (max(1, usable_cores() // (given.jobs * given.nproc)) if given.jobs > 1 else None)
    words += ["--threads", str(threads)] if threads else []
    words += ["--dtype", given.dtype, "--compile", str(given.compile), "--seed", str(seed), "--out", str(folder)]
    words += ["--checkpoint-every", "0", "--save", "False", "--sample", "False"]
    began = time.monotonic()
    done = children.run(words)
    if done.returncode not in (0, 1) or not (folder / "result.json").exists():
        last = last_words(done.stderr) or "no message"
        raise UserError(f"The run without {name!r} ended without a result: {last}")
    result = read_result(folder)
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


def table(lines: list[Line]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("turned off", "seeds", "loss", "95 % interval", "p (Holm)", "seconds", "to the same loss", "95 % interval")
    ]
    for line in lines:
        name = line.name if line.name != SHORTER else f"a tenth of the steps less ({SHORTER})"
        if line.loss is None or line.seconds is None:
            rows.append((name, "0", f"{line.failed} runs failed", "", "", "", "", ""))
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
