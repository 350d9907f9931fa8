"""How fast batches are made, alone and as a share of a pocket step.

    python benchmarks/loader.py

Reads a shard of ten million tokens from the page cache through the packed loader, documents of about 700 tokens, and
times a pocket batch against a pocket training step in the same run.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.throughput import our_step
from speedrun.data.loader import Loader, LoaderConfig
from speedrun.data.shards import write_shard
from speedrun.recipes import get_recipe
from speedrun.training.device import choose

TOKENS = 10_000_000


def seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    choose("cpu")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        shard = Path(place) / "train_000000.bin"
        tokens = rng.integers(1, 4096, size=TOKENS)
        tokens[np.cumsum(rng.integers(100, 1300, size=TOKENS // 700))[: TOKENS // 800]] = 0
        write_shard(shard, tokens)
        for shuffle in (None, "documents"):
            for tail in ("split", "discard"):
                config = LoaderConfig(packing="documents", shuffle=shuffle, tail=tail, max_doc_len=2048)
                loader = Loader([shard], config, bos=0, vocab_size=4096, seed=0, notice=lambda line: None)
                loader.next(8, 2048)
                spent = seconds(lambda loader=loader: loader.next(8, 2048), 400)
                print(f"packed documents, shuffle={shuffle}, tail={tail}: {8 * 2048 / spent / 1e6:.0f} M tokens/s")
        recipe = get_recipe("adamw", "pocket")
        rows, length = recipe.schedule.batch_size, recipe.schedule.seq_len
        loader = Loader([shard], recipe.loader, bos=0, vocab_size=4096, seed=0, notice=lambda line: None)
        step = our_step(recipe, torch.randint(4096, (rows, length)))
        for _ in range(3):
            step()
        batch, whole = seconds(lambda: loader.next(rows, length), 200), seconds(step, 20)
        print(f"a pocket batch takes {1e6 * batch:.0f} us, {100 * batch / whole:.2f} % of a {1000 * whole:.0f} ms step")


if __name__ == "__main__":
    main()
