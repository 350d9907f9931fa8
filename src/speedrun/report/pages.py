"""The report: one HTML page of a run or several, a race, a record, an ablation or all records.

speedrun report runs/NAME
speedrun report runs/ONE runs/OTHER
speedrun report races/NAME --out verdict.html
speedrun report records
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from speedrun.errors import UserError, plural
from speedrun.experiments import MANIFEST, PLAN, ROWS, ablate, read_rows, records
from speedrun.files import read_json, write_atomic
from speedrun.report import page
from speedrun.report.ablation import ablation_svg
from speedrun.report.curves import Curve, read_curves, table
from speedrun.report.draw import COLORS, DASHES
from speedrun.report.page import BAD, GOOD, OPEN, Headline, Rows, Section, finish
from speedrun.report.race_page import race_page
from speedrun.report.records import records_svg
from speedrun.report.sections import Shown, facts, losses, machine, schedules, settings, timeline
from speedrun.training import runlog

MEASURED = ("warmup_seconds", "wall_seconds", "cpu_seconds")


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these folders, by default beside the first one, and return its path."""
    if not folders:
        raise UserError("No folder was named; `speedrun report runs/NAME` makes a run's page.")
    html = page_of(*folders)
    first, *others = (folder.resolve() for folder in folders)
    more = f"+{others[0].name if len(others) == 1 else len(others)}" if others else ""
    out = out or first.parent / f"{first.name}{more}.html"
    if first in out.resolve().parents and (first / MANIFEST).exists():
        raise UserError(f"{out} lies inside the race, whose files are all listed; put the page elsewhere with --out.")
    write_atomic(out, html)
    return out


def page_of(folder: Path, *others: Path) -> str:
    """The page of a run, race, record or ablation, of all records, or of several runs."""
    if others:
        return runs_page((folder, *others))
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Check the name.")
    kinds: tuple[tuple[str, Callable[[Path], str]], ...] = (
        (PLAN, race_page),
        (runlog.RUN, run_page),
        (ablate.PLAN, ablation_page),
    )
    for name, make in kinds:
        if (folder / name).is_file():
            return make(folder)
    if records.tracks(folder):
        return records_page(folder)
    raise UserError(
        f"{folder} is no run, race, record or ablation, and holds no records: it has no {runlog.RUN}, {PLAN} or "
        f"{ablate.PLAN}."
    )


# -------------------------------------------------------------------- a run


def run_page(folder: Path) -> str:
    about, metrics = runlog.read_run(folder), runlog.read_metrics(folder)
    result = runlog.read_result(folder) if (folder / runlog.RESULT).exists() else None
    curve, recipe = Curve.read(folder), about.recipe
    shown = [Shown(curve, COLORS[1])]
    name = folder.resolve().name
    names = [(name, COLORS[1], "")]
    words = "Lines are training losses, smoothed; points are validation losses."
    record = Curve.of_record(about)
    if record:
        words += f" Dashed, with rings: the record's validation losses ({about.options.curve})."
    return finish(
        f"Run {name}",
        run_headline(about, result, curve),
        [
            losses(shown, names, words, record),
            timeline(folder),
            schedules([recipe]),
            machine(shown, [metrics], names),
            settings({recipe.name: recipe}),
            about_run(about, result),
        ],
    )


def runs_page(folders: tuple[Path, ...]) -> str:
    curves = read_curves(folders)
    looks = [(COLORS[k % len(COLORS)], DASHES[k // len(COLORS) % len(DASHES)]) for k in range(len(curves))]
    shown = [Shown(curve, *look) for curve, look in zip(curves, looks, strict=True)]
    names = [(s.curve.name, s.color, s.dash) for s in shown]
    recipes = [runlog.read_run(folder).recipe for folder in folders]
    rows = table(curves)
    measured = [(curve.val[-1][3], curve.name) for curve in curves if curve.val]
    words = "The lowest last validation loss: {:.4f} of {}.".format(*min(measured)) if measured else "No losses yet."
    return finish(
        f"{len(curves)} runs on the {curves[0].track} track",
        Headline(f"{len(curves)} runs", words),
        [
            Section("runs", "Runs", [page.table(rows, "in the order they were named")], rows),
            losses(shown, names, "Lines are training losses, smoothed; points are validation losses."),
            schedules(recipes),
            machine(shown, [runlog.read_metrics(folder) for folder in folders], names),
            settings({curve.name: recipe for curve, recipe in zip(curves, recipes, strict=True)}),
        ],
    )


def run_headline(about: runlog.RunInfo, result: runlog.Result | None, curve: Curve) -> Headline:
    target = about.target
    if result is None:
        done = (curve.train or curve.val)[-1][0]
        return Headline("unfinished", f"The run has done {plural(done, 'step')} and has not ended.", OPEN)
    if result.val_loss is None:  # it failed, or was stopped
        return Headline(result.status, f"{result.reason}.", BAD if result.status == "failed" else OPEN)
    loss = f"Validation loss {result.val_loss:.4f} after {result.train_time:.1f} s on the clock, "
    loss += f"{plural(result.steps, 'step')} and {plural(result.tokens, 'token')}"
    if target is None:
        return Headline("done", f"{loss}.", GOOD)
    reached = result.val_loss <= target
    word, how = ("reached", "at or below") if reached else ("missed", "above")
    return Headline(f"target {word}", f"{loss}: {how} the target {target:g}.", GOOD if reached else BAD)


def about_run(about: runlog.RunInfo, result: runlog.Result | None) -> Section:
    git, environment = about.git or {}, about.environment
    pairs = [
        ("recipe", about.recipe.name),
        ("track", about.track),
        ("seed", about.seed),
        ("started", about.started.isoformat()),
        ("finished", result and result.finished.isoformat()),
        ("processes", about.world_size),
        ("threads", about.threads),
        ("devices", ", ".join(about.devices)),
        ("commit", git.get("commit") and f"{git['commit']}{' with changes' if git.get('dirty') else ''}"),
        ("interruptions", len(about.interruptions)),
        *((name.replace("_", " "), f"{getattr(result, name):.1f}") for name in MEASURED if result),
        *((f"{name} loss", f"{loss:.4f}") for name, loss in (result.losses if result else {}).items()),
        *((k, v) for k, v in environment.items() if isinstance(v, str | int | float)),
        *sorted((environment.get("packages") or {}).items()),
    ]
    parts = [facts(pairs, "the run")]
    if about.data.files:
        parts.append(page.table([("token file", "sha256"), *sorted(about.data.files.items())], "data"))
    return Section("about", "What ran where", parts, [("what", "value"), *pairs])


# -------------------------------------------------------------------- an ablation, the records


def ablation_page(folder: Path) -> str:
    about = read_json(folder / ablate.PLAN, ablate.AblationPlan, "Restore it from a copy, or run the ablation again.")
    rows = read_rows(folder / ROWS, ablate.VariantRun)
    lines = ablate.lines_of(rows, about.variants)
    title = f"{about.args.recipe} without each of its switches"
    sure = [line.name for line in lines if line.p is not None and line.p < 0.05]
    words = f"{plural(len(rows), 'run')} of {len(about.variants)} variants, {about.base.schedule.steps} scheduled "
    words += (
        f"steps each, on the {about.args.track} track. Beyond doubt (p < 0.05, Holm): {', '.join(sure) or 'nothing'}."
    )
    effects = ablate.ablation_table(lines)
    drawn = [page.table(effects, "sorted by effect; negative results too")]
    if any(line.loss for line in lines):
        drawn.insert(0, page.wide(ablation_svg(title, lines), "effect of every switch, with 95 % intervals"))
    columns = ("variant", "seed", "status", "loss", "seconds", "tokens", "steps")
    runs: Rows = [columns, *(tuple(row.get(c, "") for c in columns) for row in rows)]
    digits = {"loss": ".4f", "seconds": ".2f", "tokens": ",", "steps": ","}  # the CSV has all of them

    def cell(name: str, value: object) -> object:
        return format(value, digits.get(name, "")) if value is not None else "-"

    shown: Rows = [columns, *(tuple(map(cell, columns, row)) for row in runs[1:])]
    arguments = [(k, json.dumps(v)) for k, v in runlog.to_jsonable(about.args).items()]
    return finish(
        f"Ablation: {title}",
        Headline("ablation", words),
        [
            Section("effects", "Effects", drawn, effects),
            Section("runs", "Every run", [page.table(shown, "in the order they were made")], runs),
            Section("about", "What was asked", [facts(arguments, "the ablation")]),
        ],
    )


def records_page(folder: Path) -> str:
    boards = {track: records.board(folder, track) for track in records.tracks(folder)}
    sections = []
    for track, board in boards.items():
        rows = records.table(board)
        drawn = page.wide(records_svg(track, board), f"official time over dates, {track} track")
        sections.append(
            Section(f"track-{track}", f"{track} track", [drawn, page.table(rows, "the fastest first")], rows)
        )
    best = "; ".join(f"{track}: {b[0].name} with {b[0].official:.1f} s" for track, b in boards.items())
    count = sum(map(len, boards.values()))
    return finish("Records", Headline(f"{count} record{'s' if count != 1 else ''}", f"{best}.", GOOD), sections)
