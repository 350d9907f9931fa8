"""The examples: minimal.py is the package's loop without all that surrounds it, so each has the losses of the other.

The rest show the optimizers in other trainers, where they must learn, and go on from a checkpoint as if uninterrupted.
"""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.minimal import train

from speedrun.data.shards import TokenFolder
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.training.config import Options, Recipe, with_fields
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.progress import Progress
from speedrun.training.runlog import RunFolder, read_metrics
from speedrun.training.step import Trainer
from tests.conftest import make_token_folder

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "minimal.py"
SEED = 3
AS_WIDE_AS_THEY_ARE = ("muon", "normuon")
# What no recipe of the lineage has, but the loop obeys.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped gradients": ("muon", {"optim.clip": 0.1}),
    "other rows in validation": ("adamw", {"validation.first": False, "validation.seq_len": 64}),
}


def short(name: str) -> Recipe:
    """The pocket recipe with everything that its schedule does in a few steps of a few rows."""
    base, changes = VARIANTS.get(name, (name, {}))
    recipe = get_recipe(base, "pocket")
    s = recipe.schedule
    few: dict[str, Any] = {
        "schedule.steps": 7,
        "schedule.extra_steps": min(2, s.extra_steps),
        "schedule.batch_size": 2,
        "schedule.batch_ramp": s.batch_ramp and (1, 2, 3),
        "schedule.momentum_warmup": min(3, s.momentum_warmup),
        "schedule.momentum_cooldown": min(3, s.momentum_cooldown),
        "optim.snoo.k": recipe.optim.snoo.k and 3,
        "validation.every": 4,
        "validation.batch_size": 3,
    }
    if s.window_ramp:  # a window beyond the 97 tokens of a document would change nothing
        few |= {"schedule.window_ramp": (16, 32, 48), "schedule.window_extra": 64, "schedule.window_final": 96}
    if s.window_cubic:
        few |= {"schedule.window_cubic": 64, "schedule.window_block": 16}
    if name not in AS_WIDE_AS_THEY_ARE:
        few |= {"model.dim": 32, "model.num_heads": 2}
    return with_fields(recipe, few | changes)


def test_everything_happens_in_the_few_steps() -> None:
    s = short("normuon").schedule
    stages = [s.at(step) for step in range(s.total)]
    momentum = [stage.momentum or 0.0 for stage in stages]
    assert momentum[0] < momentum[3] > momentum[-1]
    assert [w.long for w in dict.fromkeys(stage.windows for stage in stages) if w] == [16, 32, 48, 64]
    final = s.after(s.total).windows
    assert final is not None
    assert final.long == 96
    s = short("interleaved").schedule
    stages = [s.at(step) for step in range(s.total)]
    assert {len(stage.mtp_weights) for stage in stages} == {1, 2, 3}
    assert {stage.batch_size for stage in stages} == {1, 2, 3}
    assert any(stage.untie for stage in stages[:-1])


@pytest.mark.parametrize("name", [*LINEAGE, *VARIANTS])
def test_the_package_has_the_losses_and_weights_of_the_example_bit_for_bit(
    name: str, tokens: TokenFolder, tmp_path: Path
) -> None:
    recipe, machine = short(name), choose("cpu", "float32", threads=1)
    model, train_losses, val_losses = train(recipe, tokens, machine, SEED)
    assert len(train_losses) == recipe.schedule.total
    assert list(val_losses) == recipe.validation.moments(recipe.schedule.total)
    assert train_losses[-1] < train_losses[0], "it learns"

    folder = RunFolder.create(tmp_path / "run", {"recipe": name}, console=lambda line: None)
    options = Options(seed=SEED, compile=False, save=False)
    trainer = Trainer(Job(recipe, tokens, machine, options, folder, Progress(recipe.schedule.total, quiet=True)))
    assert Loop(trainer).run().status == "ok"
    assert [m["loss"] for m in read_metrics(folder.path, "train")] == train_losses
    assert {m["step"]: m["loss"] for m in read_metrics(folder.path, "val")} == val_losses
    weights, expected = dict(model.named_parameters()), dict(trainer.model.named_parameters())
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def test_it_runs_as_a_user_runs_it(tmp_path: Path) -> None:
    """In a process where the small tokens are those of the pocket track."""
    files = {n: f.sha256 for n, f in make_token_folder(tmp_path / "home" / "pocket").files.items()}
    (tmp_path / "sitecustomize.py").write_text(f"from speedrun.data import pocket\npocket.POCKET_FILES = {files}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "examples/minimal.py", "--recipe", "muon", "--steps", "2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "SPEEDRUN_HOME": str(tmp_path / "home"), "OMP_THREAD_LIMIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    loss = r"(\d\.\d{4})"
    assert re.fullmatch(
        rf"step 0/2  validation loss {loss}\nstep 0/2  train loss {loss}\nstep 2/2  validation loss {loss}\n"
        rf"final validation loss \3, target 4.31: reached\n",
        done.stdout,
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--recipe", "normoun"], "Unknown recipe 'normoun'. Did you mean 'normuon'?"),
        (["--steps", "0"], "--steps is 0; this schedule needs at least 2."),
        ([], "pocket data is not prepared; run `speedrun data prepare`"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    args: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), *args])
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(FILE), run_name="__main__")
    assert exit.value.code == 2
    assert capsys.readouterr() == ("", f"minimal.py: {said}\n")


# ------------------------------------------------------------------------- the optimizers in people's own trainers


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install -e '.[dev]'")


def losses_in(said: str) -> dict[str, float]:
    """Those that an example prints, by what it says before the word."""
    return {when.strip(): float(loss) for when, loss in re.findall(r"^(.*?) +loss ([\d.]+)$", said, re.MULTILINE)}


def output(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_torchrun(folder: Path, name: str, *args: str) -> dict[str, float]:
    file = str(ROOT / "examples" / name)
    return losses_in(output(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", file, *args))


def runs_of(folder: Path, name: str, *runs: list[str]) -> list[dict[str, float]]:
    """Several runs of an example, one after the other in one process: importing takes longer than they do."""
    file = str(ROOT / "examples" / name)
    program = f"""
import runpy, sys
for args in {list(runs)}:
    sys.argv = [{file!r}, *args]
    runpy.run_path({file!r}, run_name="__main__")
    print("end of a run")
"""
    return [losses_in(said) for said in output(folder, "-c", program).split("end of a run")[:-1]]


def last(found: dict[str, float], count: int) -> dict[str, float]:
    return dict(list(found.items())[-count:])


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    runs = [["--steps=20"], ["--steps=40"], ["--steps=40", "--checkpoint=other.pt"]]
    _, resumed, whole = runs_of(tmp_path, "loop.py", *runs)
    assert list(resumed) == ["step 30", "step 40"]
    assert resumed == last(whole, 2)
    assert whole["step 40"] < 1.0


@needs("transformers", "accelerate")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    whole, resumed = runs_of(tmp_path, "with_trainer.py", [], ["--folder=again", "--resume=run/checkpoint-20"])
    assert list(whole) == ["step 10", "step 20", "step 30", "step 40"]
    assert whole["step 40"] < 0.75 * whole["step 10"]
    assert resumed == whole  # the first two come from the checkpoint


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    (found,) = runs_of(tmp_path, "with_accelerate.py", [])
    assert found["after two epochs"] < 0.5 * found["after one epoch"]
    assert found["the second, again"] == found["after two epochs"]


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    whole, resumed = runs_of(tmp_path, "with_lightning.py", [], ["--folder=again", "--resume=run/epoch=1.ckpt"])
    assert whole["epoch 4"] < 1.0
    assert list(resumed) == ["epoch 3", "epoch 4"]
    assert resumed == last(whole, 2)


def test_the_interleaved_step_under_torchrun(tmp_path: Path) -> None:
    whole = under_torchrun(tmp_path, "with_interleaved.py")
    assert list(whole) == [f"step {step}" for step in range(1, 11)]
    assert whole["step 10"] < 0.75 * whole["step 1"]
    assert under_torchrun(tmp_path, "with_interleaved.py", "--resume") == last(whole, 5)


def test_fsdp2_with_torch_distributed_checkpoint(tmp_path: Path) -> None:
    whole = under_torchrun(tmp_path, "with_fsdp2.py")
    assert list(whole) == [f"step {step}" for step in range(1, 11)]
    assert whole["step 10"] < 0.75 * whole["step 1"]
    assert under_torchrun(tmp_path, "with_fsdp2.py", "--resume") == last(whole, 5)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.stem)
def test_examples_stay_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= (250 if file == FILE else 64)


# ------------------------------------------------------------------------- own text


def test_own_text_is_encoded_trained_on_and_continued(tmp_path: Path) -> None:
    pages = [str(page) for page in sorted((ROOT / "docs").glob("*.md"))]
    said = output(tmp_path, str(ROOT / "examples" / "own_text.py"), *pages, "--steps", "3")
    loss = re.search(r"^3 steps  validation loss (\d\.\d{4})\nThe", said, re.MULTILINE)
    assert loss is not None
    assert 4 < float(loss[1]) < 8.5
    assert TokenFolder.read(tmp_path / "my-text" / "tokens").files.keys() == {"train_000000.bin", "val_000000.bin"}
    assert read_metrics(tmp_path / "my-text" / "run", "val")[-1]["loss"] == pytest.approx(float(loss[1]), abs=1e-4)


def test_own_text_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_text.py"), "missing.txt"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "own_text.py: There is no file or folder missing.txt; check the name.\n"
