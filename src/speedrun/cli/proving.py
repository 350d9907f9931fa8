"""Commands about many runs, and about what they prove: sweep, race, records, ablation, reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speedrun.cli.words import console, dispatch, grid, parse, say
from speedrun.errors import UserError
from speedrun.experiments import ablate as ablate_room
from speedrun.experiments import commands as race_room
from speedrun.experiments import records as records_room
from speedrun.experiments import sweep as sweep_room
from speedrun.experiments.children import terminable
from speedrun.experiments.race import Race
from speedrun.files import write_atomic
from speedrun.options import unset
from speedrun.report import pages, traces
from speedrun.report import send as send_room
from speedrun.report.ablation import ablation_svg
from speedrun.report.records import records_svg
from speedrun.templates import markdown


@terminable()
def sweep(args: Sequence[str]) -> int:
    given = parse(sweep_room.Sweep, "sweep", args, about=sweep_room.__doc__)
    return sweep_room.run(given, console)


@terminable()
def race(args: Sequence[str]) -> int:
    about = "Plan, run and judge a race. Exit code 0 for `valid` and `faster`, 1 for any other verdict."
    return race_room.hold(parse(Race, "race", args, about=about), console)


def stats(args: Sequence[str]) -> int:
    about = "What these losses prove about the target. Exit code 0 if they are valid, 1 if not."
    return race_room.stats(parse(race_room.Stats, "stats", args, about=about), console)


def verify(args: Sequence[str]) -> int:
    about = "Recompute a race or record from its run folders, and say what does not agree."
    given = parse(race_room.Verify, "verify", args, about=about)
    return race_room.verify(given, console)


@terminable()
def challenge(args: Sequence[str]) -> int:
    about = "Race somebody's record against its baseline again, on this machine, with fresh seeds."
    return race_room.challenge(parse(race_room.Challenge, "challenge", args, about=about), console)


@dataclass(frozen=True)
class Records:
    """The leaderboard."""

    track: Annotated[str | None, unset("STR")] = None
    """Of this track alone; default: of all that have records."""
    root: Path = Path("records")
    """Where records are kept."""
    markdown: bool = False
    """As Markdown. `--markdown` alone will do."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Also draw record times over the dates into this file; it needs --track where several have records."""


def records(args: Sequence[str]) -> int:
    given: Records = parse(Records, "records", args, about="The leaderboard of each track.")
    tracks = [given.track] if given.track else records_room.tracks(given.root)
    boards = {track: records_room.board(given.root, track) for track in tracks}
    if not any(boards.values()):
        raise UserError(f"There are no records in {given.root}{f' for track {given.track!r}' if given.track else ''}.")
    if given.plot is not None and len(boards) > 1:
        raise UserError(f"--plot draws one track, but {', '.join(boards)} have records; choose with --track.")
    for track, found in boards.items():
        say(f"\n## {track}\n" if given.markdown else f"{track} track")
        rows = records_room.table(found)
        say(markdown(rows), end="") if given.markdown else grid(rows)
        if given.plot is not None:
            write_atomic(given.plot, records_svg(track, found))
            say(f"drawn in {given.plot}")
    return 0


@terminable()
def ablate(args: Sequence[str]) -> int:
    given = parse(ablate_room.Ablate, "ablate", args, about=ablate_room.__doc__)
    lines = ablate_room.run(given, console)
    rows = ablate_room.table(lines)
    grid(rows)
    title = f"{given.recipe} without each of its switches"
    for file, content in ((given.markdown, markdown(rows)), (given.plot, ablation_svg(title, lines))):
        if file is not None:
            write_atomic(file, content)
            say(f"written to {file}")
    return 0


def report(args: Sequence[str]) -> int:
    return pages.run(parse(pages.Report, "report", args, about=pages.__doc__), say)


def send(args: Sequence[str]) -> int:
    return send_room.run(parse(send_room.Send, "send", args, about=send_room.__doc__), say)


def trace(args: Sequence[str]) -> int:
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "show": lambda rest: traces.show(parse(traces.Show, "trace show", rest), say),
    }
    return dispatch("speedrun trace", actions, args, "Look at recorded steps.")
