"""A recipe as one file: it trains to the same bits as the package, and is a file that people like to read."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.cli import main
from speedrun.data.shards import TokenFolder
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.report.export import TEMPLATE, Fields, chosen, export, switches, tidy
from speedrun.train.config import Recipe, with_fields
from speedrun.train.device import choose
from speedrun.train.loop import Options, Trainer
from speedrun.train.progress import Report
from speedrun.train.runlog import RunFolder, read_metrics
from tests.recipes.test_lineage import tiny

STEPS = 14
LINE = re.compile(r"step:(\d+)/(\d+) (train|val)_loss:(\S+) train_time:\d+ms step_avg:(?:[\d.]+|nan)ms")
OUTSIDE = {"numpy", "torch"} | sys.stdlib_module_names


def short(name: str) -> Recipe:
    """The tiny recipe in so few steps that every one of its stages still comes: ramps, the extension, the split."""
    recipe = tiny(name)
    changes: dict[str, Any] = {
        "schedule.steps": STEPS - recipe.schedule.extension,
        "validation.every": 5,
        "validation.first": True,
    }
    return with_fields(recipe, changes)


Losses = list[tuple[str, int, float]]


def by_the_package(recipe: Recipe, tokens: TokenFolder, folder: Path, seed: int, compile: bool = False) -> Losses:
    run = RunFolder.create(folder, {"recipe": recipe.name}, console=lambda line: None)
    options = Options(seed=seed, compile=compile, final_checkpoint=False)
    report = Report(recipe.schedule.total, quiet=True)
    trainer = Trainer(recipe, tokens, choose("cpu", "float32", 1), options, run, report)
    assert trainer.run()["status"] == "ok"
    found = [m for m in read_metrics(folder) if m["kind"] in ("train", "val")]
    return [(m["kind"], m["step"] + (m["kind"] == "train"), m["loss"]) for m in found]


def by_the_file(
    source: str, tokens: TokenFolder, folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> Losses:
    """The losses it prints. In this process, since importing torch takes longer than all the steps."""
    path = folder / "train.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("exported_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    capsys.readouterr()
    flags = ["--data", str(tokens.path), "--exact", "--threads", "1", "--device", "cpu", "--dtype", "float32"]
    module.main([*flags, *more])
    return [(kind, int(done), float(loss)) for done, _, kind, loss in LINE.findall(capsys.readouterr().out)]


@pytest.mark.parametrize("name", LINEAGE)
def test_the_losses_are_those_of_the_package_bit_for_bit(
    name: str, tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = short(name)
    expected = by_the_package(recipe, tokens, tmp_path / "run", seed=3)
    found = by_the_file(export(recipe), tokens, tmp_path, capsys, "--seed", "3", "--compile", "False")
    assert [kind for kind, _, _ in found].count("train") == STEPS
    assert [done for kind, done, _ in found if kind == "val"] == [0, 5, 10, STEPS]
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAGE)
def test_compiled_they_are_too(
    name: str, tokens: TokenFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = short(name)
    expected = by_the_package(recipe, tokens, tmp_path / "run", seed=0, compile=True)
    torch.compiler.reset()
    found = by_the_file(export(recipe), tokens, tmp_path, capsys)
    assert "torch.compile failed" not in capsys.readouterr().out
    assert found == expected
