"""Losing a process: each rank knows what the others are doing, so that one sentence tells which of them is missing.

torchrun ends all ranks when one of them has ended, and torch's process group gives up after its timeout. Neither can
say which rank the others wait for, and where it is. So each rank tells where it is through the store that torchrun
keeps outside of the ranks. A rank that raises says so itself. One that dies leaves nothing: the connections to it
break, and its signs of life stop. One that hangs still gives signs of life but gets no further than where it is, while
the others wait for it a little further on. A thread on each rank follows all of this, and ends its own rank when
waiting has become pointless: a rank that waits in a collective could not.
"""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

BEAT = 0.5  # seconds between two signs of life
SILENCE = 20.0  # seconds without one, and a rank counts as lost: its machine is gone, or the process is stopped
GRACE = 4.0  # seconds in which a broken connection must be explained
LONG = 4  # a step may take so many times the patience while it compiles


class Sign(NamedTuple):
    """A sign of life."""

    sent: float  # by the rank's own clock: no two are the same
    place: int  # how many places it has come to
    doing: str
    allowed: float  # seconds that this may take


class Watch:
    """One for each rank. `at` says where this rank is; everything else happens by itself or after an error.

    Places must be the same and in the same order on all ranks, so that the one with the lowest number is the one that
    the others wait for.
    """

    def __init__(self, rank: int, size: int, store: Any, patience: float) -> None:
        self.rank, self.store, self.patience = rank, store, patience
        self.place, self.doing, self.allowed = 0, "starting", LONG * patience
        self.signs = [Sign(0, -1, "starting", 0)] * size  # the last of each rank
        self.moved = time.monotonic()  # when any of them last got further
        self.heard = [self.moved] * size  # when each last gave a new one
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self.thread.start()

    def at(self, doing: str, *, compiling: bool = False) -> None:
        """The main thread has come so far. Cheap: the thread passes it on."""
        self.doing, self.allowed = doing, self.patience * (LONG if compiling else 1)
        self.place += 1

    def close(self) -> None:
        self.closing.set()
        self.thread.join(timeout=10 * BEAT)

    def _follow(self) -> None:
        why, alone = None, False
        while not (why or self.closing.wait(BEAT)):
            try:
                self._exchange()
                why = self._missing(SILENCE)
            except (RuntimeError, OSError):  # with it torchrun is gone, and nobody would end this rank
                why, alone = "the store where the ranks met is gone", True
        if why and not self.closing.is_set():  # the main thread waits for what will never come
            self.tell(why, alone)
            os._exit(1)

    def _exchange(self) -> None:
        self.store.set(f"rank {self.rank}", json.dumps([time.monotonic(), self.place, self.doing, self.allowed]))
        found = self.store.multi_get([f"rank {rank}" for rank in range(len(self.signs))])
        before, self.signs, now = self.signs, [Sign(*json.loads(sign)) for sign in found], time.monotonic()
        for rank, (old, new) in enumerate(zip(before, self.signs, strict=True)):
            self.heard[rank] = now if new.sent != old.sent else self.heard[rank]
            self.moved = now if new.place != old.place else self.moved

    def _missing(self, silence: float) -> str | None:
        """Who has given no sign for so many seconds; or, when nobody gets further, who is behind."""
        now = time.monotonic()
        for rank, sign in enumerate(self.signs):
            if rank != self.rank and now - self.heard[rank] > silence:
                return f"rank {rank} is gone: no sign of life since it was {sign.doing}"
        last = min(self.signs, key=lambda sign: sign.place)
        if now - self.moved <= last.allowed:
            return None
        behind = [rank for rank, sign in enumerate(self.signs) if sign.place == last.place]
        who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"{len(behind)} of {len(self.signs)} ranks hang"
        return f"{who}: {last.doing} for {now - self.moved:.0f} s"

    def first(self, key: str) -> bool:
        """Whether this rank is the first to ask. Of those who would tell the same, one does."""
        return int(self.store.add(key, 1)) == 1

    def tell(self, why: str, alone: bool = False) -> None:
        if alone or self.first("told"):
            print(f"speedrun: {why}; all ranks end.", file=sys.stderr, flush=True)

    def explain(self, error: Exception) -> bool:
        """Tell why this rank ends. True: because of another, which has told why it goes, or has fallen silent."""
        lost, give_up = lost_connection(error), time.monotonic() + GRACE
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        why = None if lost else f"rank {self.rank} failed while {self.doing}: {text}"
        while not (why or self.store.check(["told"]) or time.monotonic() > give_up):
            time.sleep(BEAT / 2)
            why = self._missing(4 * BEAT)
        self.tell(why or f"the connection between the ranks broke while {self.doing}: {text}")
        return lost

    def wait_for_first(self) -> None:
        """Of ranks that end together rank 0 goes first: it removes the run folder that it had made, and torchrun kills
        the others as soon as one has ended. An error that rank 0 does not share is waited for in vain."""
        if self.rank == 0:
            self.store.set("first left", "")
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(["first left"], datetime.timedelta(seconds=GRACE))


def lost_connection(error: BaseException) -> bool:
    """Whether an error means that another rank went, rather than that this one did something wrong."""
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "NCCL"))
    return told or isinstance(error, dist.DistNetworkError | dist.DistBackendError)
