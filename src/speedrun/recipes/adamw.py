"""`adamw`: the tuned baseline before Muon, against which every later recipe is measured.

At pocket size it is the best AdamW run that 150 seconds on two CPU cores gave (docs/experiments.md has the search). At
short size it is the record before Muon, whose form `gpt2` describes.
"""

from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import GPTConfig
from speedrun.recipes import gpt2
from speedrun.training import OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

ABOUT = "the tuned AdamW baseline before Muon"


def pocket() -> Recipe:
    return Recipe(
        name="adamw",
        track="pocket",
        about=ABOUT,
        model=GPTConfig(vocab=4096, layers=3, width=128, heads=4, tied=True, rotary_base=500.0),
        loader=LoaderConfig(packing="stream", order="rows"),
        optim=OptimConfig(lr=0.001, beta1=0.8, beta2=0.99, weight_decay=1.0, embed=Part(lr=4.0)),
        schedule=ScheduleConfig(steps=2700, rows=8, length=128, warmup=0.1),
        validation=ValidationConfig(every=900, rows=64, length=128),
    )


def short() -> Recipe:
    return replace(gpt2.short(), name="adamw", about=ABOUT)


SIZES = {"pocket": pocket, "short": short}
