"""How busy other processes keep the machine, whether a run gets slower on the way, and how to get along with them."""

import os
import threading
import time

import psutil
import torch

from speedrun.training.distributed import neighbours, ranks

BUSY = 0.25  # cores; less is what any system does beside
SLOWER = 1.5  # times as long for the same tokens as in the fastest window so far
WINDOW = 10.0  # seconds
GLANCE = 0.5  # seconds between two looks at what others are doing
MOST_THREADS = 4096  # of one process


class Load:
    """What others do on the cores that this run may use, from now on. `quick`: ranks are taken to be as busy as this
    one."""

    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        self.start = self._now()

    def others(self) -> float | None:
        """Cores that other processes have kept busy since; None where the system does not tell."""
        end = self._now()
        if self.start is None or end is None or end[0] <= self.start[0]:
            return None
        seconds, all_, own = (b - a for a, b in zip(self.start, end, strict=True))
        return max(0.0, (all_ - own) / seconds)

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds on the wall, CPU seconds of all processes on these cores, CPU seconds of this run."""
        try:
            own = time.process_time() * neighbours() if self.quick else _own_seconds()
            return time.monotonic(), _all_seconds(), own
        except (psutil.Error, OSError, NotImplementedError):
            return None


def usable_cores() -> int:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, thread_limit())


def thread_limit() -> int:
    """Threads that OpenMP grants. If it grants fewer than torch asks for, oneDNN's bf16 products are wrong."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    return min(int(limit), MOST_THREADS) if limit.isdecimal() and int(limit) > 0 else MOST_THREADS


def _all_seconds() -> float:
    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    # Stolen time is what other virtual machines took of these cores.
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(cores[n], kind, 0.0) for n in usable for kind in busy)


def _own_seconds() -> float:
    """Of this process and all it started, or of all ranks on this machine and their launcher."""
    me = psutil.Process()
    root = (me.parent() or me) if ranks() > 1 else me
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and both of children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


def busy_line(others: float | None) -> str | None:
    """What to say of it, if there is something to say."""
    if others is None or others < BUSY:
        return None
    return f"busy machine: other processes keep {others:.1f} of {usable_cores()} cores busy, so steps take longer"


class Pace:
    """Tokens per second in windows of some seconds on the clock: a run that gets slower is told once."""

    def __init__(self) -> None:
        self.since, self.tokens, self.best, self.told = 0.0, 0, 0.0, False

    def after(self, tokens: int, seconds: float) -> str | None:
        """After a step of this many tokens, with this many seconds on the clock."""
        self.tokens += tokens
        elapsed = seconds - self.since
        if elapsed < WINDOW:
            return None
        speed = self.tokens / elapsed
        self.since, self.tokens = seconds, 0
        slow = speed * SLOWER < self.best
        line = f"slower: {speed:,.0f} tokens per second in the last {elapsed:.0f} s, up to {self.best:,.0f} before"
        new, self.told, self.best = slow and not self.told, slow, max(self.best, speed)
        return line if new else None


class SleepWhileBusy:
    """Lets idle threads of this process sleep while other processes need the cores.

    A thread of OpenMP that waits for the rest of its team spins for milliseconds: the fastest way on a quiet machine.
    When another process has taken a member of the team off its core, all others spin for as long as it is away, and a
    step takes three to four times as long. GNU's libgomp reads how often to look before it sleeps from the environment,
    once. But it looks only a hundred times while it manages more threads than there are cores (`do_spin` in
    libgomp/config/linux/wait.h), and that can be brought about and taken back at any time: here by one more thread that
    keeps a team of its own, asleep. Results do not change.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sleeping = False
        self._ended, self._release = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._holder: threading.Thread | None = None

    def __enter__(self) -> "SleepWhileBusy":
        if self.threads > 1:  # one alone never waits
            self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._let(False)

    def _watch(self) -> None:
        load = Load(quick=True)
        while not self._ended.wait(GLANCE):
            others, load = load.others(), Load(quick=True)
            if others is None:
                return
            self._let(others > (BUSY / 2 if self.sleeping else BUSY))

    def _let(self, sleep: bool) -> None:
        if sleep == self.sleeping:
            return
        self.sleeping = sleep
        if sleep:
            self._release.clear()
            self._holder = threading.Thread(target=self._hold, daemon=True)
            self._holder.start()
        elif self._holder is not None:
            self._release.set()
            self._holder.join()

    def _hold(self) -> None:
        torch.ones(2**18).add_(1)  # large enough for a team of threads, which lives as long as this one
        self._release.wait()
