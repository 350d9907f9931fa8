"""Do the files of a race agree with each other?

A run stores the same facts in several places: the plan, run.json, metrics.jsonl, log.txt, telemetry and result.json. A
number that was changed in one of them disagrees with the others, and one that was changed everywhere disagrees with
what follows from the recipe, the seed, the track or the wall clock. Each disagreement becomes one sentence.
"""

import itertools
import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from speedrun.errors import UserError, plural
from speedrun.experiments import plan as plans
from speedrun.experiments.plan import PLAN, Entry, Plan
from speedrun.experiments.statistics import ALPHA
from speedrun.experiments.verdict import TEXT, VERDICT, RunSummary, Verdict, decided, judge, read_summary, render
from speedrun.files import read_json, sha256_file, write_json
from speedrun.tracks import TRACKS
from speedrun.training import Recipe, check_rules, differences, runlog

RUNS, INTERRUPTED, MANIFEST = "runs", "interrupted", "manifest.json"
ARCHIVE = "source.zip"  # in a record: the program, once for all runs
AFTERWARDS = 0.1  # seconds that may pass on the clock after the last measurement of a run
ROUNDING = 2.0  # seconds: dates are written without fractions
UNFINISHED = "Restore it from a copy; if the race has not ended, the command that began it goes on."


@dataclass(frozen=True)
class Run:
    """The files of one run, read."""

    entry: Entry
    path: Path
    about: runlog.RunInfo
    result: runlog.Result
    metrics: list[dict[str, Any]]
    log: list[str]

    @classmethod
    def read(cls, folder: Path, entry: Entry) -> "Run":
        path = folder / RUNS / entry.name
        try:
            log = (path / runlog.LOG).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{path / runlog.LOG} cannot be read ({type(e).__name__}); restore it from a copy.") from e
        return cls(entry, path, runlog.read_run(path), runlog.read_result(path), runlog.read_metrics(path), log)

    @property
    def ok(self) -> bool:
        return self.result.status == "ok"

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.metrics if m["kind"] == kind]

    @property
    def machine(self) -> plans.MachineInfo:
        snapshot = next(iter(self.lines("telemetry")), {})
        return plans.machine(self.about.environment, self.about.devices, snapshot)


def seconds_between(earlier: datetime, later: datetime) -> float:
    return (later - earlier).total_seconds()


# -------------------------------------------------------------------- one run


def examine_run(run: Run, plan: Plan, plan_sha256: str, source: Path) -> list[str]:
    """What is wrong with a run of this plan; `source` is where its copy of the package lies."""
    recipe = plan.recipes[run.entry.side]
    try:
        found = [
            *_belongs(run, plan, plan_sha256, source, recipe),
            *_measured(run, plan, recipe),
            *(_logged(run, recipe) if plan.source_sha256 == runlog.source_sha256() else ()),  # the words may be others
            *_ended(run, plan, recipe),
            *_clocks(run),
        ]
    except (KeyError, TypeError, ValueError, IndexError) as e:
        found = [f"a file is damaged ({type(e).__name__}: {e})"]
    return [f"{run.entry.name}: {sentence}" for sentence in found]


def _belongs(run: Run, plan: Plan, plan_sha256: str, source: Path, recipe: Recipe) -> Iterator[str]:
    about, options = run.about, run.about.options
    if options.plan != plan_sha256:
        yield f"it belongs to another plan: {PLAN} was edited after this run, or the run is not of this race"
    if about.track != plan.track or about.target != plan.target:
        yield f"it ran on track {about.track!r} with target {about.target}, not {plan.track!r} with {plan.target}"
    if about.data.files != plan.files:
        yield "it ran on other data: the hashes of its token files are not those of the plan"
    changed = differences(recipe, about.recipe)
    if changed:
        yield f"it trained another recipe than planned ({'; '.join(changed[:3])})"
    if about.seed != run.entry.seed or options.seed != run.entry.seed:
        yield f"its seed is {about.seed}, planned was {run.entry.seed}"
    asked = _option(about.command, "--seed")
    if asked != str(run.entry.seed):
        yield f"its command says --seed {asked}, planned was {run.entry.seed}"
    file = _option(about.command, "--recipe") or ""
    if Path(file).name != plans.recipe_file(run.entry.side):
        yield f"its command says --recipe {file}, planned was {plans.recipe_file(run.entry.side)}"
    wanted = {"splits": plan.splits, "val_tokens": plan.val_tokens, "checkpoint_every": None}
    wanted |= {"save": False, "compile": plan.settings.compile}
    for name, value in wanted.items():
        if getattr(options, name) != value:
            yield f"its option {name} is {getattr(options, name)!r}, a run of this race has {value!r}"
    if about.world_size != plan.settings.nproc:
        yield f"it was made with --nproc {about.world_size}, planned was {plan.settings.nproc}"
    if plan.settings.dtype != about.dtype:
        yield f"it was made with --dtype {about.dtype}, planned was {plan.settings.dtype}"
    if about.interruptions or run.result.resumed:
        yield "it was interrupted and resumed, so its time does not count"
    if about.source_sha256 != plan.source_sha256:
        yield "it ran other code than planned: the hash of its source differs"
    try:
        there = runlog.source_sha256(source) if source.exists() else None
    except (zipfile.BadZipFile, OSError):
        there = None
    if there != about.source_sha256:
        yield "its copy of the source is missing or was changed: the hash in run.json is another"
    here, planned = vars(run.machine), vars(plan.machine)
    unseen = set() if run.lines("telemetry") else {"cpu", "cores", "memory_gib"}  # it failed before it looked around
    odd = [name for name, value in planned.items() if here[name] != value and name not in unseen]
    if odd:
        name = odd[0]
        yield f"it ran on another machine or installation: {name} is {here[name]!r}, not {planned[name]!r}"


def _option(command: Sequence[str], name: str) -> str | None:
    return next((after for word, after in itertools.pairwise(command) if word == name), None)


def _measured(run: Run, plan: Plan, recipe: Recipe) -> Iterator[str]:
    """metrics.jsonl against the recipe: every step, its learning rate, and a clock that only goes forward."""
    train, val, schedule = run.lines("train"), run.lines("val"), recipe.schedule
    total = schedule.total if run.ok else len(train)
    if [m["step"] for m in train] != list(range(total)) or total > schedule.total:
        yield f"metrics.jsonl has {plural(len(train), 'step')}, and not each of {schedule.total} once and in order"
        return
    odd = next((m for m in train if m["lr"] != schedule.at(m["step"]).lr), None)
    if odd:
        right = schedule.at(odd["step"]).lr
        yield f"the learning rate of step {odd['step']} is {odd['lr']}, but the recipe says {right}"
    planned = recipe.validation.moments(schedule.total)
    if [m["step"] for m in val] != (planned if run.ok else planned[: len(val)]):
        yield f"metrics.jsonl has validations after steps {[m['step'] for m in val]}, the recipe has {planned}"
        return
    clock = [(m["time"], m["step"]) for m in run.metrics if m["kind"] in ("train", "val")]
    for (before, _), (after, step) in itertools.pairwise(clock):
        if not after >= before:
            yield f"the clock runs backwards at step {step} of metrics.jsonl"
            return
    if any(not b["time"] > a["time"] for a, b in itertools.pairwise(train)) or any(not t >= 0 for t, _ in clock):
        yield "a step of metrics.jsonl takes no time"
    if any(m["losses"][plan.splits[0]] != m["loss"] for m in val):
        yield "a validation in metrics.jsonl has two different losses"
    if run.ok:
        before, after = val[-1]["weights"]
        if before != after:
            yield "the weights changed during validation, which must be forward only"


def _logged(run: Run, recipe: Recipe) -> Iterator[str]:
    """log.txt is written from the same numbers as metrics.jsonl, so its lines follow from that."""
    total = recipe.schedule.total
    expected = [
        runlog.train_line(m["step"] + 1, total, m["loss"], 1000 * m["time"])
        if m["kind"] == "train"
        else runlog.val_line(m["step"], total, m["loss"], 1000 * m["time"], run.about.options.curve)
        for m in run.metrics
        if m["kind"] in ("train", "val")
    ]
    found = [line for line in run.log if line.startswith("step:")]
    for number, (has, wants) in enumerate(itertools.zip_longest(found, expected), start=1):
        if has != wants:
            yield f"log.txt and metrics.jsonl disagree at line {number} of the steps: {has!r} instead of {wants!r}"
            return


def _ended(run: Run, plan: Plan, recipe: Recipe) -> Iterator[str]:
    """result.json against what was measured on the way."""
    result, train, val = run.result, run.lines("train"), run.lines("val")
    if result.steps != recipe.schedule.total:
        yield f"result.json has {plural(result.steps, 'step')}, the recipe {recipe.schedule.total}"
    tokens = sum(recipe.schedule.at(step).tokens for step in range(len(train)))
    if result.tokens != tokens:
        yield f"result.json has {result.tokens} tokens, the recipe's steps have {tokens}"
    speed = result.tokens / result.train_time if result.train_time else 0.0
    if not plans.agree(float(result.tokens_per_second), speed):
        yield "tokens, seconds and tokens per second of result.json do not fit together"
    if not run.ok:
        if result.timed or result.status != "failed" or not result.reason:
            yield "result.json of a run that did not end well is damaged"
        return
    if not result.timed:
        yield "result.json says that its time does not count"
    last = val[-1]
    if result.losses != last["losses"] or result.val_loss != last["loss"]:
        yield f"result.json has the loss {result.val_loss}, the last validation in metrics.jsonl {last['loss']}"
    if list(last["losses"]) != list(plan.splits):
        yield f"the last validation has the splits {', '.join(last['losses'])}, planned were {', '.join(plan.splits)}"
    if not 0 <= result.train_time - last["time"] <= AFTERWARDS:
        yield f"result.json has {result.train_time:.3f} s, the clock at the last step was {last['time']:.3f} s"


def _clocks(run: Run) -> Iterator[str]:
    """The clock of a run stands still at times, but the clock on the wall does not."""
    result, lasted = run.result, seconds_between(run.about.started, run.result.finished)
    claimed = result.train_time + sum(m["val_seconds"] for m in run.lines("val"))
    if lasted + ROUNDING < claimed + result.warmup_seconds:
        yield (
            f"it claims {claimed:.1f} s of training and validation and {result.warmup_seconds:.1f} s of warm-up, but "
            f"was over {lasted:.0f} s after its start"
        )
    if result.wall_seconds < claimed:
        yield f"it claims {claimed:.1f} s of training and validation in {result.wall_seconds:.1f} s on the wall"
    cores = run.machine.cores or math.inf
    if run.ok and not 0 < result.cpu_seconds < cores * result.wall_seconds + ROUNDING:
        yield f"it claims {result.cpu_seconds:.1f} s of CPU time in {result.wall_seconds:.1f} s on {cores} cores"
    taken = [datetime.fromisoformat(m["taken"]) for m in run.lines("telemetry")]
    stamps = [run.about.started, *taken, run.result.finished]
    if any(seconds_between(a, b) < 0 for a, b in itertools.pairwise(stamps)):
        yield "its dates are not in order: start, telemetry and end"
    for (a, since), (b, until) in itertools.pairwise(zip(taken, run.lines("val"), strict=True)):
        if seconds_between(a, b) + ROUNDING < until["time"] - since["time"] + until["val_seconds"]:
            yield f"between steps {since['step']} and {until['step']} its clock went faster than the clock on the wall"
            return


# -------------------------------------------------------------------- the whole race


@dataclass(frozen=True)
class Finding:
    """The content of a race folder, and what is wrong with it."""

    plan: Plan
    runs: list[RunSummary]
    verdict: Verdict | None
    problems: list[str]
    notes: list[str]


def examine(folder: Path) -> Finding:
    """Recompute everything in the folder of a race from its run folders."""
    plan = Plan.read(folder)
    plan_sha256 = sha256_file(folder / PLAN)
    problems, notes = [*_manifest(folder), *_rules(folder, plan)], _unknowable(plan)
    stored = read_json(folder / VERDICT, dict, UNFINISHED)
    there = (
        {p.name for p in (folder / RUNS).iterdir() if not p.name.startswith(".")} if (folder / RUNS).is_dir() else set()
    )
    entries = [entry for entry in plan.entries if entry.name in there]
    look = next((k for k in plan.looks if {e.name for e in plan.until(k)} == there), None)
    if look is None:
        missing = [e.name for e in plan.until(plan.looks[-1]) if e.name not in there]
        extra = sorted(there - {e.name for e in plan.entries})
        what = f"{extra[0]} was never planned" if extra else f"{missing[0]} is missing"
        problems.append(f"the runs in {RUNS}/ are not those of a look of the plan: {what}")
    runs: list[Run] = []
    for entry in entries:
        try:
            runs.append(Run.read(folder, entry))
        except UserError as e:
            problems.append(f"{entry.name}: {e}")
            continue
        own = runs[-1].path / runlog.SOURCE / "speedrun"
        source = own if own.is_dir() else folder / ARCHIVE
        problems += examine_run(runs[-1], plan, plan_sha256, source)
    problems += [*_in_order(plan, runs), *_alike(runs), *_seeds(plan, runs), *_attempts(folder, runs)]
    summaries: list[RunSummary] = []
    verdict = None
    if look is not None and len(runs) == len(entries):
        summaries = [read_summary(run.path, run.entry) for run in runs]
        verdict = judge(plan, summaries, look, plan_sha256)
        problems += _verdicts(folder, plan, verdict, stored)
    attempts = len(list((folder / INTERRUPTED).iterdir())) if (folder / INTERRUPTED).is_dir() else 0
    if attempts:
        notes.append(f"why {attempts} interrupted runs were stopped; each started again from step 0 with its seed")
    if not plan.random_seeds:
        notes.append("why these seeds: the first one was chosen, not derived from the plan")
    return Finding(plan, summaries, verdict, problems, notes)


def _rules(folder: Path, plan: Plan) -> Iterator[str]:
    """The plan against itself and its recipe files, and against the track as this version of the program knows it."""
    for side, recipe in plan.recipes.items():
        if differences(read_json(folder / plans.recipe_file(side), Recipe, plans.RESTORE), recipe):
            yield f"{plans.recipe_file(side)} is not the recipe of the plan"
    if plan.random_seeds and plan.seeds != plans.random_seeds(plans.stored(folder), len(plan.seeds)):
        yield "the seeds do not follow from the plan, as it says: something in it was edited"
    if plan.track not in TRACKS:
        return
    if plan.alpha > ALPHA:
        yield f"the plan accepts p < {plan.alpha:g}, the rules p < {ALPHA:g}"
    track = TRACKS[plan.track]
    if plan.target != track.target:
        yield f"the plan has the target {plan.target:g}, track {plan.track!r} has {track.target:g}"
    if plan.val_tokens != track.val_tokens:
        yield f"the plan validates on {plan.val_tokens} tokens, track {plan.track!r} on {track.val_tokens}"
    if track.files and plan.files != track.files:
        yield f"the token streams of the plan are not those of track {plan.track!r}"
    if "shadow_000000.bin" in track.files and "shadow" not in plan.splits:
        yield "the plan does not measure the shadow split"
    for side, recipe in plan.recipes.items():
        try:
            check_rules(recipe, track)
        except UserError as e:
            yield f"side {side}: {e}"


def _in_order(plan: Plan, runs: list[Run]) -> Iterator[str]:
    """ABBA means nothing if the runs were made in another order, or at the same time."""
    stamps = [("the plan", datetime.fromisoformat(plan.created))]
    for run in runs:
        before, finished = stamps[-1]
        if seconds_between(finished, run.about.started) < 0:
            began, ended = run.about.started.isoformat(), finished.isoformat()
            yield f"{run.entry.name} started at {began}, before {before} was done ({ended})"
            return
        stamps.append((run.entry.name, run.result.finished))


def _alike(runs: list[Run]) -> Iterator[str]:
    """Beside the plan's machine, whatever else can change speed or arithmetic is the same in all runs."""
    for run in runs[1:]:
        first = runs[0]
        for name in ("git", "threads", "dtype"):
            if getattr(run.about, name) != getattr(first.about, name):
                yield f"{run.entry.name} and {first.entry.name} were made with different {name}"
        for name in ("packages", "variables", "threads"):
            if run.about.environment.get(name) != first.about.environment.get(name):
                yield f"{run.entry.name} and {first.entry.name} were made with different {name} in their environment"


def _losses(run: Run) -> list[float]:
    return [m["loss"] for m in run.lines("train")]


def _seeds(plan: Plan, runs: list[Run]) -> Iterator[str]:
    """Another seed gives other losses; on a CPU the same seed and recipe give the same ones."""
    for a, b in itertools.combinations(runs, 2):
        if a.entry.side == b.entry.side and a.entry.seed != b.entry.seed and _losses(a) == _losses(b):
            yield f"{a.entry.name} and {b.entry.name} have the same losses although their seeds differ: one is a copy"
        twins = (
            plan.paired and not differences(plan.recipes["A"], plan.recipes["B"]) and plan.machine.devices == ("cpu",)
        )
        if twins and a.entry.seed == b.entry.seed and _losses(a) != _losses(b):
            yield f"{a.entry.name} and {b.entry.name} have the same recipe and seed, but other losses"


def _attempts(folder: Path, runs: list[Run]) -> Iterator[str]:
    """A run that was interrupted and began again has the same first losses, on a CPU."""
    for run in runs:
        for path in sorted((folder / INTERRUPTED).glob(f"{run.entry.name}-*")):
            earlier = [m["loss"] for m in runlog.read_metrics(path, "train")]
            if run.about.devices == ("cpu",) and earlier != _losses(run)[: len(earlier)]:
                yield f"{run.entry.name} has other losses than its interrupted attempt {path.name}"


def text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None  # which is not what it should say


def _known(value: Any, stored: Any) -> Any:
    """`value` without the fields that the version which stored the other one did not know."""
    if isinstance(value, dict) and isinstance(stored, dict):
        return {name: _known(item, stored[name]) for name, item in value.items() if name in stored}
    if isinstance(value, list) and isinstance(stored, list) and len(value) == len(stored):
        return list(map(_known, value, stored))
    return value


def _verdicts(folder: Path, plan: Plan, verdict: Verdict, stored: dict[str, Any]) -> Iterator[str]:
    look = verdict.look.after
    other_version = plan.source_sha256 != runlog.source_sha256()
    again = verdict.to_json()
    again = {**_known(again, stored), "why": stored.get("why")} if other_version else again
    odd = sorted(name for name in {*again, *stored} if not plans.agree(again.get(name, ...), stored.get(name, ...)))
    odd += [name for name in ("verdict", "sides", "runs", "look", "time", "plan_sha256") if name not in stored]
    if odd:
        yield f"{VERDICT} does not follow from the runs: {', '.join(odd)}"
    if not odd and not other_version and text_of(folder / TEXT) != render(verdict):
        yield f"{TEXT} does not say what {VERDICT} says"
    for earlier in plan.looks[: plan.looks.index(look)]:
        names = {entry.name for entry in plan.until(earlier)}
        if decided(judge(plan, [r for r in verdict.runs if r.name in names], earlier, verdict.plan_sha256)):
            yield f"the race was decided at the look after {plan.unit} {earlier}, but went on"
    if look != plan.looks[-1] and not decided(verdict):
        yield f"the race ended at the look after {plan.unit} {look}, which decided nothing"


def _unknowable(plan: Plan) -> list[str]:
    again = "`speedrun verify --replay` repeats losses, `speedrun challenge` repeats times"
    notes = ["whether constants of a recipe were taken from the corpus"] if plan.track in TRACKS else []
    notes += [
        f"whether the files were made up as a whole: {again}",
        "what else ran on the machine, beyond the load that telemetry saw",
        "whether other races of these recipes were made and not shown",
    ]
    return notes + (
        [] if plan.track in TRACKS else ["whether the tokens were fit for the claim: the track is your own"]
    )


# -------------------------------------------------------------------- every byte


def files_of(folder: Path) -> Iterable[Path]:
    hidden = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return [p for p in hidden if not any(part.startswith(".") for part in p.relative_to(folder).parts)]


def manifest_of(folder: Path) -> dict[str, str]:
    """sha256 of every file of a race or record but the manifest itself."""
    return {
        p.relative_to(folder).as_posix(): sha256_file(p)
        for p in files_of(folder)
        if p.relative_to(folder).as_posix() != MANIFEST
    }


@dataclass(frozen=True)
class Manifest:
    files: dict[str, str]
    """sha256 by path."""


def _manifest(folder: Path) -> Iterator[str]:
    stored = read_json(folder / MANIFEST, Manifest, UNFINISHED).files
    found = manifest_of(folder)
    for name in sorted({*stored, *found}):
        if name not in found:
            yield f"{name} is missing, but {MANIFEST} lists it"
        elif name not in stored:
            yield f"{name} is not listed in {MANIFEST}"
        elif found[name] != stored[name]:
            yield f"{name} was changed: its sha256 is not the one in {MANIFEST}"


def write_manifest(folder: Path) -> None:
    write_json(folder / MANIFEST, {"files": manifest_of(folder)})
