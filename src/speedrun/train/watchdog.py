"""Losing a process: each rank knows what the others are doing, so that one sentence tells which of them is missing.

A rank that raises leaves its reason for the others before it goes. One that dies leaves nothing: the connections to it
break, and its signs of life stop. One that hangs still gives signs of life but gets no further than where it is, while
the others wait for it a little further on. A thread on each rank follows all of this through the store that torchrun
keeps outside of the ranks, and ends its own rank when waiting has become pointless: a rank that waits in a collective
could not.
"""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from speedrun.errors import RankLost

BEAT = 0.5  # seconds between two signs of life
SILENCE = 20.0  # seconds without one, and a rank counts as lost: its machine is gone, or the process is stopped
GRACE = 4.0  # seconds in which a broken connection must be explained
LONG = 4  # a step may take so many times the patience while it compiles


@dataclass
class Neighbour:
    """What is known here of another rank."""

    beat: int = -1
    place: int = -1
    doing: str = "starting"
    allowed: float = 0.0
    heard: float = 0.0  # when its last sign of life came
    moved: float = 0.0  # when it last got further


class Watchdog:
    """One for each rank. `progress` says where this rank is; everything else happens by itself or after an error.

    Places must be the same and in the same order on all ranks, so that the one with the lowest number is the one that
    the others wait for.
    """

    def __init__(
        self, rank: int, size: int, store: Any, patience: float, end: Callable[[int], None] = os._exit
    ) -> None:
        self.rank, self.size, self.store, self.patience, self.end = rank, size, store, patience, end
        self.place, self.doing, self.allowed = 0, "starting", LONG * patience
        self.beats = 0
        now = time.monotonic()
        self.ranks = [Neighbour(heard=now, moved=now) for _ in range(size)]
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self._publish()
        self.thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self.thread.start()

    def progress(self, doing: str, *, compiling: bool = False) -> None:
        """The main thread has come so far. Cheap: the thread passes it on."""
        self.doing, self.allowed = doing, self.patience * (LONG if compiling else 1)
        self.place += 1

    def close(self) -> None:
        self.closing.set()
        self.thread.join(timeout=10 * BEAT)

    # --------------------------------------------------------- what each knows

    def _publish(self) -> None:
        self.store.set(f"rank {self.rank}", json.dumps([self.beats, self.place, self.doing, self.allowed]))
        self.beats += 1

    def _look(self) -> None:
        now = time.monotonic()
        found = self.store.multi_get([f"rank {r}" for r in range(self.size)])
        for neighbour, value in zip(self.ranks, found, strict=True):
            beat, place, neighbour.doing, neighbour.allowed = json.loads(value)
            if beat != neighbour.beat:
                neighbour.beat, neighbour.heard = beat, now
            if place != neighbour.place:
                neighbour.place, neighbour.moved = place, now

    def _follow(self) -> None:
        while not self.closing.wait(BEAT):
            try:
                with self.lock:
                    self._publish()
                    self._look()
            except (RuntimeError, OSError):  # with it torchrun is gone, and nobody would end this rank
                if not self.closing.is_set():
                    print(f"speedrun: the store where the ranks met is gone; rank {self.rank} ends.", file=sys.stderr)
                    self.end(1)
                return
            why = self._silent(SILENCE) or self._stuck()
            if why and not self.closing.is_set():
                self._give_up(why)

    def _silent(self, seconds: float) -> str | None:
        now = time.monotonic()
        for rank, other in enumerate(self.ranks):
            if rank != self.rank and now - other.heard > seconds:
                return f"rank {rank} is gone: no sign of life since it was {other.doing}"
        return None

    def _stuck(self) -> str | None:
        """Nobody gets further, so all wait for those who are behind."""
        now, last = time.monotonic(), max(other.moved for other in self.ranks)
        lowest = min(other.place for other in self.ranks)
        behind = [rank for rank, other in enumerate(self.ranks) if other.place == lowest]
        if now - last <= max(self.ranks[rank].allowed for rank in behind):
            return None
        who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} hang"
        if len(behind) == self.size:
            who = "all ranks hang"
        return f"{who}: {self.ranks[behind[0]].doing} for {now - last:.0f} s"

    def _give_up(self, why: str) -> None:
        """From the thread, while the main thread waits for what will never come."""
        if self.first("told"):
            print(f"speedrun: {why}; all ranks end.", file=sys.stderr, flush=True)
        self.end(1)

    def first(self, key: str) -> bool:
        """Whether this rank is the first to ask. Of those who would tell the same, one does."""
        return int(self.store.add(key, 1)) == 1

    # ----------------------------------------------------------- after an error

    def leaving(self, error: BaseException) -> None:
        """This rank ends by its own error: the others shall know."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        with self.lock:
            self.store.compare_set("failed", "", f"rank {self.rank} failed while {self.doing}: {text[:300]}")

    def wait_for_first(self) -> None:
        """Of ranks that end together rank 0 goes first: it removes the run folder that it had made, and torchrun kills
        the others as soon as one has ended. An error that rank 0 does not share is waited for in vain."""
        if self.rank == 0:
            self.store.set("first left", "")
            return
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(["first left"], datetime.timedelta(seconds=GRACE))

    def explained(self, error: BaseException) -> RankLost:
        """Why a collective failed here: what another rank said before it went, or which one fell silent."""
        give_up = time.monotonic() + GRACE
        why = None
        while why is None and time.monotonic() < give_up:
            with self.lock:
                if self.store.check(["failed"]):
                    why = self.store.get("failed").decode()
                else:
                    self._look()
                    why = self._silent(4 * BEAT)
            time.sleep(BEAT / 2)
        lost = RankLost(why or f"the connection between the ranks broke while {self.doing}: {error}")
        lost.told = not self.first("told")
        return lost


def lost_connection(error: BaseException) -> bool:
    """Whether an error means that another rank went, rather than that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "NCCL"))
