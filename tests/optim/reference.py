"""Plain optimizers: a few lines each, one matrix at a time, no tricks. The library must agree with them."""

import math

import torch
from torch import Tensor

from speedrun.optim.orthogonalize import NEWTON_SCHULZ, POLAR_EXPRESS


def orthogonalize(g: Tensor, method: str, steps: int, coefficients=None) -> Tensor:
    """One matrix, as the formulas say."""
    if method == "svd":
        u, s, vh = torch.linalg.svd(g, full_matrices=False)
        return (u * (s > max(g.shape) * torch.finfo(g.dtype).eps * s[0])) @ vh
    triples = list(coefficients or {"polar-express": POLAR_EXPRESS, "newton-schulz": NEWTON_SCHULZ}[method])
    x = g / (g.norm() * (1.02 if method == "polar-express" else 1.0) + 1e-30)
    for i in range(steps):
        a, b, c = triples[min(i, len(triples) - 1)]
        s = x @ x.T
        x = a * x + b * s @ x + c * s @ s @ x
    return x


class Muon:
    """Momentum, orthogonalise each block, scale, decay, step; optionally NorMuon's second moment."""

    def __init__(
        self, lr, momentum=0.95, nesterov=True, momentum_form="ema", method="polar-express", steps=5, coefficients=None,
        scale="spectral", weight_decay=0.0, decay="decoupled", decay_by="lr", update_ema=None, lr_mul=1.0, wd_mul=1.0,
        blocks=1, beta2=None, axis=None, update_floor=None,
    ):  # fmt: skip
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.m = self.e = None
        self.second: dict[tuple[int, int], Tensor] = {}

    def step(self, p: Tensor, g: Tensor) -> Tensor:
        """The parameter after one step, for a matrix `p`."""
        mu = self.momentum
        self.m = torch.zeros_like(g) if self.m is None else self.m
        if self.momentum_form == "ema":
            self.m = mu * self.m + (1 - mu) * g
            u = mu * self.m + (1 - mu) * g if self.nesterov else self.m
        else:
            self.m = mu * self.m + g
            u = g + mu * self.m if self.nesterov else self.m
        a, b = (self.blocks, 1) if isinstance(self.blocks, int) else self.blocks
        rows, cols = p.shape[0] // a, p.shape[1] // b
        scale = {
            None: 1.0,
            "unit-variance": math.sqrt(max(rows, cols)),
            "spectral": math.sqrt(max(1, rows / cols)),
            "match-rms-adamw": 0.2 * math.sqrt(max(rows, cols)),
            "unit-rms-norm": math.sqrt(rows / cols),
        }[self.scale]
        out = torch.empty_like(u)
        for i in range(a):
            for j in range(b):
                here = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
                o = orthogonalize(u[here], self.method, self.steps, self.coefficients)
                o = self.even_out(o, (i, j)) if self.beta2 is not None else o
                least = (self.update_floor or 0.0) * p[here].norm()
                out[here] = o * (least / (scale * o).norm()) if (scale * o).norm() < least else o
        if self.update_ema:
            self.e = torch.zeros_like(out) if self.e is None else self.e
            out = self.e = self.update_ema * self.e + (1 - self.update_ema) * out
        lr = self.lr * self.lr_mul
        wd = self.weight_decay * self.wd_mul * (lr if self.decay_by == "lr" else self.lr * lr * scale)
        mask = 1.0 if self.decay == "decoupled" else (out * p >= 0).to(p.dtype)
        return p - mask * p * wd - lr * scale * out

    def even_out(self, o: Tensor, block: tuple[int, int]) -> Tensor:
        axis = self.axis or (-1 if o.shape[0] >= o.shape[1] else -2)
        v = o.square().mean(axis, keepdim=True)
        s = self.second[block] = self.beta2 * self.second.get(block, torch.zeros_like(v)) + (1 - self.beta2) * v
        scaled = o / s.clamp(min=1e-10).sqrt()
        return scaled * (o.norm() / scaled.norm().clamp(min=1e-10))


class Adam:
    def __init__(
        self, lr, betas=(0.9, 0.999), eps=1e-8, eps_at="corrected", weight_decay=0.0, decay="decoupled", decay_by="lr",
        every=1, lr_mul=1.0, wd_mul=1.0,
    ):  # fmt: skip
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.m = self.q = 0.0
        self.t = self.calls = 0
        self.waiting = 0.0

    def step(self, p: Tensor, g: Tensor) -> Tensor:
        self.calls += 1
        self.waiting = self.waiting + g
        if self.calls % self.every:
            return p
        g, self.waiting = self.waiting, 0.0
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.q = b2 * self.q + (1 - b2) * g * g
        lr = self.lr * self.lr_mul
        c1, c2 = 1 - b1**self.t, 1 - b2**self.t
        if self.eps_at == "corrected":
            u = lr * (self.m / c1) / ((self.q / c2).sqrt() + self.eps)
        else:
            u = lr * math.sqrt(c2) / c1 * self.m / (self.q.sqrt() + self.eps)
        wd = self.weight_decay * self.wd_mul * (lr if self.decay_by == "lr" else lr * lr)
        mask = 1.0 if self.decay == "decoupled" else (u * p > 0).to(p.dtype)
        return p - mask * p * wd - u
