"""One training step can be read: from `Trainer.step` to the last update function in four files and eight frames."""

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

import speedrun
from speedrun.recipes import get_recipe
from speedrun.training.config import Options
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder
from speedrun.training.step import Trainer
from speedrun.training.warmup import made_up

PACKAGE = str(Path(speedrun.__file__).parent) + "/"
UPDATES = "optim/functional.py"
Chain = tuple[tuple[str, str], ...]


def chain_of(frame: FrameType | None) -> Chain:
    """The package's own frames from `Trainer.step` on, as (file, function); empty outside of it."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        name, file = frame.f_code.co_qualname, frame.f_code.co_filename
        if file.startswith(PACKAGE):
            found.append((file.removeprefix(PACKAGE), name))
        if name == "Trainer.step":
            return tuple(reversed(found))
        frame = frame.f_back
    return ()


def test_the_way_to_every_update_has_four_files_and_eight_frames(tmp_path: Path) -> None:
    recipe, machine = get_recipe("normuon", "pocket"), choose("cpu", "float32", threads=1)
    tokens: Any = SimpleNamespace(vocab_size=recipe.model.vocab_size)
    progress = Progress(recipe.schedule.total, quiet=True)
    job = Job(recipe, tokens, machine, Options(compile=False), NullRunFolder(tmp_path), progress)
    trainer = Trainer(job)
    updates: set[Chain] = set()
    models: set[Chain] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == PACKAGE + UPDATES:
            updates.add(chain_of(frame))
        elif event == "call" and frame.f_code.co_qualname == "GPT.forward":
            models.add(chain_of(frame))

    for step in range(recipe.optim.every):  # Adam steps in the last one
        stage = recipe.schedule.at(step)
        batch = made_up(job, stage.batch_size, stage.seq_len, torch.Generator().manual_seed(0))
        sys.setprofile(watch)
        try:
            trainer.step(stage, batch)
        finally:
            sys.setprofile(None)
    called = {chain[-1][1] for chain in updates}
    assert called == {"ema_momentum_", "nesterov", "normuon_scale_", "apply_update_"}
    assert max(map(len, updates)) == 8
    assert {file for chain in updates for file, _ in chain} == {
        "training/step.py", "optim/base.py", "optim/muon.py", UPDATES,
    }  # fmt: skip
    assert [[name for _, name in chain] for chain in models] == [
        ["Trainer.step", "Trainer.gradients", "Trainer.accumulate", "Trainer.micro_loss", "GPT.forward"]
    ]
