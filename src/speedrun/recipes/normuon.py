"""`normuon`: Polar Express and a second moment per row, on the model that a year of records had grown.

Record of November 2025: 2,245 + 40 steps of 262,144 tokens. The model has value embeddings, gates, smear, skips,
backout, windows with YaRN and an 8-bit head; Adam steps every second time. Its text says that gradients are averaged
over the accumulation steps, which its code did not do: here they are. Its loss is a sum over the tokens of a GPU, and
gradients are averaged over eight of them (optim.reference_ranks, at short size).
"""

import math
from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import AttentionConfig, EmbeddingConfig, GPTConfig, HeadConfig, InitConfig, ResidualConfig
from speedrun.training import MuonPart, OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

ABOUT = "NorMuon with Polar Express, on a model with value embeddings, gates, skips and windows"
FLOAT32_EPS = 2.0**-23
BLOCK = 128

ATTENTION = AttentionConfig(rotary="half", rotary_base=1024.0, yarn=True, scale=0.1, gates=True)
EMBEDDINGS = EmbeddingConfig(norm=True, std=1.0, value_std=1.0, value_lambdas=True, smear=True)
HEAD = HeadConfig(softcap="sigmoid", softcap_limit=30.0)
RESIDUAL = ResidualConfig(lambdas=1.0, x0_lambdas=True)
FORM = GPTConfig(
    norm_eps=FLOAT32_EPS, across_documents=True, attention=ATTENTION, embeddings=EMBEDDINGS, head=HEAD,
    residual=RESIDUAL, init=InitConfig(scale=0.5 * math.sqrt(3)),
)  # fmt: skip
OPTIM = OptimConfig(
    lr=0.008, beta1=0.65, beta2=0.95, eps_at="uncorrected", weight_decay=0.0, every=2, matrices="normuon",
    embed=Part(lr=75.0), values=Part(lr=75.0), head=Part(lr=1.0), x0=Part(lr=5.0), scalars=Part(lr=5.0),
    muon=MuonPart(lr=0.03, gates=True),
)  # fmt: skip


def pocket() -> Recipe:
    """Three layers keep a place for everything: a short window, a layer without attention, a long window."""
    return Recipe(
        name="normuon",
        track="pocket",
        about=ABOUT,
        model=replace(
            FORM, vocab_size=4096, num_layers=3, dim=128, num_heads=4, no_attention=(1,),
            attention=replace(ATTENTION, rotary_base=256.0, long_layers=(2,)),
            embeddings=replace(EMBEDDINGS, value_layers=((0, 0), (2, 1))),
            residual=replace(RESIDUAL, skips=((0, 2),), backout=1),
        ),
        loader=LoaderConfig(packing="documents", shuffle="sequences", max_doc_len=128),
        optim=replace(OPTIM, lr=0.016, embed=Part(lr=40.0), values=Part(lr=40.0)),
        schedule=ScheduleConfig(
            steps=660, extra_steps=40, batch_size=16, seq_len=128, warmup=0.0, cooldown=1.0, min_lr_ratio=0.1,
            window_ramp=(32, 64, 96), window_extra=112, window_final=128, window_block=16, momentum_warmup=200,
            momentum_cooldown=50,
        ),
        validation=ValidationConfig(every=200, batch_size=64, seq_len=128),
    )  # fmt: skip


def short() -> Recipe:
    return Recipe(
        name="normuon",
        track="short",
        about=ABOUT,
        model=replace(
            FORM, vocab_size=50304, num_layers=11, dim=768, num_heads=6, no_attention=(6,),
            attention=replace(ATTENTION, long_layers=(3, 10)),
            embeddings=replace(EMBEDDINGS, value_layers=((0, 1), (1, 2), (8, 0), (9, 1), (10, 2))),
            head=replace(HEAD, fp8=True, fp8_scales=(math.sqrt(768) / 448, 2.0**-9, 1 / 448)),
            residual=replace(RESIDUAL, skips=((4, 5), (3, 6), (2, 7), (1, 8), (0, 9)), backout=7),
        ),
        loader=LoaderConfig(packing="documents", shuffle=None, max_doc_len=2048, tail="discard"),
        optim=replace(OPTIM, reference_ranks=8),
        schedule=ScheduleConfig(
            steps=2245, extra_steps=40, batch_size=8, seq_len=32768, warmup=0.0, cooldown=0.5, min_lr_ratio=0.1,
            window_ramp=(3 * BLOCK, 7 * BLOCK, 11 * BLOCK), window_extra=13 * BLOCK, window_final=20 * BLOCK,
            momentum_warmup=300, momentum_cooldown=50,
        ),
        validation=ValidationConfig(every=250, batch_size=1, seq_len=262144, cut_documents=False),
    )  # fmt: skip


def short_24gb() -> Recipe:
    """Rows of 16,384 tokens are the longest of which one fits into 24 GB; a step has as many tokens as before."""
    base = short()
    return replace(
        base,
        name="normuon-24gb",
        about="`normuon` with rows half as long and twice as many of them, for a GPU of 24 GB",
        schedule=replace(base.schedule, batch_size=16, seq_len=16384),
    )


SIZES = {"pocket": pocket, "short": short}
