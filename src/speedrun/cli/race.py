"""`speedrun race`: plan, run and judge a race."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun.cli.common import console, parse, say
from speedrun.experiments import RaceArgs, check_submission, handle_sigterm, make_plan, render, run_race, submit


@dataclass(frozen=True)
class Race(RaceArgs):
    submit: str | None = None
    """Write a record folder of this name when the verdict allows it."""
    records: Path = Path("records")
    """Where records are kept."""


METAVARS = {"set": "FIELD=VALUE ...", "against_set": "FIELD=VALUE ...", "looks": "end|every|INT ..."}


@handle_sigterm()
def main(args: Sequence[str]) -> int:
    about = "Plan, run and judge a race. Exit code 0 for `valid` and `faster`, 1 for any other verdict."
    given: Race = parse(Race, "race", args, about=about, metavars=METAVARS)
    if given.submit is not None:
        check_submission(make_plan(given), given.submit, given.records)
    verdict = run_race(given, console)
    say("\n" + render(verdict), end="")
    say(f"race folder  {given.folder}")
    if given.submit is not None:
        say(f"record       {submit(given.folder, given.submit, given.records)}")
    return 0 if verdict.proved else 1
