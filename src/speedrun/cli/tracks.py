"""`speedrun tracks`: what must be reached, on which tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from speedrun.cli.common import grid, parse, say
from speedrun.errors import UserError
from speedrun.tracks import TRACKS


@dataclass(frozen=True)
class Tracks:
    """List the tracks."""


def main(args: Sequence[str]) -> int:
    parse(Tracks, "tracks", args, about="List the tracks: what must be reached, on which tokens.")
    rows = [("track", "target loss", "data", "what")]
    for track in TRACKS.values():
        try:
            track.locate()
            data = "ready"
        except UserError:
            data = "missing"
        rows.append((track.name, f"{track.target:g} nats", data, track.about))
    grid(rows)
    say("`speedrun doctor` shows where the data is, and how to get what is missing.")
    return 0
