"""`speedrun trace`: what the processes of a run wait for.

speedrun train --nproc 2 --trace --order sequential --out before
speedrun train --nproc 2 --trace --out after
speedrun trace show before after
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedrun.cli.common import dispatch, parse, say
from speedrun.report import traces
from speedrun.training import trace


@dataclass(frozen=True)
class Show:
    """How long each rank computed nothing because of a transfer."""

    traces: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...")]
    """Run folders with traces, or trace files."""


def main(args: Sequence[str]) -> int:
    return dispatch("speedrun trace", {"show": show}, args, "Show recorded steps.")


def show(args: Sequence[str]) -> int:
    given: Show = parse(Show, "trace show", args)
    for path in given.traces:
        found = trace.read(path)
        say(f"{path}: {traces.title(found)}")
        for row in traces.rows(found):
            say("  {:>4}  {:>8}  {:>10}  {:>16}  {}".format(*row))
    return 0
