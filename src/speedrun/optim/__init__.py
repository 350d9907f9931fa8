"""Optimizers for the matrices, tables and scalars of a network, as plain `torch.optim.Optimizer`s.

from speedrun.optim import Adam, Combined, NorMuon, route

plan = route(model)
optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))
"""

from speedrun.optim.adam import Adam
from speedrun.optim.combined import Combined
from speedrun.optim.finite import NonFiniteGradient
from speedrun.optim.muon import Muon, NorMuon
from speedrun.optim.orthogonalize import NEWTON_SCHULZ, NEWTON_SCHULZ_PER_STEP, POLAR_EXPRESS, orthogonalize
from speedrun.optim.outer import Snoo
from speedrun.optim.protocol import TrainerOptimizer
from speedrun.optim.route import Plan, route
from speedrun.optim.sharded import ORDERS, Comm, Interleaved
from speedrun.optim.sharded.plan import param_refs, plan_buckets
from speedrun.optim.state import States, value_at

__all__ = [
    "NEWTON_SCHULZ", "NEWTON_SCHULZ_PER_STEP", "ORDERS", "POLAR_EXPRESS", "Adam", "Combined", "Comm", "Interleaved",
    "Muon", "NonFiniteGradient", "NorMuon", "Plan", "Snoo", "States", "TrainerOptimizer", "orthogonalize", "param_refs",
    "plan_buckets", "route", "value_at",
]  # fmt: skip
