"""Time one small training step in float32 and in bfloat16, on the CPU; `speedrun.training.arithmetic` starts this.

    python -m speedrun.training.arithmetic_trial TOKENS WIDTH HIDDEN VOCAB THREADS

A process of its own, because some machines kill what uses bfloat16, and with torch alone, because it is waited for.
Prints the CPU seconds of the trials as JSON: {"float32": [...], "bfloat16": [...]}. CPU time, not time on the wall:
what else the machine is doing must not decide.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

TRIALS = 3
FASTER = 0.85  # bfloat16 is taken if it needs at most this share of float32's time in each trial


def step(x_ND: Tensor, weights: list[Tensor], targets_N: Tensor, dtype: torch.dtype) -> None:
    """Forward and backward of one block without attention, and of a head, as the model computes them."""
    qkv, out, up, down, head = weights
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        x_ND = x_ND + F.linear(F.linear(x_ND, qkv)[:, : len(out)], out)
        x_ND = x_ND + F.linear(F.linear(x_ND, up).relu().square(), down)
        logits_NV = F.linear(x_ND, head)
    F.cross_entropy(logits_NV.float(), targets_N).backward()


def seconds(tokens: int, width: int, hidden: int, vocab: int) -> dict[str, list[float]]:
    shapes = [(3 * width, width), (width, width), (hidden, width), (width, hidden), (vocab, width)]
    weights = [torch.randn(shape).div_(width**0.5).requires_grad_() for shape in shapes]
    x_ND, targets_N = torch.randn(tokens, width, requires_grad=True), torch.randint(vocab, (tokens,))
    found: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for trial in range(1 + TRIALS):  # the first one is not counted
        for name, times in found.items():
            each = []
            for _ in range(2):
                start = time.process_time()
                step(x_ND, weights, targets_N, getattr(torch, name))
                each.append(time.process_time() - start)
            times.append(min(each))
        if trial and found["bfloat16"][-1] > FASTER * found["float32"][-1]:
            break  # decided
    return {name: times[1:] for name, times in found.items()}


if __name__ == "__main__":
    *sizes, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    print(json.dumps(seconds(*sizes)))
