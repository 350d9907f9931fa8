"""Is a training step of one version of the program as fast as that of another?

    python scripts/same_speed.py OLD NEW [--pairs 20] [--train "--dtype float32"]

Each commit (or folder) trains with `speedrun train` in a process of its own, without end. The two take turns: one goes
on for some steps while the other is stopped (SIGSTOP), so that both see the same noise. Printed is the ratio of the
times, new over old, as geometric mean over the pairs with its 95 % interval. Exit code 0: the upper bound is below
--limit, 1: it is not.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import scipy.stats
from same_bits import Mistake, check_out


class Training:
    """A run that can be stopped and let go on."""

    def __init__(self, source: Path, out: Path, flags: list[str]) -> None:
        self.metrics = out / "metrics.jsonl"
        command = [sys.executable, "-m", "speedrun", "train", "--schedule.steps", "1000000", "--checkpoint-every", "0"]
        command += ["--validation.first", "False", "--validation.every", "10000000", "--save", "False"]
        self.process = subprocess.Popen(
            [*command, *flags, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": str(source / "src")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def steps(self) -> int:
        return self.metrics.read_bytes().count(b'"train"') if self.metrics.exists() else 0

    def begin(self, steps: int) -> None:
        while self.steps() < steps:
            if self.process.poll() is not None:
                raise Mistake(f"the training ended with exit code {self.process.returncode}; try its flags by hand")
            time.sleep(0.1)

    def send(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def next_step(self) -> tuple[int, float]:
        before = self.steps()
        while (now := self.steps()) == before:
            time.sleep(0.001)
        return now, time.perf_counter()

    def seconds(self, steps: int) -> float:
        """Of a step, in one turn; the step in which it was stopped does not count."""
        self.send(signal.SIGCONT)
        self.next_step()
        first, start = self.next_step()
        last, end = first, start
        while last < first + steps:
            last, end = self.next_step()
        self.send(signal.SIGSTOP)
        return (end - start) / (last - first)


@contextlib.contextmanager
def trainings(versions: list[str], flags: list[str]) -> Iterator[list[Training]]:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        sources = [check_out(version, place / f"source{n}") for n, version in enumerate(versions)]
        running: list[Training] = []
        try:
            for n, source in enumerate(sources):
                running.append(Training(source, place / f"run{n}", flags))
                running[-1].begin(30)
                running[-1].send(signal.SIGSTOP)
            yield running
        finally:
            for each in running:
                with contextlib.suppress(ProcessLookupError):
                    each.send(signal.SIGKILL)
                each.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15, help="of each turn")
    parser.add_argument("--train", default="", help="more flags for both sides")
    parser.add_argument("--limit", type=float, default=1.03)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error(f"--pairs is {given.pairs}; an interval needs at least 2")
    logs, both = [], [[], []]
    with trainings([given.old, given.new], shlex.split(given.train)) as (old, new):
        for pair in range(given.pairs):
            turns = ((0, old), (1, new)) if pair % 2 == 0 else ((1, new), (0, old))
            for n, training in turns:
                both[n].append(training.seconds(given.steps))
            logs.append(math.log(both[1][-1] / both[0][-1]))
    mean, error = sum(logs) / len(logs), scipy.stats.sem(logs)
    half = float(scipy.stats.t.ppf(0.975, len(logs) - 1) * error)
    ratio, low, high = (math.exp(x) for x in (mean, mean - half, mean + half))
    names = [f"{1000 * sorted(times)[len(times) // 2]:.1f} ms" for times in both]
    print(f"a step takes {names[0]} in {given.old} and {names[1]} in {given.new} (medians)")
    print(f"new over old: {ratio:.3f} ({low:.3f} to {high:.3f}, 95 %) over {given.pairs} pairs of {given.steps} steps")
    return 0 if high < given.limit else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Mistake as e:
        print(f"same_speed: {e}", file=sys.stderr)
        sys.exit(2)
