"""Steps that are foretold for machines that are not here, and their picture."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from benchmarks.simulate import Cost, Link, Rank, Simulate, run, simulate
from benchmarks.timeline import timeline_svg

from speedrun.errors import UserError
from speedrun.training.trace import Span


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
            ("wait", "finish", 5, 9),
            ("transfer", "gather", 7, 9),
        ],
    ]


def test_the_way_to_the_link_is_taken_while_another_transfer_passes_it() -> None:
    """Two gathers of 20 B: 10 B/s to the link (0 to 2, 2 to 4) and 5 B/s through it (2 to 6, 6 to 10)."""
    order = [("gather", "a"), ("gather", "b"), ("finish", "a"), ("finish", "b")]
    (spans,) = simulate(order, [Rank({"a": Cost(0, 20), "b": Cost(0, 20)})], Link(5, approach=10), 2)  # type: ignore[arg-type]
    assert [(s.item, s.start, s.end) for s in spans if s.kind == "transfer"] == [("a", 2, 6), ("b", 6, 10)]


def test_simulate_compares_the_orders_for_the_short_model(tmp_path: Path, capsys: Any) -> None:
    picture = tmp_path / "s.svg"
    run(Simulate(gpus=(8, 64), link="50GB", plot=picture))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [r for r in lines if r[1:2] in (["sequential"], ["interleaved"])]
    assert [r[:2] for r in rows] == [[n, order] for n in ("8", "64") for order in ("sequential", "interleaved")]
    after = {(r[0], r[1]): float(r[3]) for r in rows}
    assert after["8", "interleaved"] < after["8", "sequential"]
    ET.parse(picture)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"link": "fast"}, "--link is 'fast'"),
        ({"memory": "0GB"}, "--memory is '0GB'"),
        ({"gpus": (1,)}, "--gpus is 1"),
        ({"buckets": 0}, "--buckets is 0"),
        ({"latency": -1}, "--latency is -1"),
    ],
)
def test_bad_machines(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(Simulate(**given))


def one(t: float) -> list[Span]:
    return [
        Span("compute", "model", "backward", t, t + 3),
        Span("launch", "embed", "reduce", t + 3, t + 3.5),
        Span("wait", "embed", "update", t + 3.5, t + 4.5),
        Span("compute", "embed", "update", t + 4.5, t + 6.5),
    ]


def test_the_picture_has_a_lane_per_rank_and_one_scale() -> None:
    svg = ET.fromstring(timeline_svg([("before", [one(0), one(0.25)]), ("after <b>", [one(7)])]))
    texts = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("rank 0") == 2
    assert texts.count("rank 1") == 1
    assert "after <b>" in texts, "escaped"
    waits = [r for r in svg.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "#c0392b" and len(r)]
    assert len(waits) == 3
    assert len({r.get("width") for r in waits}) == 1
