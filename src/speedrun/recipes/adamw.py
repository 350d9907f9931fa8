"""`adamw`: the tuned baseline before Muon, against which every later recipe is measured.

At pocket size it is the best AdamW run that 150 seconds on two CPU cores gave (docs/experiments.md has the search). At
short size it is the record before Muon, whose form `gpt2` describes.
"""

from dataclasses import replace

from speedrun.data.loader import LoaderConfig
from speedrun.model.gpt import GPTConfig
from speedrun.optim.adamw import AdamWConfig
from speedrun.recipes import gpt2
from speedrun.train.config import Recipe, ValidationConfig
from speedrun.train.schedule import ScheduleConfig

ABOUT = "the tuned AdamW baseline before Muon"


def pocket() -> Recipe:
    return Recipe(
        name="adamw",
        track="pocket",
        about=ABOUT,
        model=GPTConfig(vocab=4096, layers=3, width=192, heads=3, tied=True),
        loader=LoaderConfig(packing="stream", order="rows"),
        optim=AdamWConfig(lr=0.0015, embed_lr=4.0),
        schedule=ScheduleConfig(steps=2100, rows=4, length=128, warmup=0.1),
        validation=ValidationConfig(every=700, rows=64, length=128),
    )


def short() -> Recipe:
    return replace(gpt2.short(), name="adamw", about=ABOUT)


SIZES = {"pocket": pocket, "short": short}
