"""`gpt2`: the plain GPT-2 form with AdamW, as it stood before Muon.

Tied table, GELU, rotary positions without QK norm, attention branch scaled by 1 / sqrt(2 * layers), default uniform
initialisation. At short size: 123.53 M parameters, 9,536 steps of 512 rows of 1,024 tokens, 5.0 B tokens.
"""

from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import GPTConfig
from speedrun.training import OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

FORM = GPTConfig(
    activation="gelu",
    qk_norm=False,
    tied=True,
    embed_std=0.0,
    zero_init=False,
    attention_residual="depth",
)
ABOUT = "the plain GPT-2 form with AdamW, as it stood before Muon"


def pocket() -> Recipe:
    return Recipe(
        name="gpt2",
        track="pocket",
        about=ABOUT,
        model=replace(FORM, vocab=4096, layers=3, width=192, heads=3),
        loader=LoaderConfig(packing="stream", order="rows"),
        optim=OptimConfig(lr=3e-3, weight_decay=0.1, embed=Part(decay=1.0)),
        schedule=ScheduleConfig(steps=1200, rows=8, length=128, warmup=256 / 9536, cooldown=2048 / 9536),
        validation=ValidationConfig(every=200, rows=64, length=128),
    )


def short() -> Recipe:
    return Recipe(
        name="gpt2",
        track="short",
        about=ABOUT,
        model=replace(FORM, vocab=50257, layers=12, width=768, heads=12),
        loader=LoaderConfig(packing="stream", order="sequential"),
        optim=OptimConfig(lr=0.0018, weight_decay=0.1, embed=Part(decay=1.0)),
        schedule=ScheduleConfig(steps=9536, rows=512, length=1024, warmup=256 / 9536, cooldown=2048 / 9536),
        validation=ValidationConfig(every=128, rows=16, length=1024),
    )


SIZES = {"pocket": pocket, "short": short}
