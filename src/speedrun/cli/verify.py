"""`speedrun verify`: recompute a race or record, and report what does not agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedrun.checks import Count
from speedrun.cli.common import parse, say
from speedrun.errors import UserError, plural
from speedrun.experiments import examine, files_of, problems_of_record, replay_sides


@dataclass(frozen=True)
class Verify:
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder of a race or of a record."""
    replay: bool = False
    """Also repeat the first steps of a run of each side, and compare the losses. `--replay` alone is enough."""
    steps: Count = 20
    """How many steps --replay repeats; 0: whole runs, with their final losses."""
    data: Path | None = None
    """Where the tokens lie, if not where the plan says."""


def main(args: Sequence[str]) -> int:
    about = "Recompute a race or record from its run folders, and report what does not agree."
    given: Verify = parse(Verify, "verify", args, about=about)
    found = examine(given.folder)
    problems = [*found.problems, *problems_of_record(given.folder, found)]
    if found.verdict is not None and not problems:
        say(f"{found.verdict.verdict.upper()}: {found.verdict.why}")
    for problem in problems:
        say(f"--  {problem}")
    if not problems:
        files = sum(1 for _ in files_of(given.folder))
        say(f"ok  {files} files, {len(found.runs)} runs: plan, logs, losses, clocks and verdict agree")
    replayed = given.replay and not problems
    for name, done in replay_sides(given.folder, found.plan, given.steps, given.data) if replayed else ():
        if done.problem:
            problems.append(done.problem)
            say(f"--  {done.problem}")
        else:
            how = f"within {done.worst:.2g}: {done.inexact}" if done.inexact else "to the last bit"
            say(f"ok  {name}: {plural(done.steps, 'step')} repeated, losses agree {how}")
    for note in found.notes:
        say(f"??  cannot be known from these files: {note}")
    if problems:
        count = f"{len(problems)} problems, the first: " if len(problems) > 1 else ""
        raise UserError(f"{given.folder} does not hold: {count}{problems[0]}.")
    return 0
