"""`adamw`: the tuned baseline before Muon, against which every later recipe is measured.

At pocket size it is the best AdamW run that 150 seconds on two CPU cores gave (docs/experiments.md has the search). At
short size it is the record before Muon, whose form `gpt2` describes.
"""

from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import AttentionConfig, GPTConfig, HeadConfig
from speedrun.recipes import gpt2
from speedrun.training import OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

ABOUT = "the tuned AdamW baseline before Muon"


def pocket() -> Recipe:
    return Recipe(
        name="adamw",
        track="pocket",
        about=ABOUT,
        model=GPTConfig(
            vocab_size=4096, num_layers=3, dim=128, num_heads=4, attention=AttentionConfig(rotary_base=500.0),
            head=HeadConfig(tied=True),
        ),
        loader=LoaderConfig(packing="stream", shuffle="sequences"),
        optim=OptimConfig(lr=0.001, beta1=0.8, beta2=0.99, weight_decay=1.0, embed=Part(lr=4.0)),
        schedule=ScheduleConfig(steps=2700, batch_size=8, seq_len=128, warmup=0.1),
        validation=ValidationConfig(every=900, batch_size=64, seq_len=128),
    )  # fmt: skip


def short() -> Recipe:
    return replace(gpt2.short(), name="adamw", about=ABOUT)


SIZES = {"pocket": pocket, "short": short}
