"""Optimizers over several ranks: a plan of buckets, and a step that carries out an order of operations on them."""

from speedrun.optim.sharded.comm import Comm
from speedrun.optim.sharded.optimizer import Interleaved
from speedrun.optim.sharded.order import ORDERS

__all__ = ["ORDERS", "Comm", "Interleaved"]
