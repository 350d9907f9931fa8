"""Sections that several pages have: losses, schedules, what the machine did, the recipe, the optimizer's timeline."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.experiments import effect
from speedrun.report import draw, page, traces
from speedrun.report.curves import AXES, SECONDS, Curve, loss_range, series_of
from speedrun.report.draw import INK, Frame, Series, chart, dot, line, picture, text
from speedrun.report.page import Rows, Section
from speedrun.report.schedules import schedule_svg
from speedrun.training import Recipe, ScheduleConfig, differences, fields_of, trace

Name = tuple[str, str, str]
"""What a curve is called, its colour and its dashes."""
TELEMETRY = {
    "load": ("load_average", "processes that want to run (load)"),
    "clock": ("cpu_clock_mhz", "CPU clock, MHz"),
    "temperature": ("cpu_temperature_c", "CPU temperature, degrees C"),
    "memory": ("process_mib", "memory of the process, MiB"),
}

SHOWN_ELSEWHERE = ("kind", "step", "loss", "lr", "time")


@dataclass(frozen=True)
class Shown:
    """A curve and how it is drawn: the sides of a race differ in colour and in dashes."""

    curve: Curve
    color: str
    dash: str = ""


RECORD = (draw.COLORS[6], "5 3")


def losses(shown: Sequence[Shown], names: Sequence[Name], words: str, record: Curve | None = None) -> Section:
    """`record` is drawn beside the runs, over all but seconds, and has a table against the first of them."""
    low, high = loss_range([*(s.curve for s in shown), *([record] if record else [])])
    high = max([high, *(p[3] for p in record.val if p[0] > 0)] if record else [high])  # a run may be far below it
    target = shown[0].curve.target
    levels = [] if target is None else [(target, f"target {target:g}")]
    ends = [f"{s.curve.name} {s.curve.val[-1][3]:.4f}" for s in shown if s.curve.val]
    pictures = []
    for name, column in AXES:
        about = f"Loss over {name}. Last validation losses: {', '.join(ends) or 'none yet'}."
        series = [series_of(s.curve, column, s.color, s.dash) for s in shown]
        if record and name != SECONDS:
            about += f" Last loss of {record.name}: {record.val[-1][3]:.4f}."
            series.insert(0, record_series(record, column))
        drawn = chart(about, series, x_name=name, y_name="loss", y=(low, high), levels=levels)
        alone = ", without the record: its machine was another" if record and name == SECONDS else ""
        pictures.append((drawn, f"by {name}{alone}"))
    data: list[tuple[Any, ...]] = [("run", "kind", "step", "tokens", "seconds", "loss")]
    for s in shown:
        for kind, points in (("train", s.curve.train), ("val", s.curve.val)):
            data += [(s.curve.name, kind, *point) for point in points]
    parts = [page.paragraph(words, "note"), page.key(names), page.grid(pictures)]
    if record:
        data += [(record.name, "val", step, tokens, "", loss) for step, tokens, _, loss in record.val]
        parts[1] = page.key([*names, (record.name, *RECORD)])
        parts.append(page.table(beside(shown[0].curve, record), "validation losses beside the record's"))
    return Section("loss", "Loss", parts, data)


def record_series(record: Curve, column: int) -> Series:
    """A few validation losses, joined by a dashed line: rings, inside which the points of a run that agrees lie."""
    marks = [(p[column], p[3]) for p in record.val]
    color, dash = RECORD
    return Series(record.name, color, marks, marks, dash, hollow=True, radius=5)


def beside(run: Curve, record: Curve) -> Rows:
    """Every loss of the record, with the run's own where it has measured one."""
    own = {p[0]: p[3] for p in run.val}
    rows: list[tuple[Any, ...]] = [("step", "this run", "record", "difference")]
    for step, *_, loss in record.val:
        here = (f"{own[step]:.4f}", f"{own[step] - loss:+z.4f}") if step in own else ("-", "-")
        rows.append((f"{step:,}", here[0], f"{loss:.4f}", here[1]))
    return rows


def pace(curve: Curve, points: int = 120) -> list[tuple[float, float]]:
    """(step, milliseconds per step), as means over neighbours."""
    marks = [(0, 0.0), *((p[0], p[2]) for p in curve.train)]
    wide = max(1, math.ceil(len(marks) / points))
    chosen = marks[::wide] + ([marks[-1]] if (len(marks) - 1) % wide else [])
    return [(b[0], 1000 * (b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(chosen)]


def machine(shown: Sequence[Shown], metrics: Sequence[list[dict[str, Any]]], names: Sequence[Name]) -> Section:
    """Seconds of the steps, whatever else the steps logged, and the state of the machine meanwhile."""
    paces = [pace(s.curve) for s in shown]
    highest = max((y for points in paces for _, y in points), default=1.0)
    series = [Series(s.curve.name, s.color, p, dash=s.dash, opacity=0.7) for s, p in zip(shown, paces, strict=True)]
    spread = f"{min((y for p in paces for _, y in p), default=0):.0f} to {highest:.0f} ms"
    pictures = [
        (
            chart(f"Milliseconds per step: {spread}.", series, x_name="steps", y_name="ms/step", y=(0, 1.05 * highest)),
            "milliseconds per step",
        )
    ]
    for field in logged(metrics):
        pictures += chart_of(shown, metrics, "train", field, field.replace("_", " "))
    data: list[tuple[Any, ...]] = [("run", "step", *TELEMETRY)]
    readings = [[m for m in found if m["kind"] == "telemetry"] for found in metrics]
    for s, found in zip(shown, readings, strict=True):
        data += [(s.curve.name, m["step"], *(value_of(m, field) for field, _ in TELEMETRY.values())) for m in found]
    for field, words in TELEMETRY.values():
        pictures += chart_of(shown, metrics, "telemetry", field, words)
    return Section("machine", "Steps and machine", [page.key(names), page.grid(pictures)], data)


def logged(metrics: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Numbers in train lines that no other picture shows, such as a gradient norm."""
    lines = (m for found in metrics for m in found if m["kind"] == "train")
    return list(dict.fromkeys(k for m in lines for k in m if k not in SHOWN_ELSEWHERE and value_of(m, k) != ""))


def chart_of(
    shown: Sequence[Shown], metrics: Sequence[list[dict[str, Any]]], kind: str, field: str, words: str
) -> list[tuple[str, str]]:
    """A picture of a measured field over the steps; none of a single value."""
    series = []
    for s, found in zip(shown, metrics, strict=True):
        marks = [
            (m["step"], float(value_of(m, field))) for m in found if m["kind"] == kind and value_of(m, field) != ""
        ]
        if marks:
            points = () if kind == "train" else marks
            series.append(Series(s.curve.name, s.color, marks, points, s.dash, bool(s.dash), 0.5))
    values = [y for one in series for _, y in one.points]
    if len(values) < 2:
        return []
    about = f"{words}: {min(values):.6g} to {max(values):.6g}."
    return [(chart(about, series, x_name="steps", y_name="", y=(0, 1.1 * max(values) or 1.0)), words)]


def value_of(reading: dict[str, Any], field: str) -> Any:
    """A number, or an empty string where the machine gave none."""
    value = reading.get(field, "")
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) in (int, float) and math.isfinite(value) else ""


def schedules(recipes: Iterable[Recipe]) -> Section:
    """Those of each recipe; recipes with the same ones show them once."""
    different: dict[ScheduleConfig, Recipe] = {}
    for recipe in recipes:
        different.setdefault(recipe.schedule, recipe)
    data: list[tuple[Any, ...]] = [("recipe", "step", "lr", "tokens", "long window", "short window", "momentum")]
    for recipe in different.values():
        for step in range(recipe.schedule.total):
            at = recipe.schedule.at(step)
            windows = (at.windows.long, at.windows.short) if at.windows else ("", "")
            data.append((recipe.name, step, at.lr, at.tokens, *windows, "" if at.momentum is None else at.momentum))
    drawn = [page.wide(schedule_svg(recipe), f"schedules of {recipe.name}") for recipe in different.values()]
    return Section("schedules", "Schedules", drawn, data)


def settings(recipes: dict[str, Recipe]) -> Section:
    """Every field of the recipes, side by side."""
    fields = {name: fields_of(recipe) for name, recipe in recipes.items()}
    known = list(dict.fromkeys(field for values in fields.values() for field in values))
    rows = [("field", *fields), *((f, *(str(v.get(f, "")) for v in fields.values())) for f in known)]
    parts = []
    if len(recipes) == 2:
        theirs, ours = reversed(recipes.values())
        changed = [c for c in differences(theirs, ours) if not c.startswith("name:")]
        parts += [page.heading("What differs"), page.bullets(changed or ["nothing"])]
    parts.append(page.details("Every field of the recipe", page.table(rows, "every field")))
    return Section("recipe", "Recipe", parts, rows)


def timeline(folder: Path) -> Section | None:
    """The optimizer's steps, if they were traced."""
    found = trace.read(folder) if any(folder.glob(trace.FILES)) else []
    if not found:
        return None
    rows = traces.rows(found)
    return Section("timeline", "Optimizer timeline", [page.table(rows, f"{traces.title(found)}: mean step")], rows)


def facts(pairs: Sequence[tuple[str, Any]], caption: str) -> str:
    return page.table([("what", "value"), *((k, v) for k, v in pairs if v not in (None, ""))], caption, numbers=False)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval; a single value has none."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    found = effect(values)
    return found.mean, found.low, found.high


def strips(
    about: str, groups: Sequence[tuple[str, str, str, Sequence[float]]], x_name: str, target: float | None
) -> str:
    """A row of points per group, with the mean and its 95 % interval below the points."""
    known = [v for *_, values in groups for v in (*values, *interval(values))] + ([] if target is None else [target])
    low, high = min(known), max(known)
    room = 0.06 * (high - low) or 0.01
    width, row, top, left = 380, 62, 26, 14
    height = top + row * len(groups) + 40
    frame = Frame(left, top, width - 2 * left, height - top - 40, (low - room, high + room), (0, 1))
    parts = frame.axes(x_name, "", y={}, tall=True)
    if target is not None:
        (x, bottom), words = frame.at(target, 0), f"target {target:g}"
        parts += [line(x, top, x, bottom, color=INK, dash="4 3"), text(x, top - 8, words, anchor="middle")]
    for k, (name, color, dash, values) in enumerate(groups):
        y = top + row * k + 34
        mean, lower, upper = interval(values)
        ends = [frame.at(v, 0)[0] for v in (lower, mean, upper)]
        parts += [text(left, y - 16, name), line(ends[0], y + 12, ends[2], y + 12, color=color, width=2)]
        parts.append(line(ends[1], y + 7, ends[1], y + 17, color=color, width=2))
        parts += [dot(frame.at(v, 0)[0], y, color, about=f"{name}: {v:.4f}", hollow=bool(dash)) for v in values]
    return picture(width, height, parts, about)
