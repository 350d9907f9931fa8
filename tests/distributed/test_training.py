"""Whole runs in several processes: the losses of one, weights of equal bits, one run folder, any number resumes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.data.shards import TokenFolder
from speedrun.optim.sharded import Comm
from speedrun.training import loop
from speedrun.training.config import Options, with_fields
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder
from speedrun.training.step import Trainer
from speedrun.training.validate import validate
from tests.distributed.ranks import together
from tests.recipes.test_lineage import tiny

STEPS = 20


def train(
    rank: int, size: int, name: str, tokens: str, changes: dict[str, Any]
) -> tuple[list[float], list[int], float]:
    """Losses of all steps, a hash of the weights after each, and the validation loss."""
    recipe = with_fields(tiny(name), changes)
    comm = Comm.of(None) if size > 1 else Comm()
    progress = Progress(recipe.schedule.total, quiet=True)
    folder = Path(tokens)
    data, machine, options = TokenFolder.read(folder), choose("cpu", "float32", 1), Options(compile=False)
    trainer = Trainer(Job(recipe, data, machine, options, NullRunFolder(folder), progress, comm))
    batches = Loop(trainer).batches()
    losses, hashes = [], []
    for step in range(STEPS):
        losses.append(trainer.step(recipe.schedule.at(step), batches.next()))
        hashes.append(hash(tuple(float(p.detach().double().sum()) for p in trainer.model.parameters())))
    batches.close()
    return losses, hashes, validate(trainer, "val", STEPS)


def alone(name: str, tokens: TokenFolder, changes: dict[str, Any]) -> tuple[list[float], list[int], float]:
    return train(0, 1, name, str(tokens.path), changes)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_losses_are_those_of_one_process(size: int, tokens: TokenFolder, tmp_path: Path) -> None:
    """In float32 within 1e-4. With one to three rows in a batch, most of eight ranks have none to train on."""
    changes = {"optim.weights": "float32"}
    expected, _, validation = alone("interleaved", tokens, changes)
    found = together(tmp_path, size, train, "interleaved", str(tokens.path), changes)
    for losses, hashes, loss in found:
        assert losses == pytest.approx(expected, rel=1e-4)
        assert loss == pytest.approx(validation, rel=1e-4)
        assert hashes == found[0][1], "the weights of all ranks, after every step"


def test_gradients_are_clipped_by_the_norm_over_all_ranks(tokens: TokenFolder, tmp_path: Path) -> None:
    changes = {"optim.weights": "float32", "optim.clip": 0.3}
    expected, _, validation = alone("interleaved", tokens, changes)
    assert expected != pytest.approx(alone("interleaved", tokens, {"optim.weights": "float32"})[0], rel=1e-3)
    for losses, _, loss in together(tmp_path, 3, train, "interleaved", str(tokens.path), changes):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert loss == pytest.approx(validation, rel=1e-4)


def test_snoo_averaging_and_exact_weights_together(tokens: TokenFolder, tmp_path: Path) -> None:
    """The gradients of bf16 weights are bf16, and so are their sums: losses agree to a hundredth, not to 1e-4."""
    changes = {"optim.snoo.k": 4, "optim.muon.update_ema": 0.2, "optim.weights": "exact-bf16"}
    expected, _, _ = alone("medium", tokens, changes)
    for size in (2, 3):
        found = together(tmp_path, size, train, "medium", str(tokens.path), changes)
        assert found[0][0] == pytest.approx(expected, rel=1e-2)
        assert found[0][1] == found[-1][1]


def speedrun(*args: str, processes: int = 1, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "speedrun", "train", *args, "--nproc", str(processes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240)


FLAGS = (
    "--recipe", "adamw", "--compile", "False", "--threads", "1", "--schedule.steps", "12", "--schedule.batch-size", "5",
    "--schedule.seq-len", "16", "--validation.seq-len", "16", "--validation.batch-size", "4", "--validation.every", "6",
    "--model.dim", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--sample", "False", "--keep", "9",
)  # fmt: skip


def metrics(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [m["loss"] for m in lines if m["kind"] in ("train", "val")]


def test_one_command_trains_in_two_processes_and_resumes_with_any_number(tokens: TokenFolder, tmp_path: Path) -> None:
    data = ("--data", str(tokens.path))
    done = speedrun(*FLAGS, *data, "--out", "first", processes=2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("run folder") == 1, "only rank 0 speaks"
    whole = metrics(tmp_path / "first")
    for processes, tolerance in ((2, 0.0), (1, 1e-4), (3, 1e-4)):
        again = tmp_path / f"resumed-{processes}"
        shutil.copytree(tmp_path / "first", again)
        (again / "result.json").unlink()
        shutil.rmtree(again / "checkpoints" / "step-000012")
        resumed = speedrun("--resume", again.name, "--sample", "False", processes=processes, cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert metrics(again) == pytest.approx(whole, rel=tolerance, abs=0), "two ranks: the same bits"


def test_a_mistake_is_told_once_by_all_ranks(tokens: TokenFolder, tmp_path: Path) -> None:
    data = ("--data", str(tokens.path))
    done = speedrun(*FLAGS, *data, "--order", "sideways", processes=2, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("speedrun: ")]
    assert len(told) == 1
    assert "--order is 'sideways'" in told[0]
    assert not (tmp_path / "runs").exists()
    assert speedrun(*FLAGS, *data, processes=0, cwd=tmp_path).returncode == 2


def differing(rank: int, size: int) -> str:
    from speedrun.errors import UserError
    from speedrun.training.distributed import handshake

    try:
        handshake(Comm.of(None), {"recipe": {"lr": 0.1 if rank == 2 else 0.2}, "torch": torch.__version__})
    except UserError as e:
        return str(e)
    return "nothing was said"


def test_ranks_that_differ_are_found_before_the_first_step(tmp_path: Path) -> None:
    for said in together(tmp_path, 3, differing):
        assert said.startswith("Rank 2 differs from rank 0 in recipe: {'lr': 0.1} instead of {'lr': 0.2}.")


def stopped_late(rank: int, size: int, tokens: str, folder: str) -> tuple[str, str | None, int]:
    """A run whose rank 1 is asked to stop while step 3 trains the weights, when the ranks have spoken already."""
    recipe = tiny("adamw")
    progress = Progress(recipe.schedule.total, quiet=True)
    data, place = TokenFolder.read(Path(tokens)), NullRunFolder(Path(folder))
    options = Options(compile=False)
    trainer = Trainer(Job(recipe, data, choose("cpu", "float32", 1), options, place, progress, Comm.of(None)))
    loop.warm_up = lambda trainer: None  # type: ignore[attr-defined]
    step, steps = trainer.optimizer.step, []

    def slow(*_: Any) -> None:
        step()
        steps.append(1)
        if rank == 1 and len(steps) == 4:
            trainer.asked_to_stop = 15

    trainer.optimizer.step = slow  # type: ignore[method-assign, assignment]
    result = Loop(trainer).run()
    return result.status, result.reason, len(steps)


def test_a_signal_in_the_middle_of_a_step_stops_all_ranks_after_the_same_one(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    """Acted upon by one rank at once, the others would go on and wait for it in the next step."""
    found = together(tmp_path, 2, stopped_late, str(tokens.path), str(tmp_path / "run"))
    assert found == [("interrupted", "signal 15", 5)] * 2
    assert (tmp_path / "run" / "checkpoints" / "step-000005").is_dir()
