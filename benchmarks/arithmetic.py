"""Is the arithmetic that a trial chooses the faster one, in whole training steps?

    python -m benchmarks.arithmetic [--recipes normuon adamw] [--rounds 15] [--no-compile]

Two trainers of each recipe, one in float32 and one in bfloat16, take turns with steps in one process. Beside them: what
the trial says, and what it costs, the first time (less the time that importing torch takes) and after that.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from speedrun.data.loader import Batch
from speedrun.recipes import get_recipe
from speedrun.tracks import get_track
from speedrun.training import arithmetic, telemetry
from speedrun.training.config import Options
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder
from speedrun.training.step import Trainer


def step_seconds(name: str, rounds: int, compiled: bool) -> dict[str, float]:
    """Median seconds of a training step in each arithmetic."""
    recipe, tokens = get_recipe(name, "pocket"), get_track("pocket").locate()
    trainers: dict[str, Trainer] = {}
    for dtype in ("float32", "bfloat16"):
        options = Options(compile=compiled, save=False)
        progress, folder = Progress(1, quiet=True), NullRunFolder(Path("nowhere"))
        trainers[dtype] = Trainer(Job(recipe, tokens, choose("cpu", dtype), options, folder, progress))
    stage = recipe.schedule.at(0)
    ids = torch.randint(tokens.vocab_size, (stage.batch_size, stage.seq_len + 1))
    starts = tuple(torch.tensor([0]).numpy() for _ in range(stage.batch_size))
    batch = Batch(ids[:, :-1], ids[:, 1:], starts if recipe.loader.packing == "documents" else None, {})
    times: dict[str, list[float]] = {dtype: [] for dtype in trainers}
    for _ in range(3 + rounds):
        for dtype, trainer in trainers.items():
            start = time.perf_counter()
            trainer.step(stage, batch)
            times[dtype].append(time.perf_counter() - start)
    return {dtype: statistics.median(found[3:]) for dtype, found in times.items()}


def trial_seconds(name: str) -> tuple[float, float]:
    """Of the first trial beyond the import of torch in its process, and of asking again."""
    recipe = get_recipe(name, "pocket")

    def importing() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        return time.perf_counter() - start

    before = os.environ.get("SPEEDRUN_HOME")
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["SPEEDRUN_HOME"] = temporary
        found = []
        for _ in range(2):
            start = time.perf_counter()
            arithmetic.choose_on_cpu(recipe.model, recipe.schedule.at(0).tokens, torch.get_num_threads())
            found.append(time.perf_counter() - start)
    del os.environ["SPEEDRUN_HOME"]
    if before is not None:
        os.environ["SPEEDRUN_HOME"] = before
    return found[0] - statistics.median(importing() for _ in range(3)), found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=["normuon", "adamw"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    print(telemetry.summary(telemetry.snapshot()))
    right = True
    for name in given.recipes:
        found = step_seconds(name, given.rounds, given.compile)
        recipe = get_recipe(name, "pocket")
        chosen = choose("cpu", model=recipe.model, tokens=recipe.schedule.at(0).tokens).dtype_name
        faster = min(found, key=lambda dtype: found[dtype])
        f, b = 1000 * found["float32"], 1000 * found["bfloat16"]
        right &= chosen == faster or abs(f - b) < 0.15 * max(f, b)
        print(f"{name}: a step takes {f:.1f} ms in float32, {b:.1f} ms in bfloat16 ({f / b:.2f}x); chosen: {chosen}")
        first, again = trial_seconds(name)
        print(f"  the trial takes {first:.2f} s beside the import of torch the first time, {again:.3f} s after that")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
