"""Kill a random rank at a random step, many times: every run must end with the losses of the undisturbed one.

    python scripts/faults.py                    # 20 runs of three processes, about ten minutes
    python scripts/faults.py --runs 5 --ranks 2 --seed 7

Real runs of the `interleaved` recipe on tokens of the pocket track, small and short, with restarts on. Losses are
compared bit for bit. Needs Linux: the processes are found through /proc.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from speedrun.data.shards import TokenFolder, open_shard, write_shard
from speedrun.tracks import get_track

STEPS = 40
VALIDATED = 8_192  # tokens: the whole split would take longer than the run
FLAGS = [
    "--recipe", "interleaved", "--compile", "False", "--threads", "1", "--schedule.steps", str(STEPS - 4),
    "--schedule.extension", "4", "--schedule.batch-ramp", "3", "6", "9", "--schedule.length", "64",
    "--loader.max-document", "64", "--schedule.window-ramp", "16", "32", "48", "--schedule.window-extension", "64",
    "--schedule.window-final", "64", "--schedule.momentum-warmup", "10", "--schedule.momentum-cooldown", "5",
    "--model.width", "64", "--model.heads", "2", "--validation.length", "64", "--validation.every", "1000000",
    "--validation.first", "False", "--checkpoint-every", "5", "--sample", "False", "--save", "False",
]  # fmt: skip


def few_tokens(folder: Path) -> Path:
    """The pocket track's training tokens with a short validation split."""
    whole = get_track("pocket").locate()
    folder.mkdir()
    for split, most in (("train", None), ("val", VALIDATED)):
        write_shard(folder / f"{split}_000000.bin", open_shard(whole.shards(split)[0])[:most])
    shutil.copyfile(whole.tokenizer_path, folder / "tokenizer.json")
    TokenFolder.describe(folder, tokenizer="pocket", vocab_size=whole.vocab_size, bos=whole.bos)
    return folder


def start(data: Path, folder: Path, ranks: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "speedrun", "train", *FLAGS, "--data", str(data), "--out", str(folder)]
    command += ["--nproc", str(ranks)]
    with open(log, "w") as f:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*command, "--max-restarts", "3"], stdout=f, stderr=f, env=environment)


def losses(folder: Path) -> list[tuple[str, int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(m["kind"], m["step"], m["loss"]) for m in map(json.loads, lines) if "loss" in m]


def steps_done(folder: Path) -> int:
    """How far a run has come; a line that is being written does not count."""
    file = folder / "metrics.jsonl"
    return file.read_text().count('"kind": "train"') if file.exists() else 0


def process_of(rank: int, parent: int) -> int:
    """The process that has this rank, among those that a launcher started."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return int(child)
    raise RuntimeError(f"rank {rank} is not there")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = few_tokens(folder / "tokens")
        assert start(data, folder / "whole", args.ranks, folder / "log").wait() in (0, 1), (folder / "log").read_text()
        expected = losses(folder / "whole")
        assert len(expected) == STEPS + 1, "all steps and the final validation"
        same = 0
        for number in range(1, args.runs + 1):
            rank, step = draw.randrange(args.ranks), draw.randrange(1, STEPS - 3)
            run = start(data, folder / "run", args.ranks, folder / "log")
            while steps_done(folder / "run") < step and run.poll() is None:
                time.sleep(0.005)
            os.kill(process_of(rank, run.pid), signal.SIGKILL)
            run.wait()
            log = (folder / "log").read_text()
            again = [line for line in log.splitlines() if line.startswith("--- resumed from step")]
            good = losses(folder / "run") == expected and bool(again)
            same += good
            what = again[-1].strip("- ") if again else "never resumed"
            print(f"{number:3}  rank {rank} killed after step {step:2}: {what}; "
                  f"{'the same bits' if good else 'OTHER LOSSES'}", flush=True)  # fmt: skip
            if not good:
                print(log)
            shutil.rmtree(folder / "run")
    print(f"{same} of {args.runs} runs ended with the losses of the undisturbed one, bit for bit")
    sys.exit(same != args.runs)


if __name__ == "__main__":
    main()
