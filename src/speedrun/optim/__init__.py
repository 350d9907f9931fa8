"""Optimizers for the matrices, tables and scalars of a network, as plain `torch.optim.Optimizer`s.

from speedrun.optim import Adam, Combined, NorMuon, route

plan = route(model)
optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))
"""

from speedrun.optim.adam import Adam
from speedrun.optim.combined import Combined
from speedrun.optim.muon import Muon, NorMuon
from speedrun.optim.orthogonalize import NEWTON_SCHULZ, NEWTON_SCHULZ_PER_STEP, POLAR_EXPRESS, orthogonalize
from speedrun.optim.outer import Snoo
from speedrun.optim.protocol import TrainerOptimizer
from speedrun.optim.route import Plan, route
from speedrun.optim.sharded import Interleaved

__all__ = [
    "NEWTON_SCHULZ",
    "NEWTON_SCHULZ_PER_STEP",
    "POLAR_EXPRESS",
    "Adam",
    "Combined",
    "Interleaved",
    "Muon",
    "NorMuon",
    "Plan",
    "Snoo",
    "TrainerOptimizer",
    "orthogonalize",
    "route",
]
