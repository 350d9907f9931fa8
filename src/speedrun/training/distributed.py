"""Several processes as one run: starting them, joining them, and checking that they agree.

    torchrun --standalone --nproc_per_node=2 -m speedrun train     or     speedrun train --nproc 2

torchrun starts the processes and tells each its rank in the environment. A single process needs none of this.
"""

import contextlib
import datetime
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from speedrun.errors import UserError
from speedrun.optim import Comm
from speedrun.training.watchdog import LONG, Watchdog

TIMEOUT = 300.0  # seconds a rank waits for another before it gives up; four times as long while something compiles
GRACE = 4.0  # seconds in which rank 0 may leave first
REACHED = 10.0  # seconds in which a store that is there already is reached


def variable(name: str, least: int, most: float, default: str = "") -> int:
    """A number that torchrun put into the environment, where a person may have put something else."""
    text = os.environ.get(name, default)
    if not text.isdecimal() or not least <= int(text) <= most:
        limit = f" from {least} to {most:g}" if most < math.inf else f", at least {least}"
        error = UserError(
            f"The environment variable {name} is {text!r}; it must be a whole number{limit}. Start processes with "
            "torchrun or --nproc, which set it; for a single process unset RANK."
        )
        error.mine_to_tell = True  # who else would know
        raise error
    return int(text)


def ranks() -> int:
    """How many processes this run was started with."""
    return variable("WORLD_SIZE", 1, math.inf) if "RANK" in os.environ else 1


def rank() -> int:
    return variable("RANK", 0, ranks() - 1) if "RANK" in os.environ else 0


def neighbours() -> int:
    """How many of them share this machine's cores."""
    return variable("LOCAL_WORLD_SIZE", 1, ranks(), "1") if "RANK" in os.environ else 1


def local_rank() -> int:
    """This process among them. Some launchers tell this number, but not how many there are."""
    most = neighbours() if "LOCAL_WORLD_SIZE" in os.environ else ranks()
    return variable("LOCAL_RANK", 0, most - 1, "0") if "RANK" in os.environ else 0


def is_first() -> bool:
    return rank() == 0


def restarted() -> bool:
    """Whether torchrun has started these processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def may_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def launched() -> bool:
    """Whether torchrun, or `launch`, keeps the store where the ranks meet. It is there before any of them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def choose_transport(asked: str, device: torch.device) -> str:
    """gloo for CPUs; NCCL for GPUs, with gloo beside it for small tensors that live on the CPU."""
    if asked not in ("auto", "gloo", "nccl"):
        raise UserError(f"--backend is {asked!r}; it must be one of: auto, gloo, nccl.")
    if asked == "nccl" and device.type != "cuda":
        raise UserError(f"--backend nccl needs a GPU, and the device is {device}; drop it, or pass --backend gloo.")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and asked != "gloo" else "gloo"


@contextlib.contextmanager
def joined(
    device: torch.device, timeout: float = TIMEOUT, backend: str = "auto"
) -> Iterator[tuple[Comm, Watchdog | None]]:
    """The ranks of this run, and their watchdog; alone when there is one process."""
    backend = choose_transport(backend, device)
    if ranks() == 1:
        yield Comm(), None
        return
    # The watch gives up first, and says why; this is for the case that it cannot.
    limit = datetime.timedelta(seconds=(LONG + 1) * timeout)
    store = meeting_point(limit)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank(),
            world_size=ranks(),
            timeout=limit,
            device_id=device if device.type == "cuda" and backend != "gloo" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        why = str(e).splitlines()[0].rstrip(".")
        raise UserError(f"Not all of {ranks()} ranks came within {limit.total_seconds():g} s: {why}.") from e
    comm = Comm.of(None)
    store = PrefixStore("watchdog", store.clone())
    watchdog = Watchdog(comm.rank, comm.size, store, timeout)
    try:
        yield comm, watchdog
    except UserError as e:
        e.mine_to_tell = watchdog.first()
        leave_after_first(store)
        raise
    except Exception as e:
        watchdog.explain(e)
        get_error_handler().record_exception(e)  # for torchrun, as its decorator `record` does
        raise
    finally:
        watchdog.close()
        dist.destroy_process_group()


def leave_after_first(store: Any) -> None:
    """Of ranks that end together rank 0 goes first: it removes the run folder that it had made, and torchrun kills the
    others as soon as one has ended. An error that rank 0 does not share is waited for in vain."""
    if is_first():
        store.set("first left", "")
    with contextlib.suppress(dist.DistStoreError):
        store.wait(["first left"], datetime.timedelta(seconds=GRACE))


def meeting_point(limit: datetime.timedelta) -> Any:
    """The store where the ranks meet. torchrun keeps it, so it outlives any rank; without torchrun rank 0 does.

    It also outlives an attempt, and what was said in one must not be heard in the next: neither who told of a failure
    nor the addresses at which a rank that is gone was to be found.
    """
    address, port = os.environ.setdefault("MASTER_ADDR", "localhost"), variable("MASTER_PORT", 1, 2**16 - 1)
    try:
        # The parent of these ranks may have been killed since; then they must end themselves.
        soon = min(datetime.timedelta(seconds=REACHED), limit) if launched() else limit
        store, *_ = next(rendezvous("env://", rank(), ranks(), timeout=soon))
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        if "EADDRINUSE" in str(e):
            raise UserError(
                f"The port of {address}:{port}, where the ranks meet, is taken; choose another with --master-port."
            ) from e
        why = str(e).splitlines()[0].rstrip(".")
        raise UserError(f"The ranks cannot meet at {address}:{port}: {why}. Is rank 0 running there?") from e
    store.set_timeout(limit)
    return PrefixStore(f"speedrun/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def handshake(comm: Comm, facts: Mapping[str, Any]) -> None:
    """All ranks must be about to do the same; otherwise one sentence says which one differs in what."""
    gathered = comm.all_gather_object(dict(facts))
    for rank, theirs in enumerate(gathered):
        for key, value in gathered[0].items():
            if theirs[key] != value:
                raise UserError(
                    f"Rank {rank} differs from rank 0 in {key}: {theirs[key]} instead of {value}. "
                    "Start all ranks with the same command, package and data."
                )


def launch(processes: int, args: Sequence[str], max_restarts: int = 0) -> int:
    """Run `speedrun` with these arguments in that many processes on this machine, by torchrun's own machinery."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"speedrun-{os.getpid()}",
        monitor_interval=0.1,
        max_restarts=max_restarts,
    )
    command = [sys.executable, "-u", "-m", "speedrun", *args]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as e:
        for rank, failure in e.failures.items():
            if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # that one comes from the launcher itself
                name = signal.Signals(-failure.exitcode).name
                print(f"speedrun: rank {rank} was ended by {name}.", file=sys.stderr)
        codes = {failure.exitcode for failure in e.failures.values()}
        # A mistake, or a rank was stopped and so all were; otherwise one was lost.
        return next((code for code in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM) if code in codes), 1)
    except SignalException as e:  # it was passed on to the ranks, and they have ended
        return 128 + e.sigval
    return 0
