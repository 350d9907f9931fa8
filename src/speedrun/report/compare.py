"""Several runs beside each other: loss by step, by token and by second.

speedrun compare runs/ONE runs/OTHER --plot curves.svg --csv curves.csv
"""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from speedrun.errors import UserError
from speedrun.report.schedules import GRID, text
from speedrun.train.config import recipe_from_dict
from speedrun.train.runlog import RESULT, read_metrics, read_result, read_run

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 760, 190, 60, 20, 40, 50
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98", "#117a65", "#a04000", "#34495e")
POINTS = 400  # of a curve in a picture: more cannot be seen


def unset(kind: str) -> Any:
    return tyro.conf.arg(metavar=kind, help_behavior_hint="")


@dataclass(frozen=True)
class Compare:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, unset("RUN ...")]
    """Run folders, at least two."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Draw the curves into this file."""
    csv: Annotated[Path | None, unset("FILE.csv")] = None
    """Write every measured loss into this file: run, kind, step, tokens, seconds, loss."""


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
        about = read_run(folder)
        schedule = recipe_from_dict(about["recipe"]).schedule
        status = read_result(folder)["status"] if (folder / RESULT).exists() else "unfinished"
        metrics = [m for m in read_metrics(folder) if m["kind"] in ("train", "val")]
        if not metrics:
            raise UserError(f"{folder} has measured nothing yet; leave it out.")
        last = max(m["step"] for m in metrics)
        tokens = [0]
        for step in range(last + 1):
            tokens.append(tokens[-1] + schedule.at(min(step, schedule.total - 1)).tokens)

        def points(kind: str) -> list[tuple[int, int, float, float]]:
            done = 1 if kind == "train" else 0  # a train line has the index of its step, a val line a number of steps
            chosen = [m for m in metrics if m["kind"] == kind]
            return [(m["step"] + done, tokens[m["step"] + done], m["time"], m["loss"]) for m in chosen]

        return cls(folder.name, about["track"], points("train"), points("val"), status, about.get("target"))


def read_curves(folders: tuple[Path, ...]) -> list[Curve]:
    if len(folders) < 2:
        raise UserError(f"{len(folders)} run folders were named; comparing needs at least 2.")
    curves = [Curve.read(folder) for folder in folders]
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


def as_csv(curves: list[Curve]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("run", "kind", "step", "tokens", "seconds", "loss"))
    for curve in curves:
        for kind, points in (("train", curve.train), ("val", curve.val)):
            writer.writerows((curve.name, kind, *point) for point in points)
    return out.getvalue()


def curves_svg(curves: list[Curve]) -> str:
    """Three panels: by step, token and second. Training losses are smoothed and faint, validation losses are points."""
    axes = (("steps", 0), ("tokens", 1), ("seconds on the clock", 2))
    height = TOP + len(axes) * (PANEL + GAP) + 18 * len(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 22, "Loss: lines for training (smoothed), points for validation", size=14),
    ]
    losses = sorted(p[3] for c in curves for p in (*c.train, *c.val) if math.isfinite(p[3]))
    low = losses[0] - 0.05
    high = max(losses[int(0.9 * (len(losses) - 1))], low + 0.1)  # the first steps would squeeze everything else
    for number, (name, column) in enumerate(axes):
        parts += panel(curves, name, column, TOP + number * (PANEL + GAP), low, high)
    for k, curve in enumerate(curves):
        row = TOP + len(axes) * (PANEL + GAP) + 18 * k
        parts.append(f'<rect x="{LEFT}" y="{row - 9}" width="12" height="10" fill="{COLORS[k % len(COLORS)]}"/>')
        parts.append(text(LEFT + 18, row, curve.name))
    return "\n".join([*parts, "</svg>", ""])


def panel(curves: list[Curve], name: str, column: int, top: int, low: float, high: float) -> list[str]:
    longest = max(p[column] for c in curves for p in (*c.train, *c.val)) or 1

    def x(point: tuple[int, int, float, float]) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * point[column] / longest

    def y(loss: float) -> float:
        return top + PANEL * (1 - (min(max(loss, low), high) - low) / (high - low))

    parts = [text(WIDTH - RIGHT, top + PANEL + 28, name, anchor="end")]
    for loss in (low, (low + high) / 2, high):
        level = f"{y(loss):.1f}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 6, y(loss) + 4, f"{loss:.2f}", anchor="end"))
    parts.append(text(LEFT, top + PANEL + 14, "0", anchor="middle"))
    parts.append(text(WIDTH - RIGHT, top + PANEL + 14, f"{longest:,.0f}", anchor="end"))
    target = curves[0].target
    if target is not None and low < target < high:
        level = f'y1="{y(target):.1f}" y2="{y(target):.1f}"'
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" {level} stroke="#7f8c8d" stroke-dasharray="4 3"/>')
    for k, curve in enumerate(curves):
        color = COLORS[k % len(COLORS)]
        parts.append(path(smooth(curve.train), x, y, color))
        parts += [f'<circle cx="{x(p):.1f}" cy="{y(p[3]):.1f}" r="3" fill="{color}"/>' for p in curve.val]
    return parts


def smooth(points: list[tuple[int, int, float, float]]) -> list[tuple[int, int, float, float]]:
    """Means of neighbours, so many that POINTS remain."""
    width = max(1, math.ceil(len(points) / POINTS))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(*group[-1][:3], sum(p[3] for p in group) / len(group)) for group in groups]


def path(
    points: list[tuple[int, int, float, float]],
    x: Callable[[tuple[int, int, float, float]], float],
    y: Callable[[float], float],
    color: str,
) -> str:
    drawn = " ".join(f"{'L' if i else 'M'}{x(p):.1f} {y(p[3]):.1f}" for i, p in enumerate(points))
    return f'<path d="{drawn}" fill="none" stroke="{color}" stroke-opacity="0.55" stroke-width="1.2"/>'
