"""`gpt2`: the plain GPT-2 form with AdamW, as it stood before Muon.

Tied table, GELU, rotary positions without QK norm, attention branch scaled by 1 / sqrt(2 * layers), default uniform
initialisation. At short size: 123.53 M parameters, 9,536 steps of 512 rows of 1,024 tokens, 5.0 B tokens.
"""

from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import AttentionConfig, EmbeddingConfig, GPTConfig, HeadConfig, InitConfig
from speedrun.training import OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

FORM = GPTConfig(
    activation="gelu",
    attention=AttentionConfig(qk_norm=False, residual_scale="depth"),
    embeddings=EmbeddingConfig(std=None),
    head=HeadConfig(tied=True),
    init=InitConfig(zero_init=False),
)
ABOUT = "the plain GPT-2 form with AdamW, as it stood before Muon"


def pocket() -> Recipe:
    return Recipe(
        name="gpt2",
        track="pocket",
        about=ABOUT,
        model=replace(FORM, vocab_size=4096, num_layers=3, dim=192, num_heads=3),
        loader=LoaderConfig(packing="stream", shuffle="sequences"),
        optim=OptimConfig(lr=3e-3, weight_decay=0.1, embed=Part(decay=1.0)),
        schedule=ScheduleConfig(steps=1200, batch_size=8, seq_len=128, warmup=256 / 9536, cooldown=2048 / 9536),
        validation=ValidationConfig(every=200, batch_size=64, seq_len=128),
    )


def short() -> Recipe:
    return Recipe(
        name="gpt2",
        track="short",
        about=ABOUT,
        model=replace(FORM, vocab_size=50257, num_layers=12, dim=768, num_heads=12),
        loader=LoaderConfig(packing="stream", shuffle=None),
        optim=OptimConfig(lr=0.0018, weight_decay=0.1, embed=Part(decay=1.0)),
        schedule=ScheduleConfig(steps=9536, batch_size=512, seq_len=1024, warmup=256 / 9536, cooldown=2048 / 9536),
        validation=ValidationConfig(every=128, batch_size=16, seq_len=1024),
    )


SIZES = {"pocket": pocket, "short": short}
