"""What a dry run counts without memory is what a real run of every recipe takes."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch

from speedrun.data.shards import TokenFolder
from speedrun.model.gpt import GPT
from speedrun.recipes import LINEAGE
from speedrun.training import checkpoint
from speedrun.training.config import Options
from speedrun.training.device import choose
from speedrun.training.dryrun import checkpoint_bytes, kinds_of
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.optimizers import build_optimizer
from speedrun.training.progress import Progress
from speedrun.training.runlog import RunFolder
from speedrun.training.state import save
from speedrun.training.step import Trainer
from tests.recipes.test_lineage import tiny


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor that an optimizer really holds."""
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))


@pytest.mark.parametrize("name", LINEAGE)
def test_state_weights_and_checkpoint_have_the_bytes_that_were_foretold(
    name: str, tokens: TokenFolder, tmp_path: Path
) -> None:
    recipe = tiny(name)
    with torch.device("meta"):
        model = GPT(recipe.model, recipe.context)
        if recipe.optim.weights != "float32":
            model.store_matrices(torch.bfloat16)
        optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    states = optimizer.state_bytes()  # type: ignore[attr-defined]
    roles = dict(zip(model.parameters(), model.param_roles().values(), strict=True))

    run = RunFolder.create(tmp_path / "run", {"recipe": name}, console=lambda line: None)
    progress = Progress(recipe.schedule.total, quiet=True)
    trainer = Trainer(Job(recipe, tokens, choose("cpu", "float32", 1), Options(compile=False), run, progress))
    loop, fullest = Loop(trainer), 0
    with contextlib.closing(loop.batches()) as batches:
        for step in range(recipe.schedule.total):
            trainer.step(recipe.schedule.at(step), batches.next())
            if state_of(trainer.optimizer) > fullest:
                fullest = state_of(trainer.optimizer)
                save(trainer, loop.state, step + 1)
    assert fullest == sum(states.values())
    assert sum(p.nbytes for p in roles) == sum(p.nbytes for p in trainer.model.parameters())
    kinds = kinds_of(optimizer, roles, recipe)
    assert sorted(map(id, itertools.chain(*kinds.values()))) == sorted(map(id, roles))
    saved = checkpoint.newest_good(run.checkpoints, notice=print)
    assert saved is not None
    assert sum(t.nbytes for t in saved.tensors.values()) == checkpoint_bytes(recipe, list(roles), states)


def test_each_kind_has_its_optimizer_and_its_rate() -> None:
    recipe = tiny("interleaved")
    with torch.device("meta"):
        model = GPT(recipe.model, recipe.context)
        optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    roles = dict(zip(model.parameters(), model.param_roles().values(), strict=True))
    found = {kind: (who, round(times, 6)) for kind, who, _, times in kinds_of(optimizer, roles, recipe)}
    assert found == {
        "attention": ("NorMuon", 2.0),
        "MLP up": ("NorMuon", 1.0),
        "MLP down": ("NorMuon", 4.0),
        "embed": ("Adam", 1.0),
        "head": ("Adam", 1.0),
        "values": ("Adam", 75.0),
        "gates": ("Adam", 1.0),
        "smear gate": ("Adam", 0.01),
        "skip gates": ("Adam", 0.05),
        "x0": ("Adam", 5.0),
        "scalars": ("Adam", 5.0),
    }
