"""What every rank did, second by second: recorded by `speedrun train --trace`, opened by Perfetto or Chrome.

A trace file has one process per rank. Its spans are compute, launch (a transfer is prepared and sent off), wait (there
is nothing to do until one arrives) and copy (what arrived is put into place). What lies between launch and arrival is
drawn as travelling beside them.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.errors import UserError
from speedrun.files import read_json, write_json
from speedrun.optim.interleave import Span
from speedrun.optim.pipeline import Team

FILE = "trace.json"
KINDS = ("compute", "launch", "wait", "copy")
Steps = dict[int, list[Span]]  # by step


@dataclass(frozen=True)
class Trace:
    """Steps of every rank, in seconds from the first span on."""

    ranks: list[Steps]
    about: Mapping[str, Any]


def collect(team: Team, steps: Steps) -> list[Steps]:
    """Everybody's steps on one time line. All ranks call this; clocks of one machine agree by themselves."""
    team.everybodys(None)
    now = team.everybodys((platform.node(), time.perf_counter()))
    host, start = now[0]
    found = []
    for (where, theirs), recorded in zip(now, team.everybodys(steps), strict=True):
        late = 0.0 if where == host else theirs - start
        found.append({s: [span._replace(start=span.start - late, end=span.end - late) for span in spans]
                      for s, spans in recorded.items()})  # fmt: skip
    return found


def write(path: Path, ranks: Sequence[Steps], about: Mapping[str, Any]) -> None:
    """As Chrome's JSON of trace events, microseconds from the first span on."""
    zero = min(span.start for steps in ranks for spans in steps.values() for span in spans)
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for step, spans in steps.items():
            for span in spans:
                events.append(
                    {
                        "ph": "X",
                        "name": f"{span.item} {span.op}",
                        "cat": span.kind,
                        "pid": rank,
                        "tid": 0,
                        "ts": 1e6 * (span.start - zero),
                        "dur": 1e6 * (span.end - span.start),
                        "args": {"step": step, "item": span.item, "op": span.op},
                    }
                )
            for number, (item, op, start, end) in enumerate(flights(spans)):
                same = {
                    "cat": "travelling",
                    "name": f"{item} {op}",
                    "pid": rank,
                    "tid": 1,
                    "id": f"{rank}.{step}.{number}",
                }
                events.append({"ph": "b", "ts": 1e6 * (start - zero), **same})
                events.append({"ph": "e", "ts": 1e6 * (end - zero), **same})
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "ranks": len(ranks)}}
    write_json(path, content)


def flights(spans: Sequence[Span]) -> list[tuple[str, str, float, float]]:
    """(item, operation, launched, known to have arrived) of everything that travelled in a step."""
    under_way: dict[str, tuple[str, float]] = {}
    found = []
    for span in spans:
        if span.kind == "launch":
            under_way[span.item] = span.op, span.end
        elif span.kind == "wait" and span.item in under_way:
            op, start = under_way.pop(span.item)
            found.append((span.item, op, start, span.end))
    return found


def read(path: Path) -> Trace:
    """A trace file, or the one in a run folder."""
    file = path / FILE if path.is_dir() else path
    content = read_json(file, dict, "Record a trace with `speedrun train --trace`.")
    try:
        if content["otherData"]["ranks"] > 1 + len(content["traceEvents"]):
            raise ValueError("more ranks than events")
        ranks: list[Steps] = [defaultdict(list) for _ in range(content["otherData"]["ranks"])]
        for e in content["traceEvents"]:
            if e["ph"] == "X":
                start = e["ts"] / 1e6
                span = Span(e["cat"], e["args"]["item"], e["args"]["op"], start, start + e["dur"] / 1e6)
                ranks[e["pid"]][e["args"]["step"]].append(span)
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise UserError(f"{file} is not a trace that `speedrun train --trace` wrote; record it again.") from e
    if not ranks or not all(ranks):
        raise UserError(f"{file} has no steps in it; record it again.")
    return Trace(ranks, content["otherData"])


@dataclass(frozen=True)
class Summary:
    """Mean seconds of a rank's step, and of its parts; `after` is what follows the backward pass."""

    step: float
    parts: Mapping[str, float]
    after: float

    @property
    def exposed(self) -> float:
        """Share of the step spent waiting."""
        return self.parts["wait"] / self.step

    @property
    def exposed_after(self) -> float:
        """Share of what follows the backward pass spent waiting."""
        return self.parts["wait"] / self.after if self.after else 0.0


def summarize(steps: Steps) -> Summary:
    parts = dict.fromkeys(KINDS, 0.0)
    whole = after = 0.0
    for spans in steps.values():
        start, end = min(s.start for s in spans), max(s.end for s in spans)
        backward = max((s.end for s in spans if s.op == "backward"), default=start)
        whole, after = whole + end - start, after + end - backward
        for s in spans:
            if s.kind in parts:
                parts[s.kind] += s.end - s.start
    n = len(steps)
    return Summary(whole / n, {kind: seconds / n for kind, seconds in parts.items()}, after / n)
