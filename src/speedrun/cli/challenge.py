"""`speedrun challenge`: repeat a race or record on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from speedrun.checks import Positive
from speedrun.cli.common import console, parse, say
from speedrun.experiments import Plan, RaceArgs, examine, handle_sigterm, keep_dtype, plan_challenge, render, run_plan


@dataclass(frozen=True)
class Challenge:
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder of a race or record."""
    runs: Positive | None = None
    """Runs of each side; default: as many as there."""
    out: Path | None = None
    """Folder of the new race; default: races/challenge-NAME. The same folder continues."""
    data: Path | None = None
    """Where the tokens lie, if not where the plan says."""
    nproc: Positive | None = None
    """Processes of each run, on this machine; default: as many as there."""
    threads: Positive | None = None
    """CPU threads of each process; default: all usable cores, shared by the processes."""


@handle_sigterm()
def main(args: Sequence[str]) -> int:
    about = "Race a record against its baseline again, on this machine, with fresh seeds."
    given: Challenge = parse(Challenge, "challenge", args, about=about)
    theirs = Plan.read(given.folder)
    new = RaceArgs(
        data=given.data or (Path(theirs.data) if theirs.data else None),
        runs=given.runs or len(theirs.seeds),
        out=given.out or Path("races") / f"challenge-{given.folder.resolve().name}",
        nproc=given.nproc or theirs.settings.nproc,
        threads=given.threads,
    )
    new = keep_dtype(new.folder, new)
    verdict = run_plan(new.folder, partial(plan_challenge, theirs, new), console)
    say("\n" + render(verdict), end="")
    old = examine(given.folder).verdict
    if old is not None and old.time and verdict.time:
        inside = verdict.time.low <= old.time.ratio <= verdict.time.high
        agrees = "lies within" if inside else "lies outside"
        say(f"The ratio {old.time.ratio:.4f} that was claimed {agrees} the interval measured here.")
    say(f"race folder  {new.folder}")
    return 0 if verdict.proved else 1
