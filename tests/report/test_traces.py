"""Traces: what torch.profiler recorded on each rank becomes a table of what was waited for."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from speedrun.cli import main
from speedrun.training import trace

Event = tuple[str, str, float, float]  # category, name, milliseconds from when to when


def written(folder: Path, events: list[Event], rank: int = 0, **more: Any) -> Path:
    """A file as the profiler writes it."""
    file = folder / trace.FILES.replace("*", str(rank))
    found = [{"ph": "X", "cat": c, "name": n, "ts": 1e3 * a, "dur": 1e3 * (b - a)} for c, n, a, b in events]
    about = {"recipe": "r", "order": "plain", "rank": rank, "world_size": 2}
    content = {"traceEvents": [{"ph": "M", "name": "process_name"}, *found], "speedrun": about, **more}
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    return file


def steps(*ranges: Event) -> list[Event]:
    """Two steps of 10 ms with the same ranges in them, and a wait in a validation between them."""
    both = [[(c, n, a + t, b + t) for c, n, a, b in [("user_annotation", "step 7", 0, 10), *ranges]] for t in (0, 20)]
    return [*both[0], ("user_annotation", "wait: validation", 12, 19), *both[1]]


def test_a_cpu_waits_while_the_host_waits(tmp_path: Path) -> None:
    host = "user_annotation"
    events = steps((host, "wait: update embed", 4, 6), (host, "wait: finish head", 7, 7.5), ("cpu_op", "mm", 4, 9))
    (s,) = trace.read(written(tmp_path, events))
    assert s.steps == 2
    assert (s.step, s.waiting) == pytest.approx((0.010, 0.0025))
    assert [name for name, _ in s.longest] == ["update embed", "finish head"]
    assert [seconds for _, seconds in s.longest] == pytest.approx([0.002, 0.0005])


def test_a_gpu_waits_while_nccl_alone_runs(tmp_path: Path) -> None:
    """A reduction from 2 to 6 beside kernels until 5; the host waits for a message from 8 to 9, a kernel until 8.5."""
    events = steps(
        ("kernel", "ncclDevKernel_ReduceScatter_Sum_f32(ncclDevKernelArgs)", 2, 6),
        ("kernel", "gemm", 1, 4),
        ("gpu_memcpy", "Memcpy DtoD", 3.5, 5),
        ("user_annotation", "wait: update embed", 4, 4.01),
        ("user_annotation", "wait: reduce agreement", 8, 9),
        ("gpu_user_annotation", "wait: reduce agreement", 1, 9),
        ("kernel", "gemm", 7, 8.5),
    )
    (s,) = trace.read(written(tmp_path, events))
    assert s.waiting == pytest.approx(0.0015)
    assert dict(s.longest) == pytest.approx(
        {"ncclDevKernel_ReduceScatter_Sum_f32": 0.001, "reduce agreement": 0.0005, "update embed": 0.0}
    )


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    about = {"recipe": "r", "order": "eager", "rank": 3, "world_size": 4}
    recorder = trace.recorder(torch.device("cpu"), 2, about)
    with recorder:
        for step in range(5):
            with record_function(f"step {step}"), record_function("wait: update embed"):
                torch.ones(3).sum()
            recorder.step()
    assert trace.write(recorder, tmp_path / "new", 3).name == "trace-rank3.json.gz"
    (s,) = trace.read(tmp_path / "new")
    assert (s.steps, s.about) == (2, about), "the first step is not recorded"
    assert 0 < s.waiting <= s.step
    assert [span[:3] for span in trace.spans(recorder)] == [("wait", "embed", "update")] * 2


def test_show_prints_a_line_per_rank(tmp_path: Path, capsys: Any) -> None:
    for rank in (1, 0):
        written(tmp_path, steps(("user_annotation", "wait: update embed", 4, 6)), rank)
    assert main(["trace", "show", str(tmp_path)]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith("r, 2 ranks, plain order, 2 steps")
    assert "waiting, % of it" in head
    assert [line.split() for line in lines] == [[r, "10.00", "2.00", "20.0", "update", "embed", "2.00"] for r in "01"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "is missing. Record a trace with"),
        (b"{}", "is not a trace"),
        (gzip.compress(b"{}"), "is not a trace"),
        (gzip.compress(b"no json"), "is not a trace"),
        (gzip.compress(b"a" * 1000)[:-12], "is not a trace"),
        (gzip.compress(b'{"traceEvents": [], "speedrun": {"rank": 0}}'), "has no steps"),
    ],
    ids=["missing", "not compressed", "empty", "no JSON", "cut", "no steps"],  # compressed bytes have the time in them
)
def test_bad_traces(content: bytes | None, sentence: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "t.json.gz"
    if content is not None:
        file.write_bytes(content)
    assert main(["trace", "show", str(file)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_without_a_trace(tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "show", str(tmp_path)]) == 2
    assert "has no trace. Record a trace with" in capsys.readouterr().err
