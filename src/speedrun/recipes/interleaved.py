"""`interleaved`: bf16 weights that are exact underneath, an optimizer per module, ramps of batch, window and rate.

Record of January 2026: 1,800 + 40 steps, 487.6 M tokens. The matrices are stored in bfloat16 with the missing 16 bits
kept by the optimizer; on a CPU the arithmetic is float32 all the same.
"""

import math
from dataclasses import replace
from typing import Any

from speedrun.data import LoaderConfig
from speedrun.model import GPTConfig
from speedrun.recipes.normuon import BLOCK, FLOAT32_EPS
from speedrun.training import MuonPart, OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

ABOUT = "exact bf16 weights, betas and decay per module, multi-token prediction, ramps, the head split on the way"

FORM: dict[str, Any] = dict(  # noqa: C408 - the same at every size; what names layers comes with the size
    norm_eps=FLOAT32_EPS, tied=True, split=True, embed_norm=True, embed_std=0.005, rotary="half", rotary_base=1024.0,
    yarn=True, attention_scale=0.1, attention_gates=True, attention_lambdas=True, key_offset=True, value_gates=True,
    smear=True, residual_lambdas=1.1, x0_lambdas=True, skip_gates=True, softcap="sigmoid", softcap_limit=23.0,
    softcap_shift=5.0, init_scale=math.sqrt(3), mlp_init_scale=0.5 * math.sqrt(3), across_documents=True,
)  # fmt: skip
# The update of a matrix is scaled by sqrt(max(1, rows / cols)): 1 for attention, 2 for the MLP's first matrix, 1 for
# its second. The record's own layout gave them 2, 2 and 4.
MUON = MuonPart(
    lr=0.023, attention_lr=2.0, up_lr=1.0, down_lr=4.0, weight_decay=1.2, decay="cautious", decay_by="lr-squared"
)
OPTIM = OptimConfig(
    lr=0.008, eps=1e-10, eps_at="uncorrected", weight_decay=0.005, decay="cautious", decay_by="lr-squared", every=2,
    matrices="normuon", weights="exact-bf16", muon=MUON,
    embed=Part(1.0, 0.5, 0.95, 150.0), head=Part(1.0, 0.5, 0.95, 150.0), values=Part(75.0, 0.75, 0.95, 5.0),
    gates=Part(1.0, 0.9, 0.99, 1.0), smear_gate=Part(0.01, 0.9, 0.99), skip_gates=Part(0.05, 0.9, 0.99),
    x0=Part(5.0, 0.65, 0.95), scalars=Part(5.0, 0.9, 0.99),
)  # fmt: skip


def pocket() -> Recipe:
    """Four layers keep a place for everything: layer 2 has no attention, the outer ones have the long window."""
    return Recipe(
        name="interleaved",
        track="pocket",
        about=ABOUT,
        model=GPTConfig(
            **FORM | {"rotary_base": 256.0, "embed_std": 0.02}, vocab=4096, layers=4, width=128, heads=4,
            long_layers=(0, 3), no_attention=(2,), value_tables=2, value_layers=((0, 0), (1, 1), (3, 0)),
            skips=((0, 2),), backout=2,
        ),
        loader=LoaderConfig(packing="documents", order="rows", max_document=128),
        optim=replace(OPTIM, lr=0.016),
        schedule=ScheduleConfig(
            steps=625, extension=40, length=128, warmup=0.0, cooldown=0.5, floor=0.1, batch_ramp=(8, 16, 24),
            lr_ramp=(1.0, 1.52, 1.73), window_ramp=(32, 64, 96), window_extension=112, window_final=128,
            window_block=16, momentum_warmup=200, momentum_cooldown=50, predict=3, split=2 / 3,
        ),
        validation=ValidationConfig(every=250, rows=64, length=128),
    )  # fmt: skip


def short() -> Recipe:
    return Recipe(
        name="interleaved",
        track="short",
        about=ABOUT,
        model=GPTConfig(
            **FORM, vocab=50304, layers=11, width=768, heads=6, long_layers=(3, 10), no_attention=(6,), value_tables=3,
            value_layers=((0, 1), (1, 2), (8, 0), (9, 1), (10, 2)), skips=((3, 6),), backout=7, fp8_head=True,
        ),
        loader=LoaderConfig(packing="documents", order="sequential", max_document=2048, tail="discard"),
        optim=replace(OPTIM, reference_ranks=8),
        schedule=ScheduleConfig(
            steps=1800, extension=40, length=16384, warmup=0.0, cooldown=0.5, floor=0.1, batch_ramp=(8, 16, 24),
            lr_ramp=(1.0, 1.52, 1.73), window_ramp=(3 * BLOCK, 7 * BLOCK, 11 * BLOCK), window_extension=13 * BLOCK,
            window_final=20 * BLOCK, momentum_warmup=300, momentum_cooldown=50, predict=3, split=2 / 3,
        ),
        validation=ValidationConfig(every=250, rows=1, length=262144, cut_documents=False),
    )  # fmt: skip


SIZES = {"pocket": pocket, "short": short}
