"""What the commands about races take, and what they print."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from msgspec import Meta
from rich.console import Console

from speedrun.checks import AboveZero, Count, Positive
from speedrun.errors import UserError
from speedrun.experiments import race, records, statistics, verification
from speedrun.experiments.plan import Plan, now
from speedrun.experiments.race import Race
from speedrun.experiments.replay import replay
from speedrun.experiments.verdict import render
from speedrun.options import unset
from speedrun.tracks import get_track, own_track


@dataclass(frozen=True)
class Stats:
    losses: Annotated[tuple[float, ...], tyro.conf.Positional, unset("LOSS ...")]
    """Final validation losses, one per run."""
    target: AboveZero
    """The loss to reach."""
    times: Annotated[tuple[AboveZero, ...], unset("SECONDS ...")] = ()
    """Seconds of the runs, to be printed as records do."""
    alpha: Annotated[float, Meta(gt=0, lt=0.5)] = statistics.ALPHA
    """p below which the losses are valid."""


def stats(given: Stats, console: Console) -> int:
    if not all(map(math.isfinite, given.losses)):
        bad = next(x for x in given.losses if not math.isfinite(x))
        raise UserError(f"A loss is {bad}: a failed run cannot be averaged, and leaving it out would flatter.")
    p = float(statistics.below(np.array(given.losses), given.target))
    told = {"losses": statistics.spread(given.losses)}
    told |= {"time": statistics.spread(given.times)} if given.times else {}
    console.print("\n".join([f"p={p:.4f}", *(f"{what}: {values}" for what, values in told.items())]))
    gap, n = given.target - float(np.mean(given.losses)), len(given.losses)
    where = f"the mean of {n} losses is {abs(gap):.4f} {'below' if gap >= 0 else 'above'} the target {given.target:g}"
    if p < given.alpha:
        console.print(f"valid: {where}")
        return 0
    needed = statistics.needed(gap, float(np.std(given.losses, ddof=1)), given.alpha)
    more = "no number of runs up to 1000 would decide" if needed is None else ""
    if needed is not None:
        more = f"with this deviation {max(1, needed - n)} more runs would decide, with a chance of {statistics.POWER:g}"
    console.print(f"not valid: {where}; {more}")
    return 1


def hold(given: Race, console: Console) -> int:
    """Exit code 0 for a race that proved what it was about."""
    if given.submit is not None:
        records.foresee(race.draw_up(given), given.submit, given.records)
    folder, verdict = race.hold(given, console)
    console.print("\n" + render(verdict), end="")
    console.print(f"race folder  {folder}")
    if given.submit is not None:
        console.print(f"record       {records.submit(folder, given.submit, given.records)}")
    return 0 if verdict["verdict"] in ("valid", "faster") else 1


@dataclass(frozen=True)
class Verify:
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder of a race or of a record."""
    replay: bool = False
    """Also repeat the first steps of a run of each side, and compare the losses. `--replay` alone will do."""
    steps: Count = 20
    """How many steps --replay repeats; 0: whole runs, with their final losses."""
    data: Annotated[Path | None, unset("PATH")] = None
    """Where the tokens lie, if not where the plan says."""


def verify(given: Verify, console: Console) -> int:
    found = verification.examine(given.folder)
    problems = [*found.problems, *records.problems(given.folder, found)]
    if found.verdict is not None and not problems:
        console.print(f"{found.verdict['verdict'].upper()}: {found.verdict['why']}")
    for problem in problems:
        console.print(f"--  {problem}")
    if not problems:
        files = sum(1 for _ in verification.files_of(given.folder))
        console.print(f"ok  {files} files, {len(found.rows)} runs: plan, logs, losses, clocks and verdict agree")
    if given.replay and not problems:
        for side, recipe in found.plan.recipes.items():
            entry = next(e for e in found.plan.entries if e.side == side)
            run = verification.Run.read(given.folder, entry)
            steps = min(given.steps or recipe.schedule.total, len(run.lines("train")))
            done = replay(run, found.plan, steps, given.data)
            if done.problem:
                problems.append(done.problem)
                console.print(f"--  {done.problem}")
            else:
                how = f"within {done.worst:.2g}: {done.inexact}" if done.inexact else "to the last bit"
                console.print(f"ok  {entry.name}: {done.steps} steps repeated, losses agree {how}")
    for note in found.notes:
        console.print(f"??  cannot be known from these files: {note}")
    if problems:
        count = f"{len(problems)} problems, the first: " if len(problems) > 1 else ""
        raise UserError(f"{given.folder} does not hold: {count}{problems[0]}.")
    return 0


@dataclass(frozen=True)
class Challenge:
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder of somebody's race or record."""
    runs: Annotated[Positive | None, unset("INT")] = None
    """Runs of each side; default: as many as there."""
    out: Annotated[Path | None, unset("PATH")] = None
    """Folder of the new race; default: races/challenge-NAME. The same folder continues."""
    data: Annotated[Path | None, unset("PATH")] = None
    """Where the tokens lie, if not where the plan says."""
    nproc: Annotated[Positive | None, unset("INT")] = None
    """Processes of each run, on this machine; default: as many as there."""
    threads: Annotated[Positive | None, unset("INT")] = None
    """CPU threads of each process; default: all usable cores, shared by the processes."""


def challenge(given: Challenge, console: Console) -> int:
    """A race of the same recipes on this machine, with this code and fresh seeds."""
    theirs = Plan.read(given.folder)
    data = given.data or (Path(theirs.data) if theirs.data else None)
    track = own_track(data, theirs.target) if theirs.track == "own" and data else get_track(theirs.track)
    runs = given.runs or len(theirs.seeds)
    compiled, kind = theirs.settings.compile, "systems" if theirs.kind == "systems" else "full"
    nproc = theirs.settings.nproc if given.nproc is None else given.nproc
    folder = given.out or Path("races") / f"challenge-{given.folder.resolve().name}"
    asked = Race(
        data=data, runs=runs, kind=kind, alpha=theirs.alpha, nproc=nproc, threads=given.threads, compile=compiled,  # type: ignore[arg-type]
        dtype=race.planned_dtype(folder, "auto"),
    )  # fmt: skip
    sides = {side: (theirs.labels[side], recipe) for side, recipe in theirs.recipes.items()}

    def plan(created: str) -> Plan:
        return race.of_sides(asked, sides, track, created, theirs.labels.get("both", ""))

    verdict = race.start(folder, plan(now()), console, plan)
    console.print("\n" + render(verdict), end="")
    old = verification.examine(given.folder).verdict
    if old is not None and old["time"] and verdict["time"]:
        there, here = old["time"]["ratio"], verdict["time"]
        inside = float(here["low"]) <= there <= float(here["high"])
        agrees = "lies within" if inside else "lies outside"
        console.print(f"The ratio {there:.4f} that was claimed {agrees} the interval measured here.")
    console.print(f"race folder  {folder}")
    return 0 if verdict["verdict"] in ("valid", "faster") else 1
