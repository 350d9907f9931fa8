"""`medium-before`: what the medium record was timed against: Snoo, an averaged update, bf16 weights, cubic windows.

5,535 steps of 524,288 tokens. Queries, keys and values are normalised instead of attention's input; the logits are
bound by z / sqrt(z^2 + c^2); the final features of a position mix in those of the one before. Kernels were tuned by
coordinate descent, which the medium track allows (compiler.coordinate_descent).
"""

import math
from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import GPTConfig
from speedrun.recipes.normuon import BLOCK, FLOAT32_EPS
from speedrun.training import (
    CompilerConfig,
    MuonPart,
    OptimConfig,
    Part,
    Recipe,
    ScheduleConfig,
    SnooPart,
    ValidationConfig,
)

ABOUT = "the medium track's earlier stack: Snoo, update averaging, cubic windows, ISRU cap"
FORM = GPTConfig(
    norm_eps=FLOAT32_EPS, embed_norm=True, embed_std=1.0, second_embedding=True, x0_lambdas=True, residual_lambdas=1.0,
    attention_norm=False, value_norm=True, value_lambdas=True, value_std=1.0, attention_scale=0.12, rotary="half",
    rotary_base=1024.0, skip_form="plain", backout_form="mix", smear_mtp=True, softcap="isru", softcap_limit=15.0,
    init_scale=0.5 * math.sqrt(3), across_documents=True,
)  # fmt: skip
OPTIM = OptimConfig(
    lr=0.3, beta1=0.8, beta2=0.95, eps=1e-10, weight_decay=0.0, matrices="muon", weights="exact-bf16",
    head=Part(1 / 320 / 0.3), x0=Part(0.05), scalars=Part(0.05), snoo=SnooPart(k=28),
    muon=MuonPart(lr=0.03, method="newton-schulz-per-step", weight_decay=0.01, update_ema=0.2),
)  # fmt: skip


def pocket() -> Recipe:
    return Recipe(
        name="medium-before",
        track="pocket",
        about=ABOUT,
        model=replace(
            FORM, vocab=4096, layers=4, width=128, heads=4, long_layers=(0, 3), no_attention=(2,), value_tables=2,
            value_layers=((0, 0), (1, 1), (3, 0)), skips=((0, 2), (1, 3)), backout=2, rotary_base=256.0,
        ),
        loader=LoaderConfig(packing="documents", order="rows", max_document=128),
        optim=replace(OPTIM, head=Part(0.05), snoo=SnooPart(k=10)),
        schedule=ScheduleConfig(
            steps=1060, rows=16, length=128, warmup=0.0, cooldown=0.9, floor=0.01, window_cubic=128, window_block=32,
            momentum_warmup=200,
        ),
        validation=ValidationConfig(every=250, rows=64, length=128),
    )  # fmt: skip


def medium() -> Recipe:
    return Recipe(
        name="medium-before",
        track="medium",
        about=ABOUT,
        model=replace(
            FORM, vocab=50304, layers=16, width=1024, heads=8, long_layers=(0, 4, 11, 15), no_attention=(7,),
            value_tables=5, value_layers=tuple((first + table, table) for first in (0, 11) for table in range(5)),
            skips=((6, 9), (4, 10), (2, 11)), backout=11,
        ),
        loader=LoaderConfig(packing="documents", order="sequential", max_document=65536),
        optim=replace(OPTIM, muon=replace(OPTIM.muon, mlp_decay=2.0)),
        schedule=ScheduleConfig(
            steps=5535, rows=8, length=65536, warmup=0.0, cooldown=0.7, floor=0.01, window_cubic=27 * BLOCK,
            momentum_warmup=300,
        ),
        validation=ValidationConfig(every=125, rows=1, length=262144, cut_documents=False),
        compiler=CompilerConfig(coordinate_descent=True),
    )  # fmt: skip


SIZES = {"medium": medium, "pocket": pocket}
