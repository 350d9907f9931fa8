"""Records: races that beat the one before, kept with all their evidence under `records/<track>/<name>/`.

    speedrun race --recipe mine --against normuon --runs 10 --submit my-idea
    speedrun records

There are two times. The measured one is the mean of the runs on their machine. The official one is
the predecessor's official time plus what was saved, measured on one machine: own mean minus the retimed predecessor's
mean. The leaderboard sorts by the official one, so times of different machines never mix.
"""

import dataclasses
import datetime
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.checks import AboveZero, Positive, Share
from speedrun.errors import UserError
from speedrun.experiments import statistics
from speedrun.experiments.plan import PLAN, RESTORE, Plan, agree, recipe_file
from speedrun.experiments.verdict import TEXT, VERDICT, Verdict
from speedrun.experiments.verification import ARCHIVE, INTERRUPTED, RUNS, Finding, examine, text_of, write_manifest
from speedrun.files import new_folder, read_json, read_object, write_atomic, write_json
from speedrun.templates import render
from speedrun.training import differences, runlog

RECORD, README = "record.json", "README.md"


@dataclass(frozen=True)
class Record:
    """record.json: what the leaderboard needs."""

    name: str
    track: str
    kind: str
    date: datetime.date
    label: str
    runs: Positive
    loss: float
    p: Share
    shadow: float | None
    measured: AboveZero
    """Mean seconds of the runs."""
    official: AboveZero
    """Seconds for the leaderboard."""
    against: str | None
    """What it was raced against."""
    retimed: float | None
    """Mean seconds of that, in the same race."""
    predecessor: str | None
    machine: str


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}", name):
        raise UserError(
            f"The record name {name!r} does not do: it becomes a folder's name, so use letters, digits, - _ and . "
            "alone, beginning with a letter or digit."
        )


# -------------------------------------------------------------------- reading


def read_record(folder: Path) -> Record:
    return read_json(folder / RECORD, Record, RESTORE)


def board(root: Path, track: str) -> list[Record]:
    """The records of a track, the fastest first."""
    found = [read_record(file.parent) for file in sorted((root / track).glob(f"*/{RECORD}"))]
    return sorted(found, key=lambda record: (record.official, record.date))


def tracks(root: Path) -> list[str]:
    return sorted({file.parents[1].name for file in root.glob(f"*/*/{RECORD}")})


# -------------------------------------------------------------------- submitting


def submit(race: Path, name: str, root: Path) -> Path:
    """Turn a race into a record folder, if it proves one."""
    found = examine(race)
    if found.problems or found.verdict is None:
        raise UserError(f"The race in {race} cannot be a record: {(found.problems or ['it has no verdict'])[0]}.")
    plan, verdict = found.plan, found.verdict
    folder = root / plan.track / name
    record = describe(name, plan, verdict, check_submission(plan, name, root))
    with new_folder(folder) as made:
        for file_name in (PLAN, VERDICT, TEXT, *map(recipe_file, plan.recipes)):
            shutil.copyfile(race / file_name, made / file_name)
        # The same for all runs, by its hash.
        archive(race / RUNS / "001-A" / runlog.SOURCE / "speedrun", made / ARCHIVE)
        left_out = shutil.ignore_patterns(runlog.SOURCE, ".*", "checkpoints", "tokenizer.json")
        for part in (RUNS, INTERRUPTED):
            if (race / part).is_dir():
                shutil.copytree(race / part, made / part, ignore=left_out)
        for file in made.glob(f"*/*/{runlog.RUN}"):
            write_json(file, anonymous(read_object(file, RESTORE)))
        write_json(made / RECORD, runlog.to_jsonable(record))
        write_atomic(made / README, readme(record, plan, verdict))
        write_manifest(made)
    return folder


def archive(package: Path, file: Path) -> None:
    """The modules of a copy of the package in one file, the same bytes at any time."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in runlog.modules(package):
            made.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def check_submission(plan: Plan, name: str, root: Path) -> Record | None:
    """The record to beat, if there is one. Raises, before hours of racing, what would prevent a record."""
    check_name(name)
    if (root / plan.track / name).exists():
        raise UserError(f"{root / plan.track / name} exists already; choose another name.")
    return best_before(root, plan)


def best_before(root: Path, plan: Plan) -> Record | None:
    """The record that this race has to beat: side B must be its recipe."""
    standing = board(root, plan.track)
    if not standing:
        return None
    best = standing[0]
    theirs = Plan.read(root / plan.track / best.name)
    if (theirs.target, theirs.files) != (plan.target, plan.files):
        raise UserError(
            f"{root / plan.track} holds records with another target or data; name another --records folder."
        )
    if not plan.paired:
        raise UserError(f"The record to beat is {best.name!r}; race against its recipe with --against.")
    changed = differences(theirs.recipes["A"], plan.recipes["B"])
    if changed:
        raise UserError(
            f"The record to beat is {best.name!r} ({best.label}), but side B of the race differs from its recipe "
            f"({'; '.join(changed[:3])}); race against that."
        )
    return best


def describe(name: str, plan: Plan, verdict: Verdict, predecessor: Record | None) -> Record:
    """record.json: what the leaderboard needs, all of it from the verdict and from the predecessor's official time."""
    wanted = ("faster",) if predecessor or plan.kind == "systems" else ("valid", "faster")
    if verdict.verdict not in wanted:
        raise UserError(f"The verdict is {verdict.verdict!r} ({verdict.why}); a record needs {' or '.join(wanted)}.")
    a, b = verdict.sides["A"], verdict.sides.get("B")
    assert a.loss and a.time  # noqa: PT018
    assert a.p is not None
    official = measured = a.time.mean
    if predecessor is not None:
        assert b and b.time  # noqa: PT018
        official = predecessor.official + measured - b.time.mean
    return Record(
        name=name,
        track=plan.track,
        kind=plan.kind,
        date=datetime.date.fromisoformat(plan.created[:10]),
        label=a.label,
        runs=a.runs,
        loss=a.loss.mean,
        p=a.p,
        shadow=a.shadow.mean if a.shadow else None,
        measured=measured,
        official=official,
        against=b.label if b else None,
        retimed=b.time.mean if b and b.time else None,
        predecessor=predecessor.name if predecessor else None,
        machine=f"{plan.machine.cpu}, {plan.machine.cores} cores, {', '.join(plan.machine.devices)}"
        + (f", {plan.settings.nproc} processes" if plan.settings.nproc > 1 else ""),
    )


def anonymous(value: Any) -> Any:
    """Without the folders of the machine: of an absolute path the last part stays."""
    if isinstance(value, dict):
        return {key: anonymous(item) for key, item in value.items()}
    if isinstance(value, list):
        return [anonymous(item) for item in value]
    return Path(value).name if isinstance(value, str) and re.fullmatch(r"(/|[A-Za-z]:\\).*", value) else value


def readme(record: Record, plan: Plan, verdict: Verdict) -> str:
    """In the manner of the records that this grew out of: what changed, timing and validation, the predecessor."""
    losses = [round(r.loss, 6) for r in verdict.runs if r.side == "A" and r.loss is not None]
    changed = differences(plan.recipes["B"], plan.recipes["A"]) if record.retimed is not None else []
    return render(
        "record.md",
        record=record,
        plan=plan,
        verdict=verdict,
        ratio=verdict.time,
        losses=losses,
        times={s: [round(r.time, 3) for r in verdict.runs if r.side == s] for s in verdict.sides},
        p=float(statistics.below(losses, plan.target)),  # type: ignore[arg-type]
        changed=[change for change in changed if not change.startswith("name:")],
        spread=statistics.spread,
    )


# -------------------------------------------------------------------- verifying


def problems_of_record(folder: Path, found: Finding) -> list[str]:
    """What is wrong with a record beyond its race; empty for a race that is not a record."""
    if not (folder / RECORD).exists():
        return []
    if found.verdict is None:
        return ["the race of this record has no verdict"]
    record = read_record(folder)
    before = None
    if record.predecessor is not None:
        path = folder.resolve().parent / Path(record.predecessor).name
        if not (path / RECORD).exists():
            found.notes.append(f"whether the official time is right: the predecessor {path.name} is not beside it")
            claimed = record.official - record.measured + (record.retimed or 0.0)
            before = dataclasses.replace(record, name=path.name, official=claimed)
        else:
            before = read_record(path)
            if differences(Plan.read(path).recipes["A"], found.plan.recipes["B"]):
                return [f"side B of the race is not the recipe of the predecessor {path.name}"]
    try:
        expected = describe(record.name, found.plan, found.verdict, before)
    except UserError as e:
        return [str(e)]
    mine, theirs = runlog.to_jsonable(expected), runlog.to_jsonable(record)
    odd = [name for name in mine if not agree(mine[name], theirs[name])]
    wrong = [f"{RECORD} does not follow from the race: {', '.join(odd)}"] if odd else []
    if found.plan.source_sha256 != runlog.source_sha256():
        found.notes.append(f"whether {README} says what the race says: another version of the program wrote it")
    elif not odd and text_of(folder / README) != readme(record, found.plan, found.verdict):
        wrong.append(f"{README} does not say what the race says")
    return wrong


# -------------------------------------------------------------------- showing


def table(records: list[Record]) -> list[tuple[str, ...]]:
    """The leaderboard as a table: the fastest first."""
    rows: list[tuple[str, ...]] = [("official", "measured", "loss", "p", "shadow", "runs", "date", "record", "recipe")]
    for r in records:
        shadow = "-" if r.shadow is None else f"{r.shadow:.4f}"
        proof = "bit-equal" if r.kind == "systems" else f"{r.p:.4f}"
        times = f"{r.official:.1f} s", f"{r.measured:.1f} s"
        rows.append((*times, f"{r.loss:.4f}", proof, shadow, str(r.runs), r.date.isoformat(), r.name, r.label))
    return rows
