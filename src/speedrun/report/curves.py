"""The losses of a run by step, by token and by second; several runs beside each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from speedrun.errors import UserError
from speedrun.files import DELETE
from speedrun.report.draw import Series
from speedrun.training import ScheduleConfig, runlog

POINTS = 80  # of a curve in a picture: more would show the noise of single batches


@dataclass(frozen=True)
class Curve:
    name: str
    track: str
    train: list[tuple[int, int, float, float]]
    """(steps done, tokens, seconds, loss)"""
    val: list[tuple[int, int, float, float]]
    status: str
    target: float | None

    @classmethod
    def read(cls, folder: Path) -> "Curve":
        about = runlog.read_run(folder)
        schedule = about.recipe.schedule
        status = runlog.read_result(folder).status if (folder / runlog.RESULT).exists() else "unfinished"
        metrics = [m for m in runlog.read_metrics(folder) if m["kind"] in ("train", "val")]
        if not metrics:
            raise UserError(f"{folder} has measured nothing yet; leave it out.")
        last = max(m["step"] for m in metrics)
        tokens = tokens_by_step(schedule, last)

        def points(kind: str) -> list[tuple[int, int, float, float]]:
            done = 1 if kind == "train" else 0  # a train line has the index of its step, a val line a number of steps
            chosen = [m for m in metrics if m["kind"] == kind]
            return [(m["step"] + done, tokens[m["step"] + done], m["time"], m["loss"]) for m in chosen]

        return cls(folder.name, about.track, points("train"), points("val"), status, about.target)

    @classmethod
    def of_record(cls, about: runlog.RunInfo) -> "Curve | None":
        """The record beside a run, as far as the run goes; tokens are the run's own, and seconds are not known."""
        record, schedule = about.options.curve, about.recipe.schedule
        reached = [(step, loss) for step, loss in record.losses if step <= schedule.total] if record else []
        if record is None or not reached:
            return None
        tokens = tokens_by_step(schedule, schedule.total)
        val = [(step, tokens[step], math.nan, loss) for step, loss in reached]
        name = f"record: {record.record} (published, {record.machine})"
        return cls(name, record.track, [], val, "published", about.target)


def tokens_by_step(schedule: ScheduleConfig, last: int) -> list[int]:
    """Tokens seen after 0, 1, ... steps, up to the step with the index `last`."""
    if last > schedule.total:
        raise UserError(f"metrics.jsonl has the step {last}, but the run has {schedule.total}. {DELETE}")
    tokens = [0]
    for step in range(last + 1):
        tokens.append(tokens[-1] + schedule.at(min(step, schedule.total - 1)).tokens)
    return tokens


def read_curves(folders: tuple[Path, ...]) -> list[Curve]:
    curves = [Curve.read(folder) for folder in folders]
    if len({curve.name for curve in curves}) < len(curves):  # such as 001-A of two races
        curves = [replace(curve, name=str(folder)) for curve, folder in zip(curves, folders, strict=True)]
    tracks = sorted({curve.track for curve in curves})
    if len(tracks) > 1:
        raise UserError(f"Runs of different tracks cannot be compared: {', '.join(tracks)}; leave some out.")
    return curves


def table(curves: list[Curve]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("run", "steps", "tokens", "seconds", "ms/step", "loss", "reached", "status")]
    for curve in curves:
        steps, tokens, seconds, _ = (curve.train or curve.val)[-1]
        loss = f"{curve.val[-1][3]:.4f}" if curve.val else "-"
        reached = "-"
        if curve.target is not None:
            first = next((p for p in curve.val if p[3] <= curve.target), None)
            reached = "no" if first is None else f"by step {first[0]:,}"
        pace = f"{1000 * seconds / steps:.1f}" if steps else "-"
        rows.append((curve.name, f"{steps:,}", f"{tokens:,}", f"{seconds:.1f}", pace, loss, reached, curve.status))
    return rows


SECONDS = "seconds on the clock"
AXES = (("steps", 0), ("tokens", 1), (SECONDS, 2))


def loss_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The first steps would squeeze everything else, so they are left above the picture."""
    losses = sorted(p[3] for c in curves for p in (*smooth(c.train), *c.val) if math.isfinite(p[3]))
    low = losses[0] - 0.05
    return low, max(losses[int(0.8 * (len(losses) - 1))], low + 0.1)


def series_of(curve: Curve, column: int, color: str, dash: str = "") -> Series:
    """A curve over steps, tokens or seconds: its training losses smoothed and faint, validation losses as points."""
    drawn = [(p[column], p[3]) for p in smooth(curve.train) if math.isfinite(p[3])]
    marks = [(p[column], p[3]) for p in curve.val if math.isfinite(p[3])]
    return Series(curve.name, color, drawn, marks, dash=dash, hollow=bool(dash), opacity=0.55)


def smooth(points: list[tuple[int, int, float, float]]) -> list[tuple[int, int, float, float]]:
    """Means of neighbours, at most POINTS of them."""
    width = max(1, math.ceil(len(points) / POINTS))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(*group[-1][:3], sum(p[3] for p in group) / len(group)) for group in groups]
