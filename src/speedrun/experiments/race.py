"""Run a race: the plan first, then every run as a process of its own, then the verdict.

    speedrun race --recipe normuon --against adamw --runs 10

The same command continues a race that was stopped or killed: finished runs stay, an interrupted one is set aside and
starts again from step 0. The plan cannot be changed.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from msgspec import Meta
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from speedrun.checks import Count
from speedrun.errors import UserError
from speedrun.experiments import plan as plans
from speedrun.experiments import trial
from speedrun.experiments.plan import PLAN, Entry, Plan, recipe_file
from speedrun.experiments.statistics import ALPHA, FEWEST
from speedrun.experiments.sweep import field_of, value_of
from speedrun.experiments.verdict import TEXT, VERDICT, RunSummary, Verdict, decided, judge, read_summary, render
from speedrun.experiments.verification import INTERRUPTED, MANIFEST, RUNS, Run, examine_run, write_manifest
from speedrun.files import locked, sha256_file, write_atomic, write_json
from speedrun.recipes import get_recipe
from speedrun.tracks import Track, find_track, get_track, own_track
from speedrun.training import Recipe, as_tuple, check_settings, run, runlog, scale, with_fields


@dataclass(frozen=True)
class RaceArgs(trial.ExperimentArgs):
    """`recipe` is that of side A, which is to prove something."""

    against: str | None = None
    """Side B: the recipe to compare with; default: none, the target alone."""
    target: float | None = None
    """With --data: the validation loss to reach, in nats per token."""
    runs: Annotated[int, Meta(ge=FEWEST)] = 10
    """Runs of each side. Two sides are interleaved in blocks of four (ABBA), so it must be even then."""
    set: tuple[str, ...] = ()
    """FIELD=value, changed in side A's recipe."""
    against_set: tuple[str, ...] = ()
    """FIELD=value, changed in side B's recipe."""
    kind: Literal["full", "systems"] = "full"
    """full: losses are tested against the target. systems: side A only computes the same thing faster, which bit-equal
    losses prove instead."""
    looks: tuple[str, ...] = ("end",)
    """When results are judged: at the `end`, after `every` block (or run, with one side), or after these ones. A race
    that is decided at a look ends there; every look makes the others a little stricter."""
    alpha: float = ALPHA
    """How often a wrong `valid` or `faster` is accepted."""
    seed: Count | None = None
    """First seed; the others follow it. Default: derived from the plan, so that it cannot be chosen."""
    out: Path | None = None
    """Folder of the race; the same folder continues. Default: races/TRACK-RECIPE[-vs-AGAINST]."""

    @property
    def folder(self) -> Path:
        sides = [Path(name).stem for name in (self.recipe, *(["vs", self.against] if self.against else []))]
        return self.out or Path("races") / "-".join(["own" if self.data else self.track, *sides])


# -------------------------------------------------------------------- the plan


def change_recipe(name: str, track: str, changes: Sequence[str], shared: Sequence[str] = ()) -> tuple[str, Recipe]:
    """(label, recipe) with `FIELD=value` applied; the label leaves out the changes that both sides share."""
    base = get_recipe(name, track)
    wanted: dict[str, Any] = {}
    for text in changes:
        field, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} changes nothing; write FIELD=value, such as optim.lr=0.01.")
        wanted[field] = as_tuple(value_of(value, field_of(base, field), field))
    return " ".join([base.name, *(c for c in changes if c not in shared)]), with_fields(base, wanted)


def look_numbers(words: tuple[str, ...], last: int) -> tuple[int, ...]:
    if words == ("end",):
        return (last,)
    if words == ("every",):
        return tuple(range(FEWEST, last + 1))
    if not words or not all(word.isdecimal() for word in words):
        raise UserError(
            f"--looks is {' '.join(words) or 'empty'}; write `end`, `every`, or numbers such as 2 4 {last}."
        )
    numbers = tuple(map(int, words))
    return numbers if numbers[-1] >= last else (*numbers, last)


def make_plan(args: RaceArgs, created: str | None = None) -> Plan:
    """The plan that the arguments describe; nothing is written yet."""
    if args.data is not None and args.target is None:
        raise UserError(f"--data {args.data} needs a --target: a race is about reaching one.")
    if args.against is None and args.against_set:
        raise UserError("--against-set changes side B's recipe, but there is none; name it with --against.")
    size = get_track(args.track).name
    # What is changed on both sides alike is named once, not in every line of the verdict.
    both = [c for c in args.set if c in args.against_set]
    sides = {"A": change_recipe(args.recipe, size, args.set, both)}
    if args.against is not None:
        sides["B"] = change_recipe(args.against, size, args.against_set, both)
    track = find_track(args.track, args.data, args.target)
    return plan_for_sides(args, sides, track, created or plans.now(), " ".join(both))


def plan_for_sides(args: RaceArgs, sides: dict[str, tuple[str, Recipe]], track: Track, created: str, both: str) -> Plan:
    check_settings(args.device, args.dtype, args.nproc)
    if args.dtype == "auto":
        chosen = {trial.arithmetic_for(recipe, args.settings) for _, recipe in sides.values()}
        args = dataclasses.replace(args, dtype="bfloat16" if chosen == {"bfloat16"} else "float32")
    tokens = track.locate()
    assert track.target is not None
    recipes = {name: run.fit_to_tokens(recipe, tokens, track) for name, (_, recipe) in sides.items()}
    for recipe in recipes.values():
        run.check_rules(recipe, track)
        scale.check(recipe)
        run.check_ranks(recipe, args.nproc)
        run.check_supply(recipe, tokens, track)
    labels = {name: label for name, (label, _) in sides.items()}
    if len(set(labels.values())) < len(labels):
        labels = {name: f"{label} ({name})" for name, label in labels.items()}
    labels |= {"both": both} if both else {}
    files = run.hashes(tokens)
    first = args.seed or 0
    plan = Plan(
        created=created,
        kind=args.kind,
        track=track.name,
        target=track.target,
        val_tokens=track.val_tokens,
        files=files,
        data=str(args.data) if args.data else None,
        labels=labels,
        recipes=recipes,
        seeds=tuple(range(first, first + args.runs)),
        random_seeds=args.seed is None,
        alpha=args.alpha,
        looks=look_numbers(args.looks, args.runs // 2 if len(sides) == 2 else args.runs),
        splits=("val", "shadow") if any("shadow_" in name for name in files) else ("val",),
        settings=args.settings,
        machine=plans.this_machine(),
        source_sha256=runlog.source_sha256(),
    )
    plans.check(plan)
    if plan.random_seeds:
        plan = dataclasses.replace(plan, seeds=plans.random_seeds(plan.to_json(), args.runs))
    return plan


def plan_challenge(theirs: Plan, args: RaceArgs, created: str | None = None) -> Plan:
    """The plan of a race of the same recipes with this code, on this machine; `args` has what may differ."""
    track = own_track(args.data, theirs.target) if theirs.track == "own" and args.data else get_track(theirs.track)
    kind: Any = theirs.kind
    args = dataclasses.replace(args, kind=kind, alpha=theirs.alpha, compile=theirs.settings.compile)
    sides = {side: (theirs.labels[side], recipe) for side, recipe in theirs.recipes.items()}
    return plan_for_sides(args, sides, track, created or plans.now(), theirs.labels.get("both", ""))


REFUSALS = {
    "machine": "was planned on another machine or installation; times of different machines are never mixed",
    "source_sha256": "was planned with other code; put that version back, or begin another race",
    "files": "was planned on other data; put that back, or begin another race",
}


def compare_plans(folder: Path, stored: Plan, wanted: Plan) -> None:
    old, new = stored.to_json(), wanted.to_json()
    changed = sorted(name for name in {*old, *new} if not plans.agree(old.get(name), new.get(name)))
    for name, words in REFUSALS.items():
        if name in changed:
            raise UserError(f"The race in {folder} {words} (--out names another folder).")
    if changed:
        raise UserError(
            f"{folder} holds a race with another {', '.join(changed)}; a plan is not changed once it is written, "
            "so choose another --out."
        )


# -------------------------------------------------------------------- runs


class RaceRunner:
    """A race folder in which runs are missing."""

    def __init__(self, folder: Path, plan: Plan, console: Console, lock: BinaryIO | None) -> None:
        self.folder, self.plan, self.console, self.lock = folder, plan, console, lock
        self.plan_sha256 = sha256_file(folder / PLAN)
        self.summaries: list[RunSummary] = []
        self.entries = plan.entries

    def run(self) -> Verdict:
        """Do what is missing, look when it was planned, and return the verdict."""
        with self.progress() as tick:
            for look in self.plan.looks:
                for entry in self.plan.until(look)[len(self.summaries) :]:
                    self.summaries.append(self.result_of(entry, tick))
                verdict = judge(self.plan, self.summaries, look, self.plan_sha256)
                if decided(verdict) or look == self.plan.looks[-1]:
                    break
                self.console.print(f"look after {self.plan.unit} {look}: not decided yet ({verdict.why})")
        return verdict

    def result_of(self, entry: Entry, tick: Callable[[Entry, int], None]) -> RunSummary:
        path = self.folder / RUNS / entry.name
        fresh = not trial.has_ended(path)
        if fresh:
            if runlog.source_sha256() != self.plan.source_sha256:
                raise UserError(f"The race in {self.folder} {REFUSALS['source_sha256']} (--out names another folder).")
            self.set_aside(path)
            self.execute(entry, path, tick)
        found = Run.read(self.folder, entry)
        problems = examine_run(found, self.plan, self.plan_sha256, path / runlog.SOURCE / "speedrun")
        if problems:
            raise UserError(f"The race in {self.folder} cannot go on: {problems[0]}. Begin another with --out.")
        summary = read_summary(path, entry)
        tick(entry, found.result.steps)
        outcome = f"loss {summary.loss:.4f} in {summary.time:.2f} s" if found.ok else f"failed: {summary.reason}"
        number = f"[{entry.number}/{len(self.entries)}]"
        self.console.print(
            f"{number} {self.plan.labels[entry.side]}, seed {entry.seed}: {outcome}"
            + ("" if fresh else " (done before)")
        )
        return summary

    def set_aside(self, path: Path) -> None:
        """Keep an attempt without an end as evidence: runs that were stopped because they looked bad remain visible."""
        if not path.exists():
            return
        # If the launcher of several processes was killed, too, they end by themselves, but a little later.
        with locked(path / ".lock", lambda: self.console.print(f"{path.name} is about to end; waiting for it")):
            pass
        shelf = self.folder / INTERRUPTED
        shelf.mkdir(exist_ok=True)
        number = next(n for n in range(1, 10**6) if not (shelf / f"{path.name}-{n}").exists())
        os.replace(path, shelf / f"{path.name}-{number}")
        self.console.print(f"{path.name} was interrupted; it starts again from step 0")

    def execute(self, entry: Entry, path: Path, tick: Callable[[Entry, int], None]) -> None:
        def poll() -> None:
            if (path / runlog.METRICS).exists():
                tick(entry, len(runlog.read_metrics(path, "train")))

        # A run inherits the lock, so that it holds the race even if this process is killed before it.
        inherited = (self.lock.fileno(),) if self.lock is not None else ()
        shown = poll if self.console.is_terminal else None
        try:
            trial.run_trial(self.trial(entry, path), trial.ChildProcesses(), poll=shown, pass_fds=inherited)
        except trial.NoResult as e:
            raise UserError(
                f"Run {entry.name} ended without a result: {e}. Repair that; the same command continues."
            ) from e

    def trial(self, entry: Entry, path: Path) -> trial.Trial:
        plan = self.plan
        return trial.Trial(
            recipe=self.folder / recipe_file(entry.side),
            seed=entry.seed,
            out=path,
            settings=plan.settings,
            data=Path(plan.data) if plan.data is not None else None,
            target=plan.target,
            shadow="shadow" in plan.splits,
            plan=self.plan_sha256,
        )

    @contextmanager
    def progress(self) -> Iterator[Callable[[Entry, int], None]]:
        """One bar over the steps of all runs, on a terminal; elsewhere the lines of the runs are enough."""
        steps = [self.plan.recipes[entry.side].schedule.total for entry in self.entries]
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
        quiet = not self.console.is_terminal
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True, disable=quiet) as bar:
            task = bar.add_task("race", total=sum(steps))

            def tick(entry: Entry, done: int) -> None:
                k = entry.number - 1
                text = f"run {entry.number}/{len(steps)} ({entry.name}) step {done}/{steps[k]}"
                bar.update(task, completed=sum(steps[:k]) + done, description=text)

            yield tick


# -------------------------------------------------------------------- the command


def run_race(args: RaceArgs, console: Console) -> Verdict:
    """Race as the arguments say, or continue the race in their folder."""
    folder = args.folder
    if folder.is_dir() and not (folder / PLAN).exists() and any(not p.name.startswith(".") for p in folder.iterdir()):
        raise UserError(f"{folder} already holds files that are no race; choose another --out.")
    return run_plan(folder, partial(make_plan, keep_dtype(folder, args)), console)


def keep_dtype(folder: Path, args: RaceArgs) -> RaceArgs:
    """A race that continues keeps the arithmetic of its plan, whatever a trial would choose today."""
    if not (folder / PLAN).exists():
        return args
    return dataclasses.replace(args, dtype=trial.check_dtype(folder, Plan.read(folder).settings.dtype, args.dtype))


def run_plan(folder: Path, make: Callable[[str | None], Plan], console: Console) -> Verdict:
    """Write the plan, or check that the stored one is the same; then run. `make` takes the time of the plan."""
    wanted = make(None)  # refused before the folder is made

    def waiting() -> None:
        console.print(f"another process is racing in {folder}, or a run of it has not ended; waiting for it")

    with locked(folder / ".lock", waiting) as lock:
        if (folder / PLAN).exists():
            plan = Plan.read(folder)
            compare_plans(folder, plan, make(plan.created))
        else:
            plan = wanted
            plan.write(folder)
        how = f"{len(plan.entries)} runs in the order {order(plan)}, {plan.settings.dtype} arithmetic"
        console.print(f"plan: {folder / PLAN}, {how}")
        try:
            verdict = RaceRunner(folder, plan, console, lock).run()
        except KeyboardInterrupt:
            console.print("The same command continues with the runs that are missing.")
            raise
        if not (folder / MANIFEST).exists():
            write_json(folder / VERDICT, verdict.to_json())
            write_atomic(folder / TEXT, render(verdict))
            write_manifest(folder)
    return verdict


def order(plan: Plan) -> str:
    sides = "".join(entry.side for entry in plan.entries)
    return " ".join(sides[i : i + 4] for i in range(0, len(sides), 4)) if plan.paired else f"A x {len(sides)}"
