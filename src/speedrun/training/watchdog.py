"""Losing a process: one sentence tells which rank is missing, and none waits for it in vain.

torchrun ends all ranks as soon as one has ended, and a process group gives up after its timeout. Neither can say which
rank the others wait for, or where it is. So each rank leaves signs of life, with the place it has come to, in the store
that torchrun keeps outside of the ranks. A rank that was killed or stopped gives none; one that hangs gives them, but
gets no further, while the others wait for it a little further on. A thread on each rank follows all of this and ends
its own rank when waiting has become pointless: a rank that waits in a collective could not.
"""

import json
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

BEAT = 0.5  # seconds between two signs of life
SILENCE = 40  # beats without one, and a rank counts as lost: its machine is gone, or the process is stopped
QUIET = 2  # the same when no rank gets further
BROKEN = 6  # the same when a connection between ranks has broken
LONG = 4  # a step may take this many times the timeout while it compiles


class Sign(NamedTuple):
    """A sign of life."""

    sent: float  # by the clock of the rank: no two are the same
    place: int  # how many places the rank has come to
    doing: str
    allowed: float  # seconds that this may take


class Watchdog:
    """One for each rank. `progress` says where this rank is; everything else happens by itself or after an error.

    Places must be the same and in the same order on all ranks, so that the one with the lowest number is the one that
    the others wait for. Silence is counted in this rank's own beats, so that a machine that stands still for a while
    holds up both sides alike.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.store, self.timeout = rank, store, timeout
        self.silence, self.moved = SILENCE, time.monotonic()  # when any rank last got further
        self.sign = Sign(0.0, 0, "starting", LONG * timeout)
        self.signs, self.missed = [self.sign] * size, [0] * size
        self.aside = store.clone()  # the thread's own connection: one that waits for something would hold it up
        self._exchange()  # waits until all are here, so that no later one has to
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="watchdog", daemon=True)
        self.thread.start()

    def progress(self, doing: str, *, compiling: bool = False) -> None:
        """The main thread has come so far. Cheap: the thread passes it on."""
        self.sign = Sign(0.0, self.sign.place + 1, doing, self.timeout * (LONG if compiling else 1))

    def close(self) -> None:
        self.closing.set()
        self.thread.join(timeout=10 * BEAT)

    def _follow(self) -> None:
        try:
            while not self.closing.wait(BEAT):
                self._exchange()
                why = self._missing()
                if why:  # the main thread waits for what will never come
                    self.tell(why)
                    os._exit(1)
        except RuntimeError:  # with the store torchrun is gone, and nothing else would end this rank
            if not self.closing.is_set():
                print(f"speedrun: the store where the ranks met is gone; rank {self.rank} ends.", file=sys.stderr)
                os._exit(1)

    def _exchange(self) -> None:
        self.aside.set(f"rank {self.rank}", json.dumps(self.sign._replace(sent=time.monotonic())))
        found = self.aside.multi_get([f"rank {rank}" for rank in range(len(self.signs))])
        before, self.signs = self.signs, [Sign(*json.loads(sign)) for sign in found]
        for rank, (old, new) in enumerate(zip(before, self.signs, strict=True)):
            self.missed[rank] = self.missed[rank] + 1 if new.sent == old.sent else 0
            self.moved = self.moved if new.place == old.place else time.monotonic()

    def _missing(self) -> str | None:
        """Who is silent; or, when no rank has got further for too long, who is behind."""
        silent = self.missed.index(max(self.missed))
        last, waited = min(self.signs, key=lambda sign: sign.place), time.monotonic() - self.moved
        if self.missed[silent] > (QUIET if waited > last.allowed else self.silence):
            return f"rank {silent} is gone: no sign of life since it was {self.signs[silent].doing}"
        behind = [str(rank) for rank, sign in enumerate(self.signs) if sign.place == last.place]
        who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"ranks {', '.join(behind)} hang"
        return f"{who}: {last.doing} for {waited:.0f} s" if waited > last.allowed else None

    def first(self) -> bool:
        """Whether this rank is the first to ask: of those who would tell of the same, one does."""
        return int(self.store.add("told", 1)) == 1

    def tell(self, why: str) -> None:
        if self.first():
            print(f"speedrun: {why}; all ranks end.", file=sys.stderr, flush=True)

    def explain(self, error: Exception) -> None:
        """Tell why this rank ends. Never returns if another is the reason; the thread finds out which."""
        text = f"{self.sign.doing}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if not lost_connection(error):
            self.tell(f"rank {self.rank} failed while {text}")
            return
        self.silence = BROKEN
        self.thread.join(SILENCE * BEAT)
        self.tell(f"the connection between the ranks broke while {text}")
        os._exit(1)


def lost_connection(error: BaseException) -> bool:
    """Whether an error means that another rank went, rather than that this one did something wrong."""
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "NCCL"))
    return told or isinstance(error, dist.DistNetworkError | dist.DistBackendError)
