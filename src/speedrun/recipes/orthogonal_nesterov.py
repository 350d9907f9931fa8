"""`orthogonal-nesterov`: the first record whose matrices were trained by orthogonalised Nesterov momentum.

Everything else is as before it: the GPT-2 form, AdamW for the tied table, a trapezoid schedule. The fused
query-key-value matrix is orthogonalised as one, and the update is not scaled. Record of October 2024: 7,000 steps,
3.67 B tokens.
"""

from dataclasses import replace

from speedrun.recipes import adamw, gpt2
from speedrun.training import MuonPart, OptimConfig, Part, Recipe, ScheduleConfig

ABOUT = "AdamW's successor: orthogonalised Nesterov momentum for the matrices"
MUON = MuonPart(momentum_form="classical", method="newton-schulz", scale=None, split_qkv=False)


def pocket() -> Recipe:
    base = adamw.pocket()
    return replace(
        base,
        name="orthogonal-nesterov",
        about=ABOUT,
        optim=replace(base.optim, lr=0.004, matrices="muon", muon=replace(MUON, lr=0.02, weight_decay=0.07)),
        schedule=replace(base.schedule, steps=998, batch_size=16, warmup=0.0, cooldown=0.8),
    )


def short() -> Recipe:
    base = gpt2.short()
    return replace(
        base,
        name="orthogonal-nesterov",
        about=ABOUT,
        optim=OptimConfig(lr=0.0018, weight_decay=0.0, embed=Part(), matrices="muon", muon=replace(MUON, lr=0.018)),
        schedule=ScheduleConfig(steps=7000, batch_size=512, seq_len=1024, warmup=250 / 7000, cooldown=2000 / 7000),
    )


SIZES = {"pocket": pocket, "short": short}
