"""Kill runs at random moments, let them go on, and compare them with runs that nobody disturbed, bit for bit.

    python scripts/faults.py                      # both experiments, 20 kills each: about a quarter of an hour
    python scripts/faults.py kills --count 5      # one process, killed again and again, resumed each time
    python scripts/faults.py ranks --ranks 2      # a random one of several processes, restarted by itself

`kills` aims SIGKILL at three places: while steps are computed, while the validation runs, and while a checkpoint is
written; weights, optimizer state and losses must be equal at the end. `ranks` kills one process of a small
`interleaved` run at a random step with --max-restarts on; each run must end with the losses of the undisturbed one.
Tokens are made up. Needs Linux: the processes are found through /proc.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from speedrun.data.shards import TokenFolder, write_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.training import checkpoint
from speedrun.training.runlog import read_metrics

EVERY = 12  # steps between validations of `kills`
KILLS = [
    *("--recipe", "adamw", "--resume", "auto", "--checkpoint-every", "5", "--threads", "2", "--model.num-layers", "2"),
    *(
        "--model.dim",
        "64",
        "--model.num-heads",
        "2",
        "--schedule.steps",
        "240",
        "--schedule.batch-size",
        "4",
        "--schedule.seq-len",
        "64",
    ),
    *("--validation.every", str(EVERY), "--validation.batch-size", "8", "--validation.seq-len", "64"),
]
STEPS = 40  # of `ranks`
RANKS = [
    *("--recipe", "interleaved", "--threads", "1", "--schedule.steps", str(STEPS - 4), "--schedule.extra-steps", "4"),
    *("--schedule.batch-ramp", "3", "6", "9", "--schedule.seq-len", "64", "--loader.max-doc-len", "64"),
    *("--schedule.window-ramp", "16", "32", "48", "--schedule.window-extra", "64", "--schedule.window-final", "64"),
    *("--schedule.momentum-warmup", "10", "--schedule.momentum-cooldown", "5", "--model.dim", "64"),
    *(
        "--model.num-heads",
        "2",
        "--validation.seq-len",
        "64",
        "--validation.every",
        "1000000",
        "--validation.first",
        "False",
    ),
    *("--checkpoint-every", "5", "--save", "False", "--max-restarts", "3"),
]


def make_tokens(folder: Path) -> Path:
    """Random documents in the pocket vocabulary; what they say does not matter here."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 60_000), ("val", 6_000)):
        tokens = rng.integers(1, 400, size=count)
        tokens[::211] = 0
        write_shard(folder / f"{split}_000000.bin", tokens)
    tokenizer = Tokenizer.load("pocket")
    tokenizer.save(folder / "tokenizer.json")
    TokenFolder.describe(folder, tokenizer="pocket", vocab_size=tokenizer.vocab_size, bos=tokenizer.bos)
    return folder


def start(data: Path, out: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "speedrun", "train", "--data", str(data), "--out", str(out), *flags]
    with open(log_of(out), "w") as log:
        more = ["--dtype", "float32", "--compile", "False", "--sample", "False"]
        return subprocess.Popen([*command, *more], stdout=log, stderr=log)


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def ended(run: subprocess.Popen[bytes], out: Path) -> None:
    code = run.wait()
    if code not in (0, 1):
        raise SystemExit(f"the run ended by itself with code {code}:\n{log_of(out).read_text()}")


def losses(out: Path) -> list[tuple[str, int, float]]:
    return [(m["kind"], m["step"], m["loss"]) for m in read_metrics(out) if m["kind"] in ("train", "val")]


def last_line(out: Path) -> tuple[int, str, int]:
    """How many lines are logged, and kind and step of the last one; a line that is being written does not count."""
    found = read_metrics(out) if (out / "metrics.jsonl").exists() else []
    return (len(found), found[-1]["kind"], found[-1]["step"]) if found else (0, "", -1)


def writing_checkpoint(out: Path) -> bool:
    folder = out / "checkpoints"
    return folder.is_dir() and any(p.name.startswith(".step-") for p in folder.iterdir())


# -------------------------------------------------------------------- one process


def ending(out: Path) -> tuple[dict[str, torch.Tensor], list[tuple[str, int, float]]]:
    saved = checkpoint.newest_good(out / "checkpoints", notice=print)
    assert saved is not None
    return saved.tensors, losses(out)


def kill_once(run: subprocess.Popen[bytes], out: Path, aim: str, draw: random.Random) -> None:
    before = last_line(out)[0]
    wanted = before + draw.randint(1, 25)
    there: dict[str, Callable[[int, str, int], bool]] = {
        "step": lambda lines, kind, step: lines >= wanted,
        "checkpoint": lambda lines, kind, step: lines > before and writing_checkpoint(out),
        # The last thing logged is the step before a validation, so that is what is going on.
        "validation": lambda lines, kind, step: lines > before and kind == "train" and (step + 1) % EVERY == 0,
    }
    while run.poll() is None and not there[aim](*last_line(out)):
        time.sleep(0.0005)
    if run.poll() is not None:
        raise SystemExit(f"the run had ended before it was killed:\n{log_of(out).read_text()}")
    run.kill()
    run.wait()


def kills(count: int, ranks: int, draw: random.Random, folder: Path) -> int:
    data, quiet, disturbed = make_tokens(folder / "tokens"), folder / "quiet", folder / "disturbed"
    ended(start(data, quiet, KILLS), quiet)
    for number in range(count):
        aim = ("step", "checkpoint", "validation")[number % 3]
        kill_once(start(data, disturbed, KILLS), disturbed, aim, draw)
        good = checkpoint.newest_good(disturbed / "checkpoints", notice=print)
        print(
            f"kill {number + 1:2}: {aim} (step {last_line(disturbed)[2]}); "
            f"newest good checkpoint: {good.step if good else 'none yet'}",
            flush=True,
        )
    ended(start(data, disturbed, KILLS), disturbed)
    (expected, old), (found, new) = ending(quiet), ending(disturbed)
    same = found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    print(f"{len(new)} logged losses equal: {old == new}; {len(found)} tensors equal: {same}")
    return count if same and old == new else 0


# -------------------------------------------------------------------- several processes


def process_of(rank: int, parent: int) -> int:
    """The process that has this rank, among those that a launcher started."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return int(child)
    raise RuntimeError(f"rank {rank} is not there")


def ranks(count: int, ranks: int, draw: random.Random, folder: Path) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    data, whole, out = make_tokens(folder / "tokens"), folder / "whole", folder / "run"
    flags = [*RANKS, "--nproc", str(ranks)]
    ended(start(data, whole, flags), whole)
    expected, same = losses(whole), 0
    assert len(expected) == STEPS + 1, "all steps and the final validation"
    for number in range(1, count + 1):
        rank, step = draw.randrange(ranks), draw.randrange(1, STEPS - 3)
        run = start(data, out, flags)
        while last_line(out)[0] < step and run.poll() is None:
            time.sleep(0.005)
        os.kill(process_of(rank, run.pid), signal.SIGKILL)
        run.wait()
        log = log_of(out).read_text()
        again = [line for line in log.splitlines() if line.startswith("--- resumed from step")]
        good = losses(out) == expected and bool(again)
        same += good
        what = again[-1].strip("- ") if again else "never resumed"
        verdict = "the same bits" if good else f"OTHER LOSSES\n{log}"
        print(f"{number:3}  rank {rank} killed after step {step:2}: {what}; {verdict}", flush=True)
        shutil.rmtree(out)
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=["kills", "ranks"], help="default: both")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    survived = {}
    for which in [args.which] if args.which else ["kills", "ranks"]:
        with tempfile.TemporaryDirectory() as name:
            experiment = kills if which == "kills" else ranks
            survived[which] = experiment(args.count, args.ranks, random.Random(args.seed), Path(name))
    for which, same in survived.items():
        print(f"{which}: {same}/{args.count} to the same bits")
    sys.exit(any(same != args.count for same in survived.values()))


if __name__ == "__main__":
    main()
