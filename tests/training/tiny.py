"""A run that takes a second, for the tests of the loop."""

from pathlib import Path
from typing import Any

from speedrun.data.loader import LoaderConfig
from speedrun.data.shards import TokenFolder
from speedrun.model.gpt import GPTConfig
from speedrun.training.config import Options, Recipe, ValidationConfig, with_fields
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.optimizers import OptimConfig
from speedrun.training.progress import Progress
from speedrun.training.runlog import RunFolder
from speedrun.training.schedule import ScheduleConfig
from speedrun.training.step import Trainer

TINY = Recipe(
    name="tiny",
    track="own",
    about="for tests",
    model=GPTConfig(vocab_size=4096, num_layers=2, dim=32, num_heads=2),
    loader=LoaderConfig(),
    optim=OptimConfig(lr=0.01),
    schedule=ScheduleConfig(steps=12, batch_size=4, seq_len=32),
    validation=ValidationConfig(every=5, batch_size=4, seq_len=32),
)


def tiny_trainer(tokens: TokenFolder, folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A trainer in a fresh run folder, without torch.compile unless asked for."""
    recipe = with_fields(TINY, changes or {})
    run = RunFolder.create(folder, {"recipe": "tiny"}, console=lambda line: None)
    machine = choose("cpu", "float32", threads=1)
    progress = Progress(recipe.schedule.total, quiet=True)
    return Trainer(Job(recipe, tokens, machine, Options(**{"compile": False, **options}), run, progress))
