"""Stored files: a new field does not orphan them, and whatever cannot be read is refused by name, untouched."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import speedrun
from speedrun import cli, files
from speedrun.data.shards import TokenFolder
from speedrun.experiments import records
from speedrun.experiments.race import RaceRunner
from speedrun.experiments.verification import write_manifest
from speedrun.recipes import get_recipe
from speedrun.training import runlog
from speedrun.training.runlog import source_sha256
from tests.experiments.conftest import run_here, words

SOURCE = Path(speedrun.__file__).parent


# --- another version of the program ---------------------------------------------------------------


@pytest.fixture(scope="session")
def record(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of five small runs, one side alone. Nobody writes to it."""
    root = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaceRunner, "execute", run_here)
        assert cli.main([*words("--runs 5", tokens.path), "--out", str(root / "race")]) == 0
    return records.submit(root / "race", "first", root / "records")


def verify_with(source: Path, record: Path) -> subprocess.CompletedProcess[str]:
    """`speedrun verify` of a record, by a changed copy of the program."""
    command = [sys.executable, "-m", "speedrun", "verify", str(record)]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=source)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE, tmp_path / "speedrun", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def rewrite(copy: Path, old: str, new: str) -> int:
    """Replace `old` by `new` in all modules and templates; the number of places."""
    found = 0
    for file in (*copy.rglob("*.py"), *copy.rglob("templates/*.md")):
        text, count = re.subn(old, new, file.read_text(), flags=re.MULTILINE)
        file.write_text(text)
        found += count
    return found


CONFIGS = {
    "model/config.py": ["GPTConfig"],
    "data/loader.py": ["LoaderConfig"],
    "training/optimizers.py": ["Part", "MuonPart", "SnooPart", "OptimConfig"],
    "training/schedule.py": ["ScheduleConfig"],
    "training/device.py": ["CompilerConfig"],
    "training/config.py": ["ValidationConfig", "Recipe", "Options"],
    "training/runlog.py": ["RunData", "RunInfo", "Result"],
    "arguments.py": ["Settings"],
    "experiments/plan.py": ["MachineInfo", "Plan"],
    "experiments/verdict.py": ["RunSummary", "Moments", "Side", "Look", "EqualPairs", "TimeRatio", "Verdict"],
    "experiments/records.py": ["Record"],
    "experiments/verification.py": ["Manifest"],
    "data/shards.py": ["TokenFile", "TokenInfo"],
}


def test_a_record_holds_when_every_config_class_has_a_new_field(copy: Path, record: Path) -> None:
    """As if a later version had one more switch in each of them."""
    for name, classes in CONFIGS.items():
        file = copy / "speedrun" / name
        text = file.read_text()
        for kind in classes:
            begin = re.search(rf"class {kind}[:(]", text).start()  # type: ignore[union-attr]
            # After the last field: before the first method, or before what follows the class.
            end = begin + re.search(r"\n\n    (?=def |@)|\n\n\n", text[begin:]).start()  # type: ignore[union-attr]
            text = f'{text[:end]}\n    added_later: bool = False\n    """A new switch."""{text[end:]}'
        file.write_text(text)
    done = verify_with(copy, record)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("VALID: ")
    recipe = subprocess.run(
        [sys.executable, "-m", "speedrun", "recipes", "show", "normuon"],
        capture_output=True, text=True, check=True, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
    )  # fmt: skip
    assert recipe.stdout.count("added_later") >= 16, "the copy is what ran"


def test_another_version_may_have_other_words_and_more_to_say(copy: Path, record: Path) -> None:
    """Texts are held to their hashes in the manifest."""
    for old, new in (
        ("is below the target", "reaches the target"),  # the verdict's sentence, and verdict.txt with it
        (r'lines = \[f"\{v\.verdict', r'lines = ["Verdict", f"{v.verdict'),
        (r"train_loss:\{train_loss:.4f\}", "train_loss:{train_loss:.6f}"),  # log.txt
        ("## Timing and validation", "## Times and losses"),  # README.md
    ):
        assert rewrite(copy, old, new) >= 1, old
    done = verify_with(copy, record)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_another_version_s_verdict_is_held_to_its_numbers(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runlog, "source_sha256", lambda *of: source_sha256(*of) if of else "another version")
    verdict = stored / "record" / "verdict.json"
    good = json.loads(verdict.read_text())
    for changed, says in (
        ({**good, "noise_floor": 1.9}, "verdict.json does not follow from the runs: noise_floor"),
        ({**good, "wings": 2}, "verdict.json does not follow from the runs: wings"),
        ({"format": 2}, "verdict.json does not follow from the runs: why, verdict, sides"),
    ):
        verdict.write_text(json.dumps(changed))
        write_manifest(stored / "record")
        assert cli.main(["verify", "record"]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"\bnorm_eps\b", "rms_eps", "has the field 'recipes.A.model.norm_eps', which this version of speedrun does"),
        (r"\bmomentum_low\b", "momentum_from", "field 'recipes.A.schedule.momentum_low', which this version"),
        (r"^    first: bool = True\n.*$", "    pass", "has the field 'recipes.A.validation.first', which this"),
    ],
)
def test_a_field_that_was_renamed_or_removed_is_refused_by_name(
    copy: Path, record: Path, old: str, new: str, says: str
) -> None:
    assert rewrite(copy, old, new)
    rewrite(copy, r"\bself\.first\b", "True")
    done = verify_with(copy, record)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert f"{record / 'plan.json'}" in done.stderr
    assert "use the version of speedrun that wrote it" in done.stderr


# --- files that cannot be read --------------------------------------------------------------------


def grow(file: Path) -> None:
    with open(file, "r+b") as f:
        f.truncate(2**30)  # a gigabyte that takes no room on the disk


def change(**values: Any) -> Callable[[Path], None]:
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def drop_format(file: Path) -> None:
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "format"}))


def change_layers(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    about["recipe"]["model"]["num_layers"] = 2
    (run / "run.json").write_text(json.dumps(about))


def into_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown field": (change(wings=2), "has the field 'wings', which this version of speedrun does not know."),
    "newer format": (change(format=7), "was written by a newer version of speedrun (format 7; this one reads 2): "),
    "older format": (change(format=1), "was written by an older version of speedrun (format 1; this one reads 2): "),
    "no format": (drop_format, "was written by an older version of speedrun (format 1; this one reads 2): train, race"),
    "nested 10,000 deep": (lambda file: file.write_text('{"a": ' * 10_000 + "1" + "}" * 10_000), "nested too deeply"),
    "1 GB": (grow, "has 1,073,741,824 bytes, but no stored file has more than 268,435,456."),
    "not UTF-8": (lambda file: file.write_bytes(b'{"a": "\xff"}'), "is damaged: 'utf-8' codec can't decode byte"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged: Input data was truncated."),
    "cut": (
        lambda file: file.write_bytes(file.read_bytes().rpartition(b":")[0]),
        "is damaged: Input data was truncated.",
    ),
    "a folder": (into_folder, "is a folder, not a stored file."),
    "a list": (lambda file: file.write_text("[1]"), "is damaged: it is not a JSON object."),
}
TRAIN = (
    "train --data tokens --recipe adamw --out run --compile False --sample False --threads 1 --schedule.steps 2 "
    "--schedule.seq-len 16 --validation.seq-len 16 --model.dim 16 --model.num-heads 2 --model.num-layers 1"
)


ABLATION = (
    "ablate --data tokens --recipe adamw --switches zero-init --seeds 1 --out ablation --compile False --threads 1 "
    "--set schedule.steps=10 schedule.seq_len=16 validation.seq_len=16 model.dim=16 model.num_heads=2 "
    "model.num_layers=1"
)
# What reads each kind of file, a wrong type and a number out of range for it, and the way out that it must name.
KINDS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], str, str]] = {
    "run/run.json": (
        "train --resume run", {"seed": "0"}, "at seed: Expected `int`, got `str`",
        {"threads": 0}, "at threads: Expected `int` >= 1", "Restore it from a copy, or",
    ),
    "run/result.json": (
        "report run", {"steps": None}, "at steps: Expected `int`, got `null`",
        {"train_time": -3.0}, "at train_time: Expected `float` >= 0.0", "Restore it from a copy, or train again.",
    ),
    "tokens/tokens.json": (
        "data verify tokens", {"bos": "0"}, "at bos: Expected `int`, got `str`",
        {"vocab_size": 70_000}, "at vocab_size: Expected `int` <= 65536", "Prepare or encode the folder again.",
    ),
    "record/plan.json": (
        "verify record", {"seeds": 3}, "at seeds: Expected `array`, got `int`",
        {"alpha": 7.0}, "--alpha is 7.0; it must be above 0 and at most 0.1", "Restore it from a copy, or",
    ),
    "record/record.json": (
        "records --root root", {"runs": "8"}, "at runs: Expected `int`, got `str`",
        {"p": 7.0}, "at p: Expected `float` <= 1.0", "Restore it from a copy, or",
    ),
    "record/manifest.json": (
        "verify record", {"files": []}, "at files: Expected `object`, got `array`",
        {"format": 0}, "at format: 0 is not a format number", "Restore it from a copy; if",
    ),
    "record/recipe-A.json": (
        "verify record", {"model": 3}, "at model: Expected `object`, got `int`",
        {"validation": {"seq_len": 0}}, "at validation.seq_len: Expected `int` >= 1", "Restore it from a copy, or",
    ),
    "ablation/ablation.json": (
        ABLATION, {"variants": 3}, "at variants: Expected `array`, got `int`",
        {"args": {"seeds": "5"}}, "at args.seeds: Expected `int`, got `str`", "Restore it, or choose another --out.",
    ),
    "record/verdict.json": (
        "verify record", {"runs": "8"}, "verdict.json was changed: its sha256",
        {"target": 0.1}, "verdict.json was changed: its sha256", "",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def made(tokens: TokenFolder, record: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind."""
    folder = tmp_path_factory.mktemp("stored")
    shutil.copytree(tokens.path, folder / "tokens")
    shutil.copytree(record, folder / "record")
    (folder / "root" / "pocket").mkdir(parents=True)
    with contextlib.chdir(folder):
        assert cli.main(TRAIN.split()) == 0
        assert cli.main(ABLATION.split()) == 0
    return folder


@pytest.fixture
def stored(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stored"
    shutil.copytree(made, folder)
    (folder / "root" / "pocket" / "record").symlink_to(folder / "record")
    monkeypatch.chdir(folder)
    return folder


def everything(folder: Path) -> dict[str, int | bytes]:
    """Every file below a folder, and what is in it; of huge ones the size."""
    return {
        str(p.relative_to(folder)): p.stat().st_size if p.stat().st_size > 2**27 else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(
    name: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, wrong, type_says, odd, range_says, way_out = KINDS[name]
    cases = {**DAMAGES, "wrong type": (change(**wrong), type_says), "out of range": (change(**odd), range_says)}
    file = stored / name
    good = file.read_bytes()
    for damage, (spoil, says) in cases.items():
        spoil(file)
        before = everything(stored)
        assert cli.main(command.split()) == 2, damage
        said = capsys.readouterr().err
        if name == "record/verdict.json" and damage == "unknown field":
            says = type_says
        assert file.name in said, (damage, said)
        assert says in said, (damage, said)
        if "format" not in damage and "was changed" not in says:
            assert way_out in said, (damage, said)
        assert len(said.splitlines()) == 1, said
        assert everything(stored) == before, damage
        if file.is_dir():
            file.rmdir()
        file.write_bytes(good)


@pytest.mark.parametrize(("name", "command"), [("run/metrics.jsonl", "report run"), ("ablation/rows.jsonl", ABLATION)])
def test_a_line_that_cannot_be_read_is_named(
    name: str, command: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stored / name
    good = file.read_bytes()
    line = json.loads(good.splitlines()[1])
    lines: tuple[tuple[Any, str], ...] = (
        ({**line, "wings": 2}, "has the field 'wings', which this version of speedrun does not know."),
        ({**line, "loss": "low"}, "is damaged at loss: Expected `float"),
        ({k: v for k, v in line.items() if k != "loss"}, "is damaged: Object missing required field `loss`"),
        ([], "is damaged: it is not a JSON object"),
    )
    damages: list[tuple[Callable[[Path], Any], str]] = [
        (lambda f, wrong=wrong: f.write_bytes(good + json.dumps(wrong).encode() + b"\n"), f"Line 10 of {name} {says}")
        for wrong, says in lines
    ]
    damages += [
        (lambda f: f.write_bytes(b'{"a":' * 10_000 + b"\n"), f"Line 1 of {name} is damaged: its JSON is nested too"),
        (lambda f: f.write_bytes(b"\xff\n"), f"Line 1 of {name} is damaged: JSON is malformed"),
        (grow, f"{name} has 1,073,741,824 bytes"),
        (into_folder, f"{name} is a folder"),
    ]
    for spoil, says in damages:
        spoil(file)
        before = everything(stored)
        assert cli.main(command.split()) == 2
        said = capsys.readouterr().err
        assert re.sub(r"Line \d+", "Line 1", says) in re.sub(r"Line \d+", "Line 1", said), said
        assert len(said.splitlines()) == 1, said
        assert everything(stored) == before
        if file.is_dir():
            file.rmdir()
        file.write_bytes(good)


def test_every_kind_of_file_carries_its_format_number(stored: Path) -> None:
    for file in (*stored.glob("run/*.json"), *stored.glob("run/checkpoints/*/*.json"), stored / "tokens/tokens.json"):
        if file.name != "tokenizer.json":  # not a format of ours
            assert json.loads(file.read_text())["format"] == files.FORMAT, file


# --- folders that cannot be made ------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, in which nobody can make a folder")
@pytest.mark.parametrize(
    "command",
    [
        "train --data tokens --out /proc/x",
        "race --data tokens --target 9 --runs 4 --out /proc/x",
        "sweep --data tokens --vary optim.lr=0.01,0.02 --out /proc/x",
        "ablate --data tokens --out /proc/x",
        "report run --out /proc/x/page.html",
        "report run run --out /proc/x/page.html",
        "recipes show adamw --plot /proc/x/picture.svg",
        "data encode --out /proc/x texts",
        "send run --to tensorboard --out /proc/x",
    ],
)
def test_an_out_folder_that_cannot_be_made_costs_one_sentence(
    command: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored / "texts").mkdir()
    (stored / "texts" / "a.txt").write_text("Some text.\n" * 100)
    before = everything(stored)
    assert cli.main(command.split()) == 2
    said = capsys.readouterr().err
    assert re.search(r"^speedrun: /proc/x\S* cannot be written: no folder can be made there\. Choose another", said), (
        said
    )
    assert len(said.splitlines()) == 1
    assert everything(stored) == before


def test_a_pipe_is_not_replaced_by_a_file_and_a_link_stays_one(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    assert cli.main(["recipes", "show", "adamw", "--plot", "pipe"]) == 2
    assert re.search(r"/pipe is a device or a pipe, not a file\. Choose another name\.\n$", capsys.readouterr().err)
    assert Path("pipe").is_fifo()
    Path("link.svg").symlink_to("picture.svg")
    assert cli.main(["recipes", "show", "adamw", "--plot", "link.svg"]) == 0
    assert Path("link.svg").is_symlink()
    assert Path("picture.svg").read_text().startswith("<svg")


def test_a_name_that_is_too_long_costs_one_sentence(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    for command in (f"train --data tokens --out {name}", f"report {name}", f"train --resume {name}", f"verify {name}"):
        assert cli.main(command.split()) == 2
        said = capsys.readouterr().err
        assert "too long" in said, said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n'), "Line 1 of run/metrics.jsonl is damaged"),
        (change_layers, "checkpoints/step-000002 does not fit the model of run.json: blocks.1."),
    ],
)
def test_a_resume_that_is_refused_touches_nothing(
    spoil: Callable[[Path], Any], says: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored / "run" / "result.json").unlink()
    spoil(stored / "run")
    before = everything(stored)
    assert cli.main(["train", "--resume", "run"]) == 2
    assert says in capsys.readouterr().err
    assert everything(stored) == before


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    recipe = get_recipe("interleaved", "pocket")
    files.write_json(
        tmp_path / "recipe.json", {"name": "x", "track": "pocket", "about": "", "model": {"num_layers": 5}}
    )
    read = files.read_json(tmp_path / "recipe.json", type(recipe), "")
    assert (read.model.num_layers, read.optim.lr) == (5, type(recipe.optim)().lr)
