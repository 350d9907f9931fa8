"""Kill a training run at random moments, resume it each time, and compare with the run nobody disturbed.

    python benchmarks/kill_resume.py [--kills 20] [--seed 0] [--pocket]

The kills are SIGKILL, aimed at three places: while steps are computed, while the validation runs, and while a
checkpoint is being written. The run must end with the same weights and the same losses, bit for bit; the last line is
`20/20` when every kill was survived and the end is equal. Needs no prepared data unless `--pocket` is given.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from speedrun.data.shards import TokenFolder, write_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.train import checkpoint
from speedrun.train.runlog import read_metrics

SMALL = {
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 2,
    "schedule.steps": 240,
    "schedule.rows": 4,
    "schedule.length": 64,
    "validation.every": 12,
    "validation.rows": 8,
    "validation.length": 64,
}
POCKET = {"schedule.steps": 300, "validation.every": 50}


def make_tokens(folder: Path) -> None:
    """Random documents in the pocket vocabulary; what they say does not matter here."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 40_000), ("val", 6_000)):
        tokens = rng.integers(1, 400, size=count)
        tokens[::211] = 0
        write_shard(folder / f"{split}_000000.bin", tokens)
    tokenizer = Tokenizer.load("pocket")
    tokenizer.save(folder / "tokenizer.json")
    TokenFolder.describe(folder, tokenizer="pocket", vocab_size=tokenizer.vocab_size, bos=tokenizer.bos)


def command(out: Path, data: Path | None, pocket: bool) -> list[str]:
    flags = [sys.executable, "-m", "speedrun", "train", "--out", str(out), "--resume", "auto", "--sample", "False"]
    flags += ["--checkpoint-every", "5", "--threads", "2"]
    flags += [] if pocket else ["--data", str(data), "--compile", "False"]
    for name, value in (POCKET if pocket else SMALL).items():
        flags += [f"--{name}", str(value)]
    return flags


def writing_checkpoint(out: Path) -> bool:
    folder = out / "checkpoints"
    return folder.is_dir() and any(p.name.startswith(".step-") for p in folder.iterdir())


def validating(out: Path, every: int) -> bool:
    """The last thing logged is the step before a validation, so the validation is what is going on."""
    try:
        last = (out / "metrics.jsonl").read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        values = json.loads(last)
    except (OSError, ValueError):
        return False
    return values.get("kind") == "train" and (values["step"] + 1) % every == 0


def kill_once(run: list[str], out: Path, aim: str, every: int, rng: random.Random) -> str | None:
    """Start or resume, kill at the aimed moment. Returns where it was killed, or None if it had ended before."""
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    lines_before = len((out / "metrics.jsonl").read_bytes().splitlines()) if (out / "metrics.jsonl").exists() else 0
    wanted_lines = lines_before + rng.randint(1, 25)
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        metrics = out / "metrics.jsonl"
        lines = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        there = {
            "step": lines >= wanted_lines,
            "checkpoint": lines > lines_before and writing_checkpoint(out),
            "validation": lines > lines_before and validating(out, every),
        }
        if there[aim]:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    error = process.communicate()[1].decode()
    if process.returncode == -signal.SIGKILL:
        return f"{aim} (step {last_step(out)})"
    if process.returncode not in (0, 1):
        raise SystemExit(f"the run ended by itself with code {process.returncode}:\n{error}")
    return None


def last_step(out: Path) -> int:
    steps = [m["step"] for m in read_metrics(out, "train")]
    return max(steps, default=-1)


def ending(out: Path) -> tuple[dict[str, torch.Tensor], list[tuple[str, int, float]]]:
    saved = checkpoint.newest_good(out / "checkpoints", notice=print)
    assert saved is not None
    tensors = {k: v for k, v in saved.tensors.items() if k.startswith(("model.", "optim."))}
    return tensors, [(m["kind"], m["step"], m["loss"]) for m in read_metrics(out) if m["kind"] in ("train", "val")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pocket", action="store_true", help="the compiled pocket recipe instead of a small model")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        make_tokens(data)
        quiet, disturbed = Path(place) / "quiet", Path(place) / "disturbed"
        subprocess.run(command(quiet, data, given.pocket), stdout=subprocess.DEVNULL, check=False)
        expected = ending(quiet)
        run = command(disturbed, data, given.pocket)
        every = (POCKET if given.pocket else SMALL)["validation.every"]
        survived = 0
        for n in range(given.kills):
            where = kill_once(run, disturbed, ("step", "checkpoint", "validation")[n % 3], every, rng)
            if where is None:
                print(f"the run ended after {n} kills; it is too short for {given.kills}")
                return 1
            good = checkpoint.newest_good(disturbed / "checkpoints", notice=print)
            print(f"kill {n + 1:2}: {where}; newest good checkpoint: {good.step if good else 'none yet'}", flush=True)
            survived += 1
        subprocess.run(run, stdout=subprocess.DEVNULL, check=False)
        tensors, losses = ending(disturbed)
        same_losses = losses == expected[1]
        same_weights = tensors.keys() == expected[0].keys() and all(
            torch.equal(tensors[k], expected[0][k]) for k in tensors
        )
        print(f"{len(losses)} logged losses equal: {same_losses}; {len(tensors)} tensors equal: {same_weights}")
        print(f"{survived if same_losses and same_weights else 0}/{given.kills}")
        return 0 if same_losses and same_weights else 1


if __name__ == "__main__":
    sys.exit(main())
