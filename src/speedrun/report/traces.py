"""What ranks wait for, in recorded steps.

speedrun train --nproc 2 --trace --order plain --out before
speedrun train --nproc 2 --trace --out after
speedrun trace show before after
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from speedrun.training import trace

Say = Callable[[str], Any]
SHOWN = 3  # of what was waited for


@dataclass(frozen=True)
class Show:
    """How long each rank computed nothing because of a transfer."""

    traces: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...")]
    """Run folders with traces, or trace files."""


def show(given: Show, say: Say) -> int:
    for path in given.traces:
        found = trace.read(path)
        say(f"{path}: {title(found)}")
        for row in rows(found):
            say("  {:>4}  {:>8}  {:>10}  {:>16}  {}".format(*row))
    return 0


def title(found: Sequence[trace.Summary]) -> str:
    about = found[0].about
    ranks, steps = about.get("ranks", "?"), found[0].steps
    return f"{about.get('recipe', '?')}, {ranks} ranks, {about.get('order', '?')} order, {steps} steps"


def rows(found: Sequence[trace.Summary]) -> list[tuple[Any, ...]]:
    """A table of mean steps, its head first."""
    table: list[tuple[Any, ...]] = [("rank", "step ms", "waiting ms", "waiting, % of it", "most for (ms)")]
    for s in found:
        most = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in s.longest[:SHOWN])
        share = f"{100 * s.waiting / s.step:.1f}"
        table.append((s.about["rank"], f"{1e3 * s.step:.2f}", f"{1e3 * s.waiting:.2f}", share, most))
    return table
