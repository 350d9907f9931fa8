"""`medium`: the short track's record brought to the medium track (16 layers of width 1,024, loss 2.92).

Record of the turn of 2026: 4,700 + 40 steps, 2.18 B tokens. What its text lists as not yet taken over is a switch here:
Snoo (optim.snoo.k=28), the update's moving average (optim.muon.update_ema=0.2), Smear-MTP (model.head.smear_mtp), bf16
weights (optim.weights=exact-bf16), cubic windows (schedule.window_cubic), the ISRU cap (model.head.softcap=isru),
kernels tuned by coordinate descent (compiler.coordinate_descent).
"""

from dataclasses import replace

from speedrun.data import LoaderConfig
from speedrun.model import GPTConfig
from speedrun.recipes import interleaved
from speedrun.recipes.medium_before import VALUE_LAYERS
from speedrun.recipes.normuon import BLOCK, FLOAT32_EPS
from speedrun.training import OptimConfig, Part, Recipe, ScheduleConfig, ValidationConfig

ABOUT = "the short record's techniques at medium size, with a second embedding"
EMBEDDINGS = replace(interleaved.EMBEDDINGS, second=True)
RESIDUAL = replace(interleaved.RESIDUAL, lambdas=1.05)
OPTIM = OptimConfig(
    lr=0.004, beta1=0.8, beta2=0.95, eps_at="uncorrected", weight_decay=0.005, decay="cautious", decay_by="lr-squared",
    every=2, matrices="normuon", muon=replace(interleaved.MUON, lr=0.015, gates=True, gates_lr=0.1),
    embed=Part(decay=150.0), head=Part(decay=150.0), embed2=Part(75.0, decay=5.0), values=Part(75.0, decay=5.0),
    smear_gate=Part(0.01), skip_gates=Part(0.01), x0=Part(5.0), scalars=Part(10.0, 0.9, 0.99),
)  # fmt: skip


def pocket() -> Recipe:
    base = interleaved.pocket()
    return replace(
        base,
        name="medium",
        about=ABOUT,
        model=replace(
            base.model, gate_inputs=16, embeddings=replace(base.model.embeddings, second=True),
            residual=replace(base.model.residual, lambdas=1.05, skips=((0, 2), (1, 3))),
        ),
        optim=replace(OPTIM, lr=0.016),
        schedule=replace(base.schedule, steps=650, cooldown=0.7, mtp_until=0.25, untie_at=1 / 6, window_short=64),
    )  # fmt: skip


def medium() -> Recipe:
    return Recipe(
        name="medium",
        track="medium",
        about=ABOUT,
        model=GPTConfig(
            vocab_size=50304, num_layers=16, dim=1024, num_heads=8, norm_eps=FLOAT32_EPS, gate_inputs=16,
            across_documents=True, attention=replace(interleaved.ATTENTION, long_layers=(0, 4, 11, 15)),
            embeddings=replace(EMBEDDINGS, value_layers=VALUE_LAYERS), head=interleaved.HEAD,
            residual=replace(RESIDUAL, skips=((6, 9), (4, 10), (2, 11)), backout=11), init=interleaved.INIT,
        ),
        loader=LoaderConfig(packing="documents", shuffle=None, max_doc_len=4096, tail="discard"),
        optim=replace(OPTIM, reference_ranks=8, muon=replace(OPTIM.muon, smear_gate=False)),
        schedule=ScheduleConfig(
            steps=4700, extra_steps=40, seq_len=16384, warmup=0.0, cooldown=0.7, min_lr_ratio=0.1,
            batch_ramp=(8, 16, 24, *[32] * 9), lr_ramp=(1.0, 1.52, 1.73, *[2.0] * 9),
            window_ramp=tuple(BLOCK * b for b in (3, 7, 11, 13, 15, 17, 19, 21, 23, 23, 23, 23)),
            window_short=11 * BLOCK, window_final=27 * BLOCK, yarn_until=13 * BLOCK, momentum_warmup=300,
            momentum_cooldown=50, mtp_tokens=3, mtp_until=0.25, untie_at=1 / 6,
        ),
        validation=ValidationConfig(every=250, batch_size=1, seq_len=262144, cut_documents=False),
    )  # fmt: skip


SIZES = {"medium": medium, "pocket": pocket}
