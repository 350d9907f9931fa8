"""What windowed attention costs on a CPU, forward and backward.

    python -m benchmarks.attention [--rounds 7] [--threads 2]

One process, interleaved, so that a noisy machine is noisy for everybody alike:
  - a window of 512 over rows of 2,048 to 16,384 tokens: what each doubling costs (2 is linear);
  - at 8,192 tokens, against F.scaled_dot_product_attention with the same window as a dense mask;
  - at pocket size, rows of 256 tokens: block by block against the dense mask, for the windows the recipes use.
Ratios of medians are what counts; absolute times belong to the machine of the day.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.model.attention import attend, attend_locally, document_mask, local_mask
from speedrun.training.device import choose

WINDOW, LENGTHS = 512, (2048, 4096, 8192, 16384)


def both_passes(call: Callable[..., Tensor], B: int, T: int, H: int, K: int) -> Callable[[], None]:
    gen = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(B, T, H, K, generator=gen) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        torch.autograd.grad(call(*leaves), leaves, g)

    return step


def dense(T: int, window: int, doc_ids_BT: Tensor | None = None) -> Callable[..., Tensor]:
    mask = document_mask(torch.zeros(1, T) if doc_ids_BT is None else doc_ids_BT, window)

    def call(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return call


def medians(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # the first one warms up
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    machine = choose("cpu", "float32", given.threads)
    print(f"4 heads, {machine.threads} threads, {given.rounds} rounds")

    def windowed(*qkv: Tensor) -> Tensor:
        return attend(*qkv, window=WINDOW)

    steps = {f"{T:,} tokens": both_passes(windowed, 1, T, 4, 64) for T in LENGTHS}
    steps["8,192 tokens, dense mask"] = both_passes(dense(8192, WINDOW), 1, 8192, 4, 64)
    found = medians(steps, given.rounds)
    for name, seconds in found.items():
        print(f"  window {WINDOW}, {name:25} {1000 * seconds:8.1f} ms")
    for short, long in itertools.pairwise(LENGTHS):
        ratio = found[f"{long:,} tokens"] / found[f"{short:,} tokens"]
        print(f"from {short:,} to {long:,} tokens: {ratio:.2f}x the time")
    print(f"against the dense mask at 8,192: {found['8,192 tokens, dense mask'] / found['8,192 tokens']:.1f}x faster")

    documents = (torch.rand(4, 256, generator=torch.Generator().manual_seed(0)) < 1 / 200).long().cumsum(1)
    for window in (16, 32, 48, 64, 96, 128):

        def chosen(*qkv: Tensor, window: int = window) -> Tensor:
            return attend(*qkv, doc_ids_BT=documents, window=window)

        def blocks(*qkv: Tensor, window: int = window) -> Tensor:
            mask = local_mask(256, documents.device, documents, window)
            return attend_locally(*qkv, window=window, mask=mask)

        ways = {"blocks": blocks, "dense": dense(256, window, documents), "chosen": chosen}
        found = medians({name: both_passes(way, 4, 256, 4, 32) for name, way in ways.items()}, 5 * given.rounds)
        print(
            f"pocket rows, window {window:3}: blocks {found['dense'] / found['blocks']:.2f}x as fast as a dense mask, "
            f"what `attend` chooses {found['dense'] / found['chosen']:.2f}x"
        )


if __name__ == "__main__":
    main()
