"""Records: what may become one, what it contains, how times of different machines are kept apart."""

import dataclasses
import json
import shutil
import zipfile
from datetime import date
from pathlib import Path

import pytest

from speedrun.data.shards import TokenFolder
from speedrun.experiments import records
from speedrun.experiments.plan import Plan
from speedrun.experiments.records import read_record
from speedrun.experiments.verification import examine, write_manifest
from speedrun.files import write_atomic, write_json
from speedrun.report.records import records_svg
from speedrun.templates import markdown
from speedrun.training import runlog
from speedrun.training.runlog import modules, source_sha256
from tests.experiments.conftest import SETTINGS, SMALL, Speedrun, words


def read(file: Path) -> dict:
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="session")
def first(raced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """records/ with the small race as its first record. Nobody writes to it."""
    root = tmp_path_factory.mktemp("first") / "records"
    records.submit(raced, "first", root)
    return root


def test_the_first_record_s_official_time_is_the_measured_one(first: Path, raced: Path, speedrun: Speedrun) -> None:
    record, verdict = read(first / "own/first/record.json"), read(raced / "verdict.json")
    assert record["official"] == record["measured"] == verdict["sides"]["A"]["time"]["mean"]
    assert record["predecessor"] is None
    assert record["retimed"] == verdict["sides"]["B"]["time"]["mean"]
    code, out, err = speedrun("verify", first / "own/first")
    assert (code, err) == (0, "")
    assert out.startswith("FASTER")


def test_the_readme_has_what_records_have(first: Path, raced: Path) -> None:
    text = (first / "own/first/README.md").read_text()
    verdict = read(raced / "verdict.json")
    assert "## What changed" in text
    assert "- `schedule.steps: 40 -> 4`" in text
    assert "## Timing and validation" in text
    for run in verdict["runs"]:
        assert str(round(run["time"], 3)) in text
    code = text.split("```python\n")[1].split("```")[0]
    printed: list[str] = []
    exec(code.replace("print(", "told("), {"told": lambda *words: printed.append(" ".join(map(str, words)))})
    promised = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    assert printed[0] == promised[0]
    assert promised[1].startswith("losses: (std=")


def test_a_record_has_the_source_once_and_no_paths_of_the_machine(first: Path, tmp_path: Path) -> None:
    folder = first / "own/first"
    assert "speedrun/cli/train.py" in zipfile.ZipFile(folder / "source.zip").namelist()
    assert source_sha256(folder / "source.zip") == source_sha256() == read(folder / "plan.json")["source_sha256"]
    assert not list(folder.rglob("source"))
    assert not list(folder.glob("runs/*/.lock"))
    for run in folder.glob("runs/*/run.json"):
        assert str(tmp_path.parents[1]) not in run.read_text()
        assert read(run)["data"]["folder"] == "shadowed"
    assert read(folder / "recipe-A.json")["schedule"]["steps"] == 4


HERE = Path(__file__).resolve().parents[2] / "records"


@pytest.mark.parametrize("folder", [file.parent for file in sorted(HERE.glob("*/*/record.json"))], ids=lambda f: f.name)
def test_the_records_of_this_repository_hold(folder: Path, speedrun: Speedrun) -> None:
    """None is lost by a change of the program."""
    code, out, err = speedrun("verify", folder)
    assert (code, err) == (0, ""), out


@pytest.mark.parametrize("how", ["another line", "no zip file", "missing"])
def test_the_program_of_a_record_cannot_be_exchanged(how: str, first: Path, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    shutil.copytree(first / "own/first", folder)
    archive = folder / "source.zip"
    if how == "another line":
        found = modules(archive)
        with zipfile.ZipFile(archive, "w") as f:
            for name, content in found:
                f.writestr(name, content + b"CHEAT = True\n" * (name == "speedrun/errors.py"))
    elif how == "no zip file":
        archive.write_bytes(b"PK")
    else:
        archive.unlink()
    write_manifest(folder)
    assert "its copy of the source is missing or was changed" in examine(folder).problems[0]


def test_the_official_time_is_the_predecessor_s_plus_what_was_saved(
    first: Path, held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path, here: None
) -> None:
    """As if the first record had been made on a machine that is ten times as slow."""
    root = tmp_path / "records"
    shutil.copytree(first, root)
    slow = read(root / "own/first/record.json")
    write_json(root / "own/first/record.json", {**slow, "official": 10.0})
    sides = ["--set", *SMALL.split(), "schedule.steps=1", "--against", "adamw", "--against-set", *SMALL.split()]
    line = ["race", "--data", held_out.path, *SETTINGS, *sides, "schedule.steps=4", "--runs", "16"]
    code, out, err = speedrun(*line, "--submit", "second")
    assert (code, err) == (0, ""), out
    record = read(root / "own/second/record.json")
    verdict = read(tmp_path / "races/own-adamw-vs-adamw/verdict.json")
    saved = verdict["sides"]["A"]["time"]["mean"] - verdict["sides"]["B"]["time"]["mean"]
    assert saved < 0
    assert record["official"] == pytest.approx(10.0 + saved)
    assert record["predecessor"] == "first"
    assert speedrun("verify", root / "own/second")[0] == 0
    assert [r.name for r in records.board(root, "own")] == ["second", "first"]
    code, out, _ = speedrun("records")
    assert code == 0
    assert out.splitlines()[0] == "own track"
    assert out.index("second") < out.index("first")
    write_json(root / "own/second/record.json", {**record, "official": 1.0})
    write_manifest(root / "own/second")
    assert "record.json does not follow from the race: official" in speedrun("verify", root / "own/second")[2]


def test_the_readme_of_another_version_is_not_compared(
    first: Path, speedrun: Speedrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words may change from version to version; the manifest still has its hash."""
    folder = tmp_path / "record"
    shutil.copytree(first / "own/first", folder)
    write_atomic(folder / "README.md", (folder / "README.md").read_text() + "As it was said then.\n")
    monkeypatch.setattr(runlog, "source_sha256", lambda *of: source_sha256(*of) if of else "another version")
    assert "README.md was changed: its sha256 is not the one" in speedrun("verify", folder)[2]
    write_manifest(folder)
    code, out, err = speedrun("verify", folder)
    assert (code, err) == (0, "")
    assert "whether README.md says what the race says: another version of the program wrote it" in out
    monkeypatch.undo()
    assert "README.md does not say what the race says" in speedrun("verify", folder)[2]


def test_a_changed_readme_or_recipe_is_found(first: Path, speedrun: Speedrun, tmp_path: Path) -> None:
    for name, words_ in (
        ("README.md", "README.md does not say"),
        ("recipe-A.json", "recipe-A.json is not the recipe"),
    ):
        folder = tmp_path / name
        shutil.copytree(first / "own/first", folder)
        text = (folder / name).read_text()
        write_atomic(folder / name, text.replace("4", "5"))
        write_manifest(folder)
        assert words_ in speedrun("verify", folder)[2]


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc/x", "", ".hidden", "a\\b", "<script>", "a b", "x" * 81])
def test_a_record_name_is_one_plain_word(name: str, raced: Path, speedrun: Speedrun, held_out: TokenFolder) -> None:
    line = words("--runs 6", held_out.path, against_steps=40)
    code, out, err = speedrun(*line, "--out", raced, f"--submit={name}")
    assert (code, out) == (2, "")
    assert f"The record name {name!r} does not do" in err
    assert not Path("records").exists()


def test_what_may_not_become_a_record(
    first: Path, raced: Path, held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path, here: None
) -> None:
    line = [*words("--runs 6", held_out.path, against_steps=40), "--out", raced]
    code, _, err = speedrun(*line, "--submit", "first", "--records", first)
    assert code == 2
    assert "exists already; choose another name" in err
    code, _, err = speedrun(*line, "--submit", "again", "--records", first)
    assert code == 2
    assert "The record to beat is 'first'" in err
    assert "schedule.steps: 4 -> 40" in err
    alone = [*words("--runs 5 --out alone", held_out.path), "--submit", "alone"]
    assert "race against its recipe with --against" in speedrun(*alone, "--records", first)[2]
    code, _, err = speedrun(*alone)  # as the first record of another folder
    assert code == 0, err
    missed = [*words("--runs 2 --out missed", held_out.path), "--target", "1"]
    assert "a record needs valid or faster" in speedrun(*missed, "--submit", "missed", "--records", "other")[2]
    assert not Path("other").exists()


def test_no_records_and_damaged_ones(first: Path, speedrun: Speedrun, tmp_path: Path) -> None:
    assert "There are no records in records." in speedrun("records")[2]
    shutil.copytree(first, tmp_path / "records")
    (tmp_path / "records/own/first/record.json").write_text('{"format": 2}')
    code, _, err = speedrun("records")
    assert code == 2
    assert "record.json is damaged: Object missing required field `name`" in err


def test_the_leaderboard_as_markdown_and_picture(first: Path, speedrun: Speedrun, tmp_path: Path) -> None:
    code, out, _ = speedrun("records", "--root", first, "--markdown", "--plot", "board.svg")
    assert code == 0
    assert "| official | measured | loss |" in out
    assert "| --- | --- |" in out
    assert "<svg" in (tmp_path / "board.svg").read_text()


def test_html_in_names_is_escaped(first: Path) -> None:
    name = "<script>alert(1)</script>"
    known = read_record(first / "own/first")
    record = dataclasses.replace(known, name=name, label="a|b", official=1.0)
    assert "<script>" not in markdown(records.table([record]))
    assert "a&#124;b" in markdown(records.table([record]))
    later = dataclasses.replace(record, date=date(2026, 2, 1), official=0.5)
    assert "<script>" not in records_svg("pocket", [record, later])


def test_the_plan_of_a_record_is_the_plan_of_the_race(first: Path, raced: Path) -> None:
    assert (first / "own/first/plan.json").read_bytes() == (raced / "plan.json").read_bytes()
    assert Plan.read(first / "own/first") == Plan.read(raced)
