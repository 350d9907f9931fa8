"""A recipe as one file: it trains to the same bits as the package, and is a file that people like to read."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from speedrun.cli import main
from speedrun.data.shards import TokenFolder, open_shard, write_shard
from speedrun.errors import UserError
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.report.export import TEMPLATE, Fields, export, switches
from speedrun.train.config import Recipe, with_fields
from speedrun.train.device import choose
from speedrun.train.loop import Options, Trainer
from speedrun.train.progress import Report
from speedrun.train.runlog import RunFolder, read_metrics
from tests.recipes.test_lineage import tiny

ROOT = Path(__file__).parents[2]
STEPS = 12
LINE = re.compile(r"^step:(\d+)/(\d+) (train|val)_loss:(\S+) train_time:\d+ms step_avg:(?:[\d.]+|nan)ms$", re.MULTILINE)
ALLOWED = {"numpy", "torch"} | sys.stdlib_module_names

# What no recipe of the lineage has, but one of tomorrow might.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "decay and a warm-up": (
        "normuon",
        {
            "model.softcap": "tanh", "model.skip_form": "plain", "model.mlp_ratio": 3.0, "model.zero_init": False,
            "schedule.window_extension": 0, "schedule.warmup": 0.2, "schedule.cooldown": 0.6,
            "schedule.momentum_cooldown": 0, "optim.weight_decay": 0.1, "optim.embed.decay": 1.0, "optim.eps": 1e-6,
            "optim.eps_at": "corrected", "optim.decay": "cautious", "optim.muon.weight_decay": 0.1,
            "optim.muon.decay": "cautious", "optim.muon.gates_lr": 0.5, "optim.muon.method": "newton-schulz",
            "optim.muon.steps": 4,
        },
    ),
    "wide enough for symmetric matrices in blocks": ("normuon", {"model.width": 192}),
    "Snoo with float32 weights": (
        "medium-before",
        {
            "optim.weights": "float32", "optim.weight_decay": 0.1, "optim.scalars.decay": 1.0, "optim.every": 2,
            "optim.decay_by": "lr-squared", "optim.muon.decay_by": "lr-squared", "optim.muon.split_qkv": False,
            "optim.muon.up_lr": 2.0, "optim.muon.scale": "none", "model.backout": -1, "model.value_gates": True,
            "model.softcap": "none", "schedule.window_short": 16, "schedule.window_final": 32,
            "schedule.momentum_warmup": 0,
            "validation.first": False,
        },
    ),
}  # fmt: skip


def short(name: str) -> Recipe:
    """The tiny recipe in few steps, all of its stages among them: ramps, windows, the split, the extension."""
    base, changes = VARIANTS.get(name, (name, {}))
    recipe = tiny(base)
    every: dict[str, Any] = {"schedule.steps": STEPS - recipe.schedule.extension, "validation.every": 5}
    return with_fields(recipe, every | {"validation.first": True} | changes)


Losses = list[tuple[str, int, float]]


def by_the_package(
    recipe: Recipe, tokens: TokenFolder, folder: Path, seed: int = 0, compile: bool = False, dtype: str = "float32"
) -> Losses:
    run = RunFolder.create(folder, {"recipe": recipe.name}, console=lambda line: None)
    options = Options(seed=seed, compile=compile, final_checkpoint=False)
    report = Report(recipe.schedule.total, quiet=True)
    trainer = Trainer(recipe, tokens, choose("cpu", dtype, 1), options, run, report)
    assert trainer.run()["status"] == "ok"
    found = [m for m in read_metrics(folder) if m["kind"] in ("train", "val")]
    return [(m["kind"], m["step"] + (m["kind"] == "train"), m["loss"]) for m in found]


def loaded(source: str, folder: Path) -> ModuleType:
    """In this process, since importing torch takes longer than all the steps."""
    path = folder / "train.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("exported_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_the_file(
    source: str, data: Path, folder: Path, capsys: pytest.CaptureFixture[str], *more: str, compile: bool = False
) -> Losses:
    """The losses it prints."""
    module = loaded(source, folder)
    capsys.readouterr()
    flags = f"--exact --threads 1 --device cpu --compile {compile}".split()
    module.main(["--data", str(data), *flags, *more])
    said = capsys.readouterr().out
    assert "torch.compile" not in said
    return [(kind, int(done), float(loss)) for done, _, kind, loss in LINE.findall(said)]


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("name", [*LINEAGE, *VARIANTS])
def test_the_losses_are_those_of_the_package_bit_for_bit(
    name: str, tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = short(name)
    expected = by_the_package(recipe, tokens, tmp_path / "run", seed=3)
    found = by_the_file(export(recipe), tokens.path, tmp_path, capsys, "--seed", "3", "--dtype", "float32")
    assert [kind for kind, _, _ in found].count("train") == STEPS
    assert [done for kind, done, _ in found if kind == "val"] == [0, 5, 10, STEPS][not recipe.validation.first :]
    assert found == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)  # dozens of graphs are compiled, twice
@pytest.mark.parametrize("name", [*LINEAGE, *VARIANTS])
def test_compiled_they_are_too(
    name: str, tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = short(name)
    expected = by_the_package(recipe, tokens, tmp_path / "run", compile=True)
    torch.compiler.reset()
    assert by_the_file(export(recipe), tokens.path, tmp_path, capsys, "--dtype", "float32", compile=True) == expected


def test_in_half_precision_they_are_too(
    tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = with_fields(short("medium"), {"schedule.steps": 4})
    expected = by_the_package(recipe, tokens, tmp_path / "run", dtype="bfloat16")
    assert by_the_file(export(recipe), tokens.path, tmp_path, capsys, "--dtype", "bfloat16") == expected


@pytest.mark.parametrize("name", ["adamw", "normuon"])
def test_several_shards_epochs_and_another_number_of_steps(
    name: str, tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few tokens in two shards, of which one begins inside a document; after two steps an epoch is over."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    stream = open_shard(tokens.path / "train_000000.bin")
    write_shard(folder / "train_000000.bin", stream[40:340])
    write_shard(folder / "train_000001.bin", stream[1000:1180])
    for shard in range(2):
        write_shard(folder / f"val_{shard:06}.bin", stream[5000 + 400 * shard : 5210 + 400 * shard])
    (folder / "tokenizer.json").write_bytes((tokens.path / "tokenizer.json").read_bytes())
    few = TokenFolder.describe(folder, tokenizer="pocket", vocab_size=tokens.vocab_size, bos=tokens.bos)
    recipe = with_fields(short(name), {"schedule.rows": 6})
    expected = by_the_package(with_fields(recipe, {"schedule.steps": 7}), few, tmp_path / "run")
    assert by_the_file(export(recipe), folder, tmp_path, capsys, "--steps", "7", "--dtype", "float32") == expected
    (folder / "tokens.json").unlink()  # community shards have none; the recipe knows the vocabulary
    assert by_the_file(export(recipe), folder, tmp_path, capsys, "--steps", "7", "--dtype", "float32") == expected


def test_by_itself_in_an_empty_folder_it_prints_the_lines_of_a_run(tokens: TokenFolder, tmp_path: Path) -> None:
    recipe = short("orthogonal-nesterov")
    by_the_package(recipe, tokens, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.py").write_text(export(recipe))
    asked = [
        sys.executable,
        "-I",
        "train.py",
        "--data",
        tokens.path,
        "--dtype",
        "float32",
        "--compile",
        "False",
        "--threads",
        "1",
    ]
    done = subprocess.run(asked, cwd=tmp_path / "empty", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    logged = (tmp_path / "run" / "log.txt").read_text()
    without_times = re.compile(r"step:\d+/\d+ (?:train|val)_loss:\S+")
    assert len(LINE.findall(done.stdout)) == STEPS + 4
    assert without_times.findall(done.stdout) == without_times.findall(logged)
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["train.py"]


# -------------------------------------------------------------------- a file to read


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every recipe at its real pocket size."""
    folder = tmp_path_factory.mktemp("exported")
    written = {name: folder / f"{name.replace('-', '_')}.py" for name in LINEAGE}
    for name, path in written.items():
        path.write_text(export(get_recipe(name, "pocket")))
    return written


@pytest.mark.parametrize("name", LINEAGE)
def test_plain_source_of_its_own(name: str, files: dict[str, Path]) -> None:
    text = files[name].read_text()
    tree = ast.parse(text)
    assert 500 < len(text.splitlines()) <= 1200
    assert "<<" not in text
    assert "#:" not in text
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] in ALLOWED
        elif isinstance(node, ast.Name):
            assert node.id not in ("exec", "eval", "compile", "__import__")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            assert len(node.value) < 1200, "text is for docstrings"
    constants = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id.isupper() and len(n.id) > 1}
    unused = [n for n in constants if len(re.findall(rf"\b{n}\b", text)) == 1]
    assert not unused, "only what the recipe uses"


def test_the_linter_and_the_formatter_have_nothing_to_say(files: dict[str, Path]) -> None:
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), *map(str, files.values())]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_techniques_that_a_recipe_has_not_are_not_in_its_file(files: dict[str, Path]) -> None:
    plain, full = (files[name].read_text().partition("import argparse")[2] for name in ("adamw", "interleaved"))
    for word in ("Muon", "bfloat16 weight", "YaRN", "smear", "windows", "multi_token", "cautious", "softcap"):
        assert word.lower() not in plain.lower(), word
        assert word.lower() in full.lower(), word
    assert "Snoo" in files["medium-before"].read_text()
    assert "Snoo" not in full


# -------------------------------------------------------------------- the template


def test_every_switch_is_asked_and_every_question_has_an_answer() -> None:
    recipe = get_recipe("medium", "pocket")
    asked = {words.split()[-1] for words in re.findall(r"^#: if (.+)$", TEMPLATE.read_text(), re.MULTILINE)}
    assert asked == set(switches(Fields(recipe), recipe))


@pytest.mark.parametrize(
    ("field", "value"),
    [("optim.clip", 1.0), ("model.no_mlp", (1,)), ("optim.muon.nesterov", False), ("model.across_documents", False)],
)
def test_what_the_file_would_leave_out_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"single file: {re.escape(field)} is {re.escape(repr(value))}"):
        export(with_fields(get_recipe("normuon", "pocket"), {field: value}))


# -------------------------------------------------------------------- the commands


def test_the_command_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = export(get_recipe("muon", "pocket"))
    assert main(["export", "--recipe", "muon"]) == 0
    assert Path("train.py").read_text() == source
    assert "python train.py --data" in capsys.readouterr().out
    Path("train.py").write_text("mine")
    assert main(["export", "--recipe", "muon"]) == 2
    assert "train.py exists already; choose another --out, or pass --force" in capsys.readouterr().err
    assert Path("train.py").read_text() == "mine"
    assert main(["export", "--force", "--recipe", "muon"]) == 0
    assert Path("train.py").read_text() == source


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--recipe moun", "Unknown recipe 'moun'. Did you mean 'muon'?"),
        ("--track pokcet", "Unknown track 'pokcet'. Did you mean 'pocket'?"),
        ("--recipe medium --track short", "Recipe 'medium' has no size for track 'short'; it has medium, pocket."),
        ("--recipe muon --track short", "single file: loader.order is 'sequential'"),
        ("--out nowhere/train.py", "There is no folder nowhere for train.py; make it first."),
        ("--out .", "--out . is a folder; name a file in it, like train.py."),
    ],
)
def test_mistakes_cost_a_sentence(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_mistakes_with_the_file_cost_a_sentence_too(
    tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = loaded(export(get_recipe("gpt2", "pocket")), tmp_path)
    bad = {name: tmp_path / name for name in ("none", "empty", "cut", "foreign", "described", "small")}
    for name in list(bad)[1:]:
        bad[name].mkdir()
        if name != "empty":
            for split in ("train", "val"):
                write_shard(bad[name] / f"{split}_000000.bin", np.full(100 if name == "small" else 300, 5))
    with open(bad["cut"] / "train_000000.bin", "r+b") as f:
        f.truncate(1200)
    write_shard(bad["foreign"] / "val_000000.bin", np.array([1, 2, 60_000]))
    (bad["described"] / "tokens.json").write_text("[")
    mistakes = {
        f"--data {bad['none']}": f"There is no folder {bad['none']}",
        f"--data {bad['empty']}": "has no shard named like train_000000.bin",
        f"--data {bad['cut']}": "is damaged: its header promises 300 tokens",
        f"--data {bad['foreign']}": "has token 60000, outside the vocabulary of 4096",
        f"--data {bad['described']}": "tokens.json is damaged",
        f"--data {bad['small']}": "is too small: a row takes 129 tokens",
        f"--data {tokens.path} --steps 0": "--steps is 0; it must be at least 1",
        f"--data {tokens.path} --seed -1": "--seed is -1; it must be at least 0",
        f"--data {tokens.path} --device tpu": "--device is tpu",
    }
    for flags, words in mistakes.items():
        with pytest.raises(SystemExit) as e:
            module.main(flags.split())
        assert e.value.code == 2
        assert words in capsys.readouterr().err
