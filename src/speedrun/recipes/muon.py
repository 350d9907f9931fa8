"""`muon`: the same idea refined: query, key and value apart, and updates of unit variance.

Record of October 2024: 6,200 steps, 3.25 B tokens, no warm-up. What its text claims beside that (a fallback for
matrices on which the iteration fails, a choice of methods) is in `speedrun.optim.orthogonalize`.
"""

from dataclasses import replace

from speedrun.recipes import adamw, gpt2
from speedrun.training import MuonPart, OptimConfig, Part, Recipe, ScheduleConfig

ABOUT = "Muon: query, key and value orthogonalised apart, updates of unit variance"
MUON = MuonPart(momentum_form="classical", method="newton-schulz", scale="unit-variance", split_qkv=True)


def pocket() -> Recipe:
    base = adamw.pocket()
    return replace(
        base,
        name="muon",
        about=ABOUT,
        optim=replace(base.optim, lr=0.005, matrices="muon", muon=replace(MUON, lr=0.0013, weight_decay=1.0)),
        schedule=replace(base.schedule, steps=990, batch_size=16, warmup=0.0, cooldown=0.8),
    )


def short() -> Recipe:
    base = gpt2.short()
    return replace(
        base,
        name="muon",
        about=ABOUT,
        optim=OptimConfig(lr=0.0036, weight_decay=0.0, embed=Part(), matrices="muon", muon=replace(MUON, lr=0.00036)),
        schedule=ScheduleConfig(steps=6200, batch_size=512, seq_len=1024, warmup=0.0, cooldown=1800 / 6200),
        validation=replace(base.validation, every=125),
    )


SIZES = {"pocket": pocket, "short": short}
