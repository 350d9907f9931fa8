"""`interleaved`: bf16 weights that are exact underneath, an optimizer per module, ramps of batch, window and rate.

Record of January 2026: 1,800 + 40 steps, 487.6 M tokens. The matrices are stored in bfloat16 with the missing 16 bits
kept by the optimizer; on a CPU the arithmetic is float32 all the same.
"""

import math
from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import AttentionConfig, EmbeddingConfig, GPTConfig, HeadConfig, InitConfig, ResidualConfig
from speedrun.recipes.normuon import BLOCK, FLOAT32_EPS
from speedrun.training import MuonPart, OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

ABOUT = "exact bf16 weights, betas and decay per module, multi-token prediction, ramps, the head split on the way"

# The same at every size; what names layers comes with the size.
ATTENTION = AttentionConfig(
    rotary="half", rotary_base=1024.0, yarn=True, scale=0.1, gates=True, lambdas=True, key_offset=True
)
EMBEDDINGS = EmbeddingConfig(norm=True, std=0.005, value_gates=True, smear=True)
HEAD = HeadConfig(tied=True, untie=True, softcap="sigmoid", softcap_limit=23.0, softcap_shift=5.0)
RESIDUAL = ResidualConfig(lambdas=1.1, x0_lambdas=True, skip_gates=True)
INIT = InitConfig(scale=math.sqrt(3), mlp_scale=0.5 * math.sqrt(3))
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
            vocab_size=4096, num_layers=4, dim=128, num_heads=4, norm_eps=FLOAT32_EPS, no_attention=(2,),
            across_documents=True, attention=replace(ATTENTION, rotary_base=256.0, long_layers=(0, 3)),
            embeddings=replace(EMBEDDINGS, std=0.02, value_layers=((0, 0), (1, 1), (3, 0))),
            head=HEAD, residual=replace(RESIDUAL, skips=((0, 2),), backout=2), init=INIT,
        ),
        loader=LoaderConfig(packing="documents", shuffle="sequences", max_doc_len=128),
        optim=replace(OPTIM, lr=0.016),
        schedule=ScheduleConfig(
            steps=625, extra_steps=40, seq_len=128, warmup=0.0, cooldown=0.5, min_lr_ratio=0.1, batch_ramp=(8, 16, 24),
            lr_ramp=(1.0, 1.52, 1.73), window_ramp=(32, 64, 96), window_extra=112, window_final=128,
            window_block=16, momentum_warmup=200, momentum_cooldown=50, mtp_tokens=3, untie_at=2 / 3,
        ),
        validation=ValidationConfig(every=250, batch_size=64, seq_len=128),
    )  # fmt: skip


def short() -> Recipe:
    return Recipe(
        name="interleaved",
        track="short",
        about=ABOUT,
        model=GPTConfig(
            vocab_size=50304, num_layers=11, dim=768, num_heads=6, norm_eps=FLOAT32_EPS, no_attention=(6,),
            across_documents=True, attention=replace(ATTENTION, long_layers=(3, 10)),
            embeddings=replace(EMBEDDINGS, value_layers=((0, 1), (1, 2), (8, 0), (9, 1), (10, 2))),
            head=replace(HEAD, fp8=True), residual=replace(RESIDUAL, skips=((3, 6),), backout=7), init=INIT,
        ),
        loader=LoaderConfig(packing="documents", shuffle=None, max_doc_len=2048, tail="discard"),
        optim=replace(OPTIM, reference_ranks=8),
        schedule=ScheduleConfig(
            steps=1800, extra_steps=40, seq_len=16384, warmup=0.0, cooldown=0.5, min_lr_ratio=0.1,
            batch_ramp=(8, 16, 24), lr_ramp=(1.0, 1.52, 1.73), window_ramp=(3 * BLOCK, 7 * BLOCK, 11 * BLOCK),
            window_extra=13 * BLOCK, window_final=20 * BLOCK, momentum_warmup=300, momentum_cooldown=50,
            mtp_tokens=3, untie_at=2 / 3,
        ),
        validation=ValidationConfig(every=250, batch_size=1, seq_len=262144, cut_documents=False),
    )  # fmt: skip


SIZES = {"pocket": pocket, "short": short}
