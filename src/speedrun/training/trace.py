"""What every rank did in some steps, by torch.profiler: a file per rank in the run folder, which Perfetto opens.

    speedrun train --nproc 2 --trace
    speedrun trace show runs/<folder>

Beside what torch records by itself, a file has the ranges of the loop (`step 7`, `compute: backward model`) and of the
sharded step, which speedrun.optim.sharded explains.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from speedrun.errors import UserError
from speedrun.files import file_errors, read_bytes

FILES = "trace-rank*.json.gz"
WAY_OUT = "Record a trace with `speedrun train --trace`."
KINDS = ("compute", "launch", "wait")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    """A range of the sharded step, in seconds from when the profiler began."""

    kind: str
    item: str
    op: str
    start: float
    end: float


def recorder(device: torch.device, steps: int, about: Mapping[str, Any]) -> profile:
    """Records this many steps, all but the first one of a run, which is not like the others."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    made = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1))
    made.preset_metadata_json("speedrun", json.dumps(about))
    return made


def write(recorded: profile, folder: Path, rank: int) -> Path:
    file = folder / FILES.replace("*", str(rank))
    with file_errors(file):
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 may have made it on another machine
        recorded.export_chrome_trace(str(file))
    return file


def spans(recorded: profile) -> list[Span]:
    """What the sharded step did, in the order in which it began."""
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    found = []
    for event in results.events():  # as they are: `recorded.events()` makes a tree of them, which takes seconds a step
        kind, _, what = event.name().partition(": ")
        if kind in KINDS and event.device_type().name == "CPU":
            op, _, item = what.partition(" ")
            start, end = ((ns - results.trace_start_ns()) / 1e9 for ns in (event.start_ns(), event.end_ns()))
            found.append(Span(kind, item, op, start, end))
    return sorted(found, key=lambda span: span.start)


@dataclass(frozen=True)
class Summary:
    """A mean step of one rank, in seconds."""

    about: Mapping[str, Any]
    steps: int
    step: float
    waiting: float
    """In which nothing was computed because of a transfer."""
    longest: list[tuple[str, float]]
    """What was waited for, the longest first."""


def read(path: Path) -> list[Summary]:
    """Of a trace file, or of all ranks of a run folder."""
    files = sorted(path.glob(FILES)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} has no trace. {WAY_OUT}")
    found = []
    for file in files:
        content = read_bytes(file, WAY_OUT)
        try:
            found.append(summarize(json.loads(gzip.decompress(content))))
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as e:
            raise UserError(f"{file} is not a trace that `speedrun train --trace` wrote; record it again.") from e
        except ZeroDivisionError as e:
            raise UserError(f"{file} has no steps in it; record it again.") from e
    return sorted(found, key=lambda summary: int(summary.about["rank"]))


def summarize(content: Mapping[str, Any]) -> Summary:
    """A GPU waits while a kernel of NCCL runs, or the host waits, and no other kernel does; a CPU while the host waits.

    On a GPU the host's own waits for NCCL are short, whatever the transfer takes: they only order the streams.
    """
    events = [(e["name"], e.get("cat"), e["ts"], e["ts"] + e["dur"]) for e in content["traceEvents"] if e["ph"] == "X"]
    steps = [(a, b) for name, cat, a, b in events if cat == "user_annotation" and re.fullmatch(r"step \d+", name)]
    transfers: dict[str, list[tuple[float, float]]] = defaultdict(list)
    computing = []
    for name, cat, a, b in events:
        if (cat == "user_annotation" and name.startswith("wait: ")) or (cat == "kernel" and name.startswith("nccl")):
            if any(start <= a < end for start, end in steps):
                transfers[name.removeprefix("wait: ").partition("(")[0]].append((a, b))
        elif cat in GPU_WORK:
            computing.append((a, b))

    def exposed(intervals: Sequence[tuple[float, float]]) -> float:
        return (covered([*intervals, *computing]) - covered(computing)) / len(steps) / 1e6

    return Summary(
        content["speedrun"],
        len(steps),
        sum(b - a for a, b in steps) / len(steps) / 1e6,
        exposed([interval for found in transfers.values() for interval in found]),
        sorted(((name, exposed(found)) for name, found in transfers.items()), key=lambda pair: -pair[1]),
    )


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of what lies in any of them."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
