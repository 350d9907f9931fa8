"""The page of a race or a record: the verdict on top, then everything it follows from."""

import math
import statistics
from pathlib import Path
from typing import Any

from speedrun.errors import plural
from speedrun.experiments import (
    MANIFEST,
    RUNS,
    Finding,
    Moments,
    Plan,
    RunSummary,
    TimeRatio,
    Verdict,
    examine,
    read_summary,
    records,
)
from speedrun.report import page
from speedrun.report.curves import Curve
from speedrun.report.draw import COLORS, DASHES, Series, chart
from speedrun.report.page import BAD, GOOD, OPEN, Headline, Rows, Section, finish
from speedrun.report.sections import Name, Shown, facts, losses, machine, schedules, settings, strips
from speedrun.training import runlog

STATUSES = {"valid": GOOD, "faster": GOOD, "failed": BAD, "slower": BAD, "inconclusive": OPEN}


def race_page(folder: Path) -> str:
    if not (folder / MANIFEST).exists():
        return unfinished_race_page(folder)
    found = examine(folder)
    bad = [*found.problems, *records.problems_of_record(folder, found)]
    verdict = found.verdict
    if verdict is None or bad:
        headline = Headline(
            "does not hold", f"These files do not agree with each other: {(bad or ['no verdict'])[0]}.", BAD
        )
    else:
        headline = Headline(verdict.verdict, f"{verdict.why}.", STATUSES[verdict.verdict])
    names = side_names(found.plan)
    shown, metrics = raced_curves(folder, found.runs)
    sections: list[Section | None] = [
        verdict_section(verdict, bad, found) if verdict else None,
        runs_section(found.runs),
        losses(shown, names, "All runs. Lines are training losses, smoothed; points are validation losses."),
        final_losses(found.plan, found.runs),
        paired_times(found.plan, found.runs, verdict),
        schedules(found.plan.recipes.values()),
        machine(shown, metrics, names),
        settings({found.plan.labels[side]: recipe for side, recipe in found.plan.recipes.items()}),
        plan_section(found.plan),
    ]
    title = records.read_record(folder).name if (folder / records.RECORD).exists() else folder.resolve().name
    kind = "Record" if (folder / records.RECORD).exists() else "Race"
    return finish(
        f"{kind} {title}: {' against '.join(found.plan.labels[s] for s in found.plan.recipes)}", headline, sections
    )


def unfinished_race_page(folder: Path) -> str:
    plan = Plan.read(folder)
    done = [e for e in plan.entries if (folder / RUNS / e.name / runlog.RESULT).exists()]
    rows = [read_summary(folder / RUNS / e.name, e) for e in done]
    headline = Headline(
        "unfinished", f"{len(done)} of {len(plan.entries)} planned runs have ended; there is no verdict.", OPEN
    )
    shown, metrics = raced_curves(folder, rows)
    names = side_names(plan)
    sections = (
        [runs_section(rows), losses(shown, names, "The runs so far."), machine(shown, metrics, names)] if rows else []
    )
    return finish(
        f"Race {folder.resolve().name}", headline, [*sections, schedules(plan.recipes.values()), plan_section(plan)]
    )


def side_look(side: str) -> tuple[str, str]:
    return (COLORS[0], DASHES[0]) if side == "A" else (COLORS[1], DASHES[1])


def side_names(plan: Plan) -> list[Name]:
    return [(plan.labels[side], *side_look(side)) for side in plan.recipes]


def raced_curves(folder: Path, rows: list[RunSummary]) -> tuple[list[Shown], list[list[dict[str, Any]]]]:
    paths = [folder / RUNS / row.name for row in rows]
    read = [
        (Shown(Curve.read(path), *side_look(row.side)), runlog.read_metrics(path))
        for path, row in zip(paths, rows, strict=True)
    ]
    return [s for s, _ in read], [m for _, m in read]


def verdict_section(verdict: Verdict, bad: list[str], found: Finding) -> Section:
    rows: list[tuple[Any, ...]] = [
        ("side", "runs", "mean loss", "std", "p", "valid", "shadow loss", "mean seconds", "std of seconds")
    ]

    def cells(moments: Moments | None, digits: int) -> tuple[str, str]:
        return (f"{moments.mean:.{digits}f}", f"{moments.std:.{digits}f}") if moments else ("-", "-")

    for side in verdict.sides.values():
        p = "-" if side.p is None else f"{side.p:.4f}"
        valid = "yes" if side.valid else "no"
        shadow = cells(side.shadow, 4)[0]
        rows.append((side.label, side.runs, *cells(side.loss, 4), p, valid, shadow, *cells(side.time, 3)))
    parts = [page.table(rows, f"target {verdict.target:g}")]
    time = verdict.time
    if time:
        sure = f"{100 * (1 - time.level):.4g} % confident above {time.low:.4f} and below {time.high:.4f}"
        parts.append(page.paragraph(f"Ratio of times {time.ratio:.4f}, {sure}, over {time.blocks} blocks."))
    if verdict.noise_floor is not None:
        parts.append(page.paragraph(f"Identical runs differ by {100 * verdict.noise_floor:.2f} % in time."))
    if bad:
        parts += [page.heading("What does not agree"), page.bullets(bad)]
    else:
        parts.append(page.paragraph("Recomputed from the runs: plan, logs, losses, clocks and verdict agree."))
    parts += [page.heading("What these files cannot tell"), page.bullets(found.notes)]
    return Section("verdict", "Verdict", parts, rows)


def runs_section(rows: list[RunSummary]) -> Section:
    columns = ("name", "side", "block", "seed", "status", "loss", "shadow", "time", "steps", "tokens")
    data: Rows = [
        columns,
        *(tuple("" if getattr(row, c) is None else getattr(row, c) for c in columns) for row in rows),
    ]

    def cell(row: RunSummary, column: str) -> str:
        value = getattr(row, column)
        if value is None:
            return "-"
        if column == "status" and value != "ok":
            return f"{value}: {row.reason}"
        return {"loss": "{:.4f}", "shadow": "{:.4f}", "time": "{:.3f}"}.get(column, "{}").format(value)

    shown = [("run", *columns[1:7], "seconds", *columns[8:]), *(tuple(cell(row, c) for c in columns) for row in rows)]
    return Section("runs", "Every run", [page.table(shown, "in the order of the race")], data)


def good(rows: list[RunSummary], side: str, field: str) -> list[float]:
    return [
        value for row in rows if row.side == side and row.status == "ok" and (value := getattr(row, field)) is not None
    ]


def final_losses(plan: Plan, rows: list[RunSummary]) -> Section | None:
    pictures = []
    for field, words in (("loss", "validation loss"), ("shadow", "loss on the shadow split")):
        groups = [(plan.labels[s], *side_look(s), good(rows, s, field)) for s in plan.recipes if good(rows, s, field)]
        if groups:
            means = (f"{name} {statistics.mean(v):.4f} over {plural(len(v), 'run')}" for name, *_, v in groups)
            target = plan.target if field == "loss" else None
            drawn = strips(f"Final {words}: {'; '.join(means)}.", groups, words, target)
            pictures.append((drawn, f"{words}: every run, mean, 95 % interval"))
    if not pictures:
        return None
    data = [("run", "side", "loss", "shadow"), *((r.name, r.side, r.loss, r.shadow) for r in rows)]
    return Section("final-losses", "Final losses", [page.grid(pictures)], data)


def paired_times(plan: Plan, rows: list[RunSummary], verdict: Verdict | None) -> Section | None:
    """Seconds of both sides in every block, and their ratio."""
    timed = [row for row in rows if row.status == "ok"]
    if not plan.paired or not timed:
        return None
    blocks = sorted({row.block for row in timed})
    highest = max(row.time for row in timed)
    series = []
    for side in plan.recipes:
        color, dash = side_look(side)
        mine = [row for row in timed if row.side == side]
        means = [
            (b + 1, statistics.mean(r.time for r in mine if r.block == b))
            for b in blocks
            if any(r.block == b for r in mine)
        ]
        marks = [(row.block + 1, row.time) for row in mine]
        series.append(Series(plan.labels[side], color, means, marks, dash, bool(dash)))
    span = (0.5, blocks[-1] + 1.5)
    summary = "; ".join(f"{s.name} {statistics.mean(v for _, v in s.marks):.2f}" for s in series if s.marks)
    about = f"Seconds of every run by block. Means: {summary}."
    drawn = [
        (
            chart(about, series, x_name="block", y_name="seconds", y=(0, 1.08 * highest), x=span),
            "seconds of every run; lines join the means of blocks",
        )
    ]
    time = verdict.time if verdict else None
    data: list[tuple[Any, ...]] = [
        ("run", "side", "block", "seconds"),
        *((r.name, r.side, r.block + 1, r.time) for r in timed),
    ]
    if time:
        drawn.append(
            (ratios_svg(time, span), f"how many times as fast {plan.labels['A']} is, by block; dashes bound the ratio")
        )
    return Section("times", "Paired times", [page.key(side_names(plan)), page.grid(drawn)], data)


def ratios_svg(time: TimeRatio, span: tuple[float, float]) -> str:
    ratios = time.ratios
    bounds = [(time.low, "surely above"), (time.high, "surely below")]
    levels = [(1.0, "equal"), *(bound for bound in bounds if math.isfinite(bound[0]))]
    known = [*ratios, *(value for value, _ in levels)]
    room = 0.08 * (max(known) - min(known)) or 0.01
    about = f"Ratio of times by block, {min(ratios):.4f} to {max(ratios):.4f}; overall {time.ratio:.4f}."
    series = [Series("ratio", COLORS[2], (), list(enumerate(ratios, start=1)))]
    y = min(known) - room, max(known) + room
    return chart(about, series, x_name="block", y_name="", x=span, y=y, levels=levels)


def plan_section(plan: Plan) -> Section:
    pairs: list[tuple[str, Any]] = [
        ("created", plan.created),
        ("kind", plan.kind),
        ("track", plan.track),
        ("target", plan.target),
        ("runs of a side", len(plan.seeds)),
        ("seeds", ", ".join(map(str, plan.seeds)) + (" (derived from the plan)" if plan.random_seeds else " (chosen)")),
        ("alpha", plan.alpha),
        (f"looks after {plan.unit}", ", ".join(map(str, plan.looks))),
        ("source", plan.source_sha256),
        *((k, ", ".join(v) if isinstance(v, tuple) else v) for k, v in vars(plan.machine).items()),
        *((f"setting: {k}", v) for k, v in vars(plan.settings).items() if (k, v) != ("nproc", 1)),
    ]
    files = page.table([("token file", "sha256"), *sorted(plan.files.items())], "data")
    return Section("plan", "Plan", [facts(pairs, "written before the first run"), files], [("what", "value"), *pairs])
