"""speedrun as a library: train, load, race, and the same sentences as the commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import speedrun
from speedrun.data.shards import TokenFolder
from speedrun.experiments.verification import examine
from speedrun.training.config import with_fields
from speedrun.training.runlog import read_metrics
from tests.experiments.conftest import here as here
from tests.training.tiny import TINY

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
QUICK: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False, "progress": False}


@pytest.fixture(scope="module")
def trained(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> speedrun.Run:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    changes = {"optim.lr": 0.02, "validation": {"every": 2}}
    return speedrun.train(TINY, data=tokens.path, steps=5, seed=3, out=out, target=9.0, **QUICK, **changes)


def test_a_run_is_trained_and_described(trained: speedrun.Run) -> None:
    assert trained.result.status == "ok"
    assert trained.result.steps == trained.recipe.schedule.total == 5
    assert (trained.recipe.optim.lr, trained.recipe.validation.every) == (0.02, 2)
    assert trained.info.seed == 3
    assert trained.reached


def test_metrics_are_arrays(trained: speedrun.Run) -> None:
    train, val = trained.metrics["train"], trained.metrics["val"]
    assert train["step"].tolist() == [0, 1, 2, 3, 4]
    assert val["step"].tolist() == [0, 2, 4, 5]
    assert train["loss"].dtype == np.float64
    assert train["loss"].tolist() == [m["loss"] for m in read_metrics(trained.path, "train")]


def test_a_folder_is_loaded(trained: speedrun.Run) -> None:
    run = speedrun.load(str(trained.path))
    assert run.recipe == trained.recipe
    assert repr(run) == f"Run({str(trained.path)!r})"
    text = run.generate("Once", tokens=5, seed=1)
    assert text.startswith("Once")
    assert text == trained.generate("Once", tokens=5, seed=1)
    assert sum(p.numel() for p in run.model.parameters()) > 0


def test_the_loss_of_a_text_is_that_of_its_tokens(trained: speedrun.Run) -> None:
    model, tokenizer = trained.model, trained.tokenizer
    text = "the first of the last and the last of the first " * 5
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    assert len(ids) > model.context + 1
    losses = []
    with torch.no_grad():
        for i, target in enumerate(ids[1:]):
            seen = torch.tensor([ids[i // model.context * model.context : i + 1]])
            losses.append(-float(model.logits(seen)[0].log_softmax(-1)[target]))
    assert trained.loss(text) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "adamm"}, "Unknown recipe 'adamm'. Did you mean 'adamw'?"),
        ({"track": "poket"}, "Unknown track 'poket'. Did you mean 'pocket'?"),
        ({"optim.lrr": 1}, "'optim.lrr' is neither an option of a run nor a field of recipe 'tiny'. Did you mean"),
        ({"kep": 1}, "'kep' is neither an option of a run nor a field of recipe 'tiny'. Did you mean 'keep'?"),
        ({"optim": {"lr": -1.0}}, "optim.lr is -1.0; it must be at least 0."),
        ({"seed": -1}, "--seed is -1; it must be at least 0."),
        ({"keep": 0}, "--keep is 0; it must be at least 1."),
        ({"target": 3.0, "data": None}, "--target 3.0 goes with --data; the target of track 'pocket' is fixed."),
        ({"device": "tpu"}, "Unknown device 'tpu'; choose auto, cpu, cuda, cuda:N or mps"),
        ({"curve": "normuon"}, "the run is on track 'own'; pass --curve none."),
        ({"data": "nowhere"}, "nowhere is not a token folder"),
    ],
    ids=str,
)
def test_a_mistake_raises_one_sentence(
    arguments: dict[str, Any], sentence: str, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"recipe": None if "track" in arguments else TINY, "data": tokens.path, **QUICK, **arguments}
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        speedrun.train(**given)
    assert isinstance(error.value, speedrun.UserError)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_named(trained: speedrun.Run, tmp_path: Path) -> None:
    with pytest.raises(speedrun.UserError, match="There is no run folder"):
        speedrun.load(tmp_path / "none")
    with pytest.raises(speedrun.UserError, match="is no run folder"):
        speedrun.load(tmp_path)
    with pytest.raises(speedrun.UserError, match="The text is empty"):
        trained.loss("")
    with pytest.raises(AttributeError, match="module 'speedrun' has no attribute 'trian'"):
        _ = speedrun.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "adamm"}, "Unknown recipe 'adamm'. Did you mean 'adamw'?"),
        ({"recipe": "none.json"}, "none.json is missing. Name the file of a stored recipe, or one that"),
        ({"runs": 1}, "--runs is 1; it must be at least 2."),
        ({"seeed": 1}, "'seeed' is not an option of a race. Did you mean 'seed'?"),
        ({"dtype": "float16"}, "float16"),
        ({"data": None}, "--target 9.0 goes with --data; the target of track 'pocket' is fixed."),
        ({"against": "adamw", "runs": 5}, "--runs is 5; an ABBA block has two runs a side, so choose 4 or 6."),
    ],
    ids=str,
)
def test_a_mistake_in_a_race_raises_one_sentence(
    arguments: dict[str, Any], sentence: str, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"recipe": TINY, "data": tokens.path, "target": 9.0, "dtype": "float32", "progress": False, **arguments}
    with pytest.raises(speedrun.UserError, match=re.escape(sentence)):
        speedrun.race(**given)
    assert list(tmp_path.iterdir()) == []


def test_a_race_of_recipes_that_only_the_program_has(
    tokens: TokenFolder, tmp_path: Path, here: None, capfd: pytest.CaptureFixture[str]
) -> None:
    other = with_fields(TINY, {"optim.lr": 0.02})
    options: dict[str, Any] = {"data": tokens.path, "target": 9.0, "out": tmp_path / "race", "progress": False}
    verdict = speedrun.race(TINY, other, runs=4, dtype="float32", threads=1, compile=False, **options)
    assert isinstance(verdict, speedrun.Verdict)
    assert verdict.sides["A"].valid
    assert verdict.sides["B"].loss != verdict.sides["A"].loss
    assert [run.side for run in verdict.runs] == list("ABBAABBA")
    assert json.loads((tmp_path / "race/verdict.json").read_text())["why"] == verdict.why
    assert examine(tmp_path / "race").problems == []


def test_importing_speedrun_loads_no_torch() -> None:
    script = "import sys, speedrun; assert not sys.modules.keys() & {'torch', 'numpy', 'rich', 'tyro'}; speedrun.train"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_page_runs_as_printed(
    tokens: TokenFolder, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-tokens").symlink_to(tokens.path)
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)
    assert programs
    assert "Once upon" in capsys.readouterr().out
