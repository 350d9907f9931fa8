"""Traces: what ranks did becomes a file that Perfetto opens, a table, and a picture; and steps can be foretold."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from speedrun.cli import main
from speedrun.optim.interleave import Span
from speedrun.optim.simulate import Cost, Link, Rank, simulate
from speedrun.report.timeline import timeline_svg
from speedrun.train import trace


def steps(late: float = 0.0) -> trace.Steps:
    """A backward pass of 3 s, a launch, a wait of 1 s, an update of 2 s, and a copy, twice."""

    def one(t: float) -> list[Span]:
        return [
            Span("compute", "model", "backward", t, t + 3),
            Span("launch", "embed", "reduce", t + 3, t + 3.5),
            Span("wait", "embed", "update", t + 3.5, t + 4.5),
            Span("compute", "embed", "update", t + 4.5, t + 6.5),
            Span("copy", "embed", "finish", t + 6.5, t + 7),
        ]

    return {1: one(100 + late), 2: one(107 + late)}


def test_a_trace_file_says_again_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / trace.FILE
    trace.write(file, [steps(), steps(0.25)], {"recipe": "r", "order": "plain"})
    back = trace.read(tmp_path)
    assert back.about == {"recipe": "r", "order": "plain", "ranks": 2}
    for rank, late in enumerate((0.0, 0.25)):
        for step, spans in steps(late).items():
            for span, original in zip(back.ranks[rank][step], spans, strict=True):
                assert span[:3] == original[:3]
                assert (span.start, span.end) == pytest.approx((original.start - 100, original.end - 100))


def test_it_is_what_perfetto_reads(tmp_path: Path) -> None:
    """Complete events need ts and dur in microseconds; what travels is an async pair with one id."""
    trace.write(tmp_path / "t.json", [steps()], {})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    whole = [e for e in events if e["ph"] == "X"]
    assert whole[1]["name"] == "embed reduce"
    assert (whole[1]["ts"], whole[1]["dur"]) == pytest.approx((3e6, 0.5e6))
    begin, end = [e for e in events if e["ph"] in "be"][:2]
    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"]) == pytest.approx((3.5e6, 4.5e6))


def test_waiting_is_a_share_of_the_step_and_of_what_follows_the_backward_pass() -> None:
    s = trace.summarize(steps())
    assert (s.step, s.after) == pytest.approx((7, 4))
    assert s.parts == pytest.approx({"compute": 5, "launch": 0.5, "wait": 1, "copy": 0.5})
    assert (s.exposed, s.exposed_after) == pytest.approx((1 / 7, 1 / 4))


def test_the_picture_has_a_lane_per_rank_and_one_scale() -> None:
    svg = ET.fromstring(timeline_svg([("before", [steps(), steps()], 1), ("after <b>", [steps()], 2)]))
    texts = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("rank 0") == 2
    assert texts.count("rank 1") == 1
    assert "after <b>" in texts, "escaped"
    waits = [r for r in svg.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "#c0392b" and len(r)]
    assert len(waits) == 3
    assert len({r.get("width") for r in waits}) == 1


def test_show_prints_a_table_and_draws(tmp_path: Path, capsys: Any) -> None:
    trace.write(tmp_path / trace.FILE, [steps(), steps()], {"recipe": "r", "order": "plain"})
    assert main(["trace", "show", str(tmp_path), "--plot", str(tmp_path / "t.svg")]) == 0
    said = capsys.readouterr().out
    assert "r, 2 ranks, plain order" in said
    assert "14.3 %" in said
    assert "25.0 %" in said
    ET.parse(tmp_path / "t.svg")


@pytest.mark.parametrize(
    ("content", "more", "sentence"),
    [
        (None, [], "is missing. Record a trace with"),
        ("{}", [], "is not a trace"),
        ("no json", [], "is damaged: JSON is malformed"),
        ('{"traceEvents": [], "otherData": {"ranks": 1}}', [], "has no steps"),
        ("good", ["--step", "7"], "--step 7 was not recorded"),
    ],
)
def test_bad_traces(content: str | None, more: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "t.json"
    if content == "good":
        trace.write(file, [steps()], {})
    elif content is not None:
        file.write_text(content)
    assert main(["trace", "show", str(file), *more]) == 2
    assert sentence in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- simulation


def test_a_step_by_hand() -> None:
    """A table whose reduction began 1 s before the end of the backward pass, and one bucket of matrices.

    The link carries 10 B/s: the table's 20 B until 1, the bucket's 30 B until 4; meanwhile the table is trained (1 to
    2) and sets out behind the bucket (4 to 6); the bucket is trained from 4 to 7 and arrives at 10.
    """
    costs = {"table": Cost(20, 20, 1), "bucket": Cost(30, 30, 3)}
    order = [
        ("reduce", "table"), ("reduce", "bucket"), ("update", "table"), ("gather", "table"),
        ("update", "bucket"), ("gather", "bucket"), ("finish", "table"), ("finish", "bucket"),
    ]  # fmt: skip
    (spans,) = simulate(order, [Rank(costs, {"table": -1.0})], Link(10), 2)  # type: ignore[arg-type]
    found = [(s.kind, s.item, s.op, s.start, s.end) for s in spans]
    assert found == [
        ("transfer", "table", "reduce", -1, 1),
        ("wait", "table", "update", 0, 1),
        ("compute", "table", "update", 1, 2),
        ("transfer", "bucket", "reduce", 1, 4),
        ("wait", "bucket", "update", 2, 4),
        ("transfer", "table", "gather", 4, 6),
        ("compute", "bucket", "update", 4, 7),
        ("transfer", "bucket", "gather", 7, 10),
        ("wait", "bucket", "finish", 7, 10),
    ]


def test_a_transfer_waits_for_the_slowest_rank() -> None:
    """Rank 1 is ready 1 s later and packs for 1 s: the reduction of 20 B at 10 B/s passes from 2 to 4 for both."""
    order = [("reduce", "all"), ("update", "all"), ("gather", "all"), ("finish", "all")]
    fast, slow = Rank({"all": Cost(20, 20, compute=3)}), Rank({"all": Cost(20, 20, compute=1, pack=1)}, ready=1)
    spans = simulate(order, [fast, slow], Link(10), 2)  # type: ignore[arg-type]
    assert [[(s.kind, s.op, s.start, s.end) for s in mine] for mine in spans] == [
        [
            ("wait", "update", 0, 4),
            ("transfer", "reduce", 2, 4),
            ("compute", "update", 4, 7),
            ("transfer", "gather", 7, 9),
            ("wait", "finish", 7, 9),
        ],
        [
            ("launch", "reduce", 1, 2),
            ("transfer", "reduce", 2, 4),
            ("wait", "update", 2, 4),
            ("compute", "update", 4, 5),
            ("launch", "gather", 5, 6),
            ("wait", "finish", 6, 9),
            ("transfer", "gather", 7, 9),
            ("copy", "finish", 9, 10),
        ],
    ]


def test_the_way_to_the_link_is_taken_while_another_transfer_passes_it() -> None:
    """Two gathers of 20 B: 10 B/s to the link (0 to 2, 2 to 4) and 5 B/s through it (2 to 6, 6 to 10)."""
    order = [("gather", "a"), ("gather", "b"), ("finish", "a"), ("finish", "b")]
    (spans,) = simulate(order, [Rank({"a": Cost(0, 20), "b": Cost(0, 20)})], Link(5, approach=10), 2)  # type: ignore[arg-type]
    assert [(s.item, s.start, s.end) for s in spans if s.kind == "transfer"] == [("a", 2, 6), ("b", 6, 10)]


def test_simulate_compares_the_orders_for_the_short_model(tmp_path: Path, capsys: Any) -> None:
    picture = tmp_path / "s.svg"
    assert main(["trace", "simulate", "--gpus", "8", "64", "--link", "50GB", "--plot", str(picture)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [r for r in lines if r[1:2] in (["plain"], ["interleaved"])]
    assert [r[:2] for r in rows] == [[n, order] for n in ("8", "64") for order in ("plain", "interleaved")]
    after = {(r[0], r[1]): float(r[3]) for r in rows}
    assert after["8", "interleaved"] < after["8", "plain"]
    ET.parse(picture)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--link", "fast"], "--link is 'fast'"),
        (["--memory", "0GB"], "--memory is '0GB'"),
        (["--gpus", "1"], "--gpus is 1"),
        (["--buckets", "0"], "--buckets is 0"),
        (["--latency", "-1"], "--latency is -1"),
    ],
)
def test_bad_machines(more: list[str], sentence: str, capsys: Any) -> None:
    assert main(["trace", "simulate", *more]) == 2
    assert sentence in capsys.readouterr().err
