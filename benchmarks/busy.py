"""What a training step costs beside other work.

    python -m benchmarks.busy [--seconds 6] [--set GOMP_SPINCOUNT=1000 OMP_WAIT_POLICY=PASSIVE ...]

`speedrun train` runs as a user would start it, in one process and in two, compiled and eager, while processes of nice
0 that never sleep come and go. Every busy spell lies between two quiet ones; what counts is the ratio of their times.
--set tries another environment, such as a wait policy of OpenMP.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SPELLS: dict[str, tuple[int | None, ...]] = {  # which core each busy process is pinned to
    "one busy process": (None,),
    "one, pinned to a core": (0,),
    "two busy processes": (None, None),
}
LIMITS = {"one busy process": 2.0, "one, pinned to a core": 2.5, "two busy processes": 3.0}
TWO_OF_OURS = 2.5  # with one busy process
SETTLE = 1.5  # seconds


@contextlib.contextmanager
def busy(cores: Sequence[int | None]) -> Iterator[None]:
    """Processes that never sleep, each on any core or on one."""
    spin = "import os, sys\nif sys.argv[1] != 'None': os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    running = [subprocess.Popen([sys.executable, "-c", spin, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def training(environment: dict[str, str], nproc: int, compiled: bool) -> Iterator[Path]:
    """A run without end; yields its metrics.jsonl when it has begun to train."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        command = [sys.executable, "-m", "speedrun", "train", "--schedule.steps", "1000000", "--checkpoint-every", "0"]
        command += ["--validation.first", "False", "--validation.every", "10000000", "--save", "False"]
        command += ["--compile", str(compiled), "--nproc", str(nproc), "--out", str(out)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (out / "metrics.jsonl").exists() or steps_in(out / "metrics.jsonl") < 20:
                if process.poll() is not None:
                    raise SystemExit(f"the training ended with exit code {process.returncode}")
                time.sleep(0.2)
            yield out / "metrics.jsonl"
        finally:
            process.terminate()
            process.wait()


def steps_in(metrics: Path) -> int:
    return metrics.read_bytes().count(b'"train"')


def milliseconds(metrics: Path, seconds: float) -> float:
    """Of a step, over a spell."""
    time.sleep(SETTLE)
    first, start = next_step(metrics)
    time.sleep(seconds)
    last, end = next_step(metrics)
    return 1000 * (end - start) / (last - first)


def next_step(metrics: Path) -> tuple[int, float]:
    """When the next step ends, and which one it is."""
    before = steps_in(metrics)
    while (now := steps_in(metrics)) == before:
        time.sleep(0.002)
    return now, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each spell")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--nproc", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--compiled", choices=["both", "yes", "no"], default="both")
    given = parser.parse_args()
    environment = {**os.environ, **dict(item.split("=", 1) for item in given.set)}
    kept = True
    for nproc in given.nproc:
        for compiled in {"both": (True, False), "yes": (True,), "no": (False,)}[given.compiled]:
            with training(environment, nproc, compiled) as metrics:
                quiet, spells = [milliseconds(metrics, given.seconds)], {}
                for name, cores in SPELLS.items():
                    with busy(cores):
                        spells[name] = milliseconds(metrics, given.seconds)
                    quiet.append(milliseconds(metrics, given.seconds))
            how = f"{nproc} process{'es' * (nproc > 1)}, {'compiled' if compiled else 'eager'}"
            print(f"{how}: quiet {statistics.median(quiet):.0f} ms a step ({min(quiet):.0f} to {max(quiet):.0f})")
            for number, (name, ms) in enumerate(spells.items()):
                ratio = ms / statistics.mean(quiet[number : number + 2])
                limit = LIMITS[name] if nproc == 1 else TWO_OF_OURS if name == "one busy process" else None
                verdict = "" if limit is None else f"   at most {limit:.1f}: {'yes' if ratio <= limit else 'NO'}"
                kept &= limit is None or ratio <= limit
                print(f"  {name:24} {ms:6.0f} ms   {ratio:.2f}x{verdict}", flush=True)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
