"""AdamW over the parts of a GPT, with a learning rate and decay per part.

The baseline optimizer: torch's own fused AdamW. This module only decides which parameter gets which numbers.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class AdamWConfig:
    lr: float = 3e-3
    """Learning rate of the matrices inside the blocks, before the schedule."""
    embed_lr: float = 1.0
    """Multiplier of the learning rate for the token embedding (and for a tied head)."""
    head_lr: float = 1.0
    """Multiplier of the learning rate for an untied head."""
    beta1: float = 0.9
    """Decay of the gradient's moving average."""
    beta2: float = 0.95
    """Decay of the squared gradient's moving average."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of the block matrices, per unit of learning rate."""
    embed_decay: float = 0.0
    """The same for embedding and head."""
    clip: float = 0.0
    """Largest gradient norm over all parameters; 0 turns clipping off."""

    def __post_init__(self) -> None:
        for name in ("lr", "embed_lr", "head_lr", "eps", "weight_decay", "embed_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it must be finite and not negative.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it must be at least 0 and below 1.")


def build_adamw(named: Iterable[tuple[str, nn.Parameter]], config: AdamWConfig) -> torch.optim.AdamW:
    """One group per part (`embed`, `head`, the rest); each group keeps its base rate as `initial_lr`."""
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {"embed": [], "head": [], "blocks": []}
    for name, parameter in named:
        parts[name if name in parts else "blocks"].append((name, parameter))
    rate = {"embed": config.lr * config.embed_lr, "head": config.lr * config.head_lr, "blocks": config.lr}
    groups = [
        {
            "params": members,
            "lr": rate[part],
            "initial_lr": rate[part],
            "weight_decay": config.weight_decay if part == "blocks" else config.embed_decay,
        }
        for part, members in parts.items()
        if members
    ]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
