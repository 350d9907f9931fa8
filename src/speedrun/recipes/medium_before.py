"""`medium-before`: what the medium record was timed against: Snoo, an averaged update, bf16 weights, cubic windows.

5,535 steps of 524,288 tokens. Queries, keys and values are normalised instead of attention's input; the logits are
bound by z / sqrt(z^2 + c^2); the final features of a position mix in those of the one before. Kernels were tuned by
coordinate descent, which the medium track allows (compiler.coordinate_descent).
"""

import math
from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import AttentionConfig, EmbeddingConfig, GPTConfig, HeadConfig, InitConfig, ResidualConfig
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
ATTENTION = AttentionConfig(norm=False, value_norm=True, scale=0.12, rotary="half", rotary_base=1024.0)
EMBEDDINGS = EmbeddingConfig(norm=True, std=1.0, second=True, value_std=1.0, value_lambdas=True)
RESIDUAL = ResidualConfig(lambdas=1.0, x0_lambdas=True, skip_form="linear", backout_form="mix")
FORM = GPTConfig(
    norm_eps=FLOAT32_EPS, across_documents=True, attention=ATTENTION, embeddings=EMBEDDINGS,
    head=HeadConfig(softcap="isru", softcap_limit=15.0, smear_mtp=True), residual=RESIDUAL,
    init=InitConfig(scale=0.5 * math.sqrt(3)),
)  # fmt: skip
VALUE_LAYERS = tuple((first + table, table) for first in (0, 11) for table in range(5))
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
            FORM, vocab_size=4096, num_layers=4, dim=128, num_heads=4, no_attention=(2,),
            attention=replace(ATTENTION, rotary_base=256.0, long_layers=(0, 3)),
            embeddings=replace(EMBEDDINGS, value_layers=((0, 0), (1, 1), (3, 0))),
            residual=replace(RESIDUAL, skips=((0, 2), (1, 3)), backout=2),
        ),
        loader=LoaderConfig(packing="documents", shuffle="sequences", max_doc_len=128),
        optim=replace(OPTIM, head=Part(0.05), snoo=SnooPart(k=10)),
        schedule=ScheduleConfig(
            steps=1060, batch_size=16, seq_len=128, warmup=0.0, cooldown=0.9, min_lr_ratio=0.01, window_cubic=128,
            window_block=32, momentum_warmup=200,
        ),
        validation=ValidationConfig(every=250, batch_size=64, seq_len=128),
    )  # fmt: skip


def medium() -> Recipe:
    return Recipe(
        name="medium-before",
        track="medium",
        about=ABOUT,
        model=replace(
            FORM, vocab_size=50304, num_layers=16, dim=1024, num_heads=8, no_attention=(7,),
            attention=replace(ATTENTION, long_layers=(0, 4, 11, 15)),
            embeddings=replace(EMBEDDINGS, value_layers=VALUE_LAYERS),
            residual=replace(RESIDUAL, skips=((6, 9), (4, 10), (2, 11)), backout=11),
        ),
        loader=LoaderConfig(packing="documents", shuffle=None, max_doc_len=65536),
        optim=replace(OPTIM, muon=replace(OPTIM.muon, mlp_decay=2.0)),
        schedule=ScheduleConfig(
            steps=5535, batch_size=8, seq_len=65536, warmup=0.0, cooldown=0.7, min_lr_ratio=0.01,
            window_cubic=27 * BLOCK, momentum_warmup=300,
        ),
        validation=ValidationConfig(every=125, batch_size=1, seq_len=262144, cut_documents=False),
        compiler=CompilerConfig(coordinate_descent=True),
    )  # fmt: skip


SIZES = {"medium": medium, "pocket": pocket}
