"""`speedrun records`: the leaderboard."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speedrun.cli.common import grid, parse, say, unset
from speedrun.errors import UserError
from speedrun.experiments import records
from speedrun.files import write_atomic
from speedrun.report import records_svg
from speedrun.templates import markdown


@dataclass(frozen=True)
class Records:
    """The leaderboard."""

    track: str | None = None
    """Of this track alone; default: of all that have records."""
    root: Path = Path("records")
    """Where records are kept."""
    markdown: bool = False
    """As Markdown."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Also draw record times over the dates into this file; it needs --track where several have records."""


def main(args: Sequence[str]) -> int:
    given: Records = parse(Records, "records", args, about="The leaderboard of each track.")
    tracks = [given.track] if given.track else records.tracks(given.root)
    boards = {track: records.board(given.root, track) for track in tracks}
    if not any(boards.values()):
        raise UserError(f"There are no records in {given.root}{f' for track {given.track!r}' if given.track else ''}.")
    if given.plot is not None and len(boards) > 1:
        raise UserError(f"--plot draws one track, but {', '.join(boards)} have records; choose with --track.")
    for track, found in boards.items():
        say(f"\n## {track}\n" if given.markdown else f"{track} track")
        rows = records.table(found)
        say(markdown(rows), end="") if given.markdown else grid(rows)
        if given.plot is not None:
            write_atomic(given.plot, records_svg(track, found))
            say(f"drawn in {given.plot}")
    return 0
