"""Runs as processes of their own, which end with whoever started them.

Ctrl-C reaches a whole terminal, but `docker stop`, a queue or `kill` tell one process: SIGTERM. Within `terminable` it
ends a race, sweep or ablation as Ctrl-C does, together with the runs that it is waiting for.
"""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from speedrun.errors import Terminated, UserError
from speedrun.training.config import Recipe
from speedrun.training.device import choose
from speedrun.training.load import usable_cores


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def was_stopped(code: int) -> bool:
    """Whether a process ended by Ctrl-C or SIGTERM, by itself or before it could."""
    return code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


def last_words(said: str) -> str:
    """Of what a run wrote to stderr: the last sentence of its own, after which a launcher may go on with its log."""
    lines = [line.strip("│ ") for line in said.splitlines() if any(map(str.isalnum, line))]  # of a box, what is inside
    own = [line.removeprefix("speedrun: ") for line in lines if line.startswith("speedrun: ")]
    return (own or lines or [""])[-1]


class Children:
    """Processes started from several threads. An exception inside `with` stops them all, and no other begins."""

    def __init__(self) -> None:
        self.alive: set[subprocess.Popen[str]] = set()
        self.stopped = False
        self.lock = threading.Lock()

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.lock:
            self.stopped = kind is not None
            for child in self.alive if self.stopped else ():
                child.terminate()

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """To its end, which is an early one if somebody stops it, us or all."""
        with self.lock:
            if self.stopped:
                raise Terminated
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.alive.add(child)
        with child:
            try:
                out, errors = child.communicate()
            except BaseException:
                child.terminate()
                child.communicate()  # to its end: after Ctrl-C `with child` would not wait
                raise
            finally:
                with self.lock:
                    self.alive.discard(child)
        if was_stopped(child.returncode):
            raise KeyboardInterrupt  # and so everything ends: that somebody stopped it says nothing about the run
        return subprocess.CompletedProcess(words, child.returncode, out, errors)


def arithmetic_for(recipe: Recipe, device: str, threads: int | None, nproc: int, jobs: int = 1) -> str:
    """What `--dtype auto` means for runs of this recipe that are started from here."""
    threads = threads or max(1, usable_cores() // (nproc * jobs))
    tokens = max(stage.tokens for stage in recipe.schedule.visits()) // nproc
    return choose(device, "auto", threads, model=recipe.model, tokens=tokens).dtype_name


def kept_dtype(folder: Path, planned: str, asked: str) -> str:
    """The arithmetic of what is planned in a folder, which must not be another one than is asked for."""
    if asked not in ("auto", planned):
        raise UserError(
            f"The plan in {folder} says --dtype {planned}, not {asked}; drop that, or choose another --out."
        )
    return planned
