"""What ranks wait for, in recorded steps: a title and a table."""

from collections.abc import Sequence
from typing import Any

from speedrun.errors import plural
from speedrun.training import trace

SHOWN = 3  # waits named per rank


def title(found: Sequence[trace.Summary]) -> str:
    about = found[0].about
    ranks, steps = plural(about.get("world_size", len(found)), "rank"), plural(found[0].steps, "step")
    return f"{about.get('recipe', '?')}, {ranks}, {about.get('order', '?')} order, {steps}"


def rows(found: Sequence[trace.Summary]) -> list[tuple[Any, ...]]:
    """A table of mean steps, its head first."""
    table: list[tuple[Any, ...]] = [("rank", "step ms", "waiting ms", "waiting, % of it", "most for (ms)")]
    for s in found:
        most = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in s.longest[:SHOWN])
        share = f"{100 * s.waiting / s.step:.1f}"
        table.append((s.about["rank"], f"{1e3 * s.step:.2f}", f"{1e3 * s.waiting:.2f}", share, most))
    return table
