"""Several processes as one run: joining them, checking that they agree, and what only rank 0 does.

    torchrun --standalone --nproc_per_node=2 -m speedrun train     or     speedrun train --nproc 2

torchrun starts the processes and tells each its rank in the environment. A single process needs none of this.
"""

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from speedrun.errors import UserError
from speedrun.optim.pipeline import Team

PATIENCE = 300.0  # seconds a rank waits for another before it gives up; compiling takes the longest


def ranks() -> int:
    """How many processes this run was started with."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def neighbours() -> int:
    """How many of them share this machine's cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    return ranks() == 1 or os.environ["RANK"] == "0"


def speaks(error: UserError) -> bool:
    """Whether this rank tells it: of those who met an error together one does, elsewhere one on each machine."""
    return getattr(error, "mine_to_tell", ranks() == 1 or os.environ.get("LOCAL_RANK", "0") == "0")


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Team]:
    """The ranks of this run; alone when there is one process."""
    if ranks() == 1:
        yield Team()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=PATIENCE))
    store = dist.distributed_c10d._get_default_store()
    try:
        yield Team.of(None)
    except UserError as e:
        e.mine_to_tell = store.add("told", 1) == 1  # type: ignore[attr-defined]
        raise
    finally:
        dist.destroy_process_group()


def handshake(team: Team, facts: Mapping[str, Any]) -> None:
    """All ranks must be about to do the same; otherwise one sentence says which one differs in what."""
    everybody = team.everybodys(dict(facts))
    for rank, theirs in enumerate(everybody):
        for key, value in everybody[0].items():
            if theirs[key] != value:
                raise UserError(
                    f"Rank {rank} differs from rank 0 in {key}: {theirs[key]} instead of {value}. "
                    "Start all ranks with the same command, package and data."
                )


class Muted:
    """Stands in for the run folder on every rank but the first: nothing is written twice."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"
        self.description: dict[str, Any] = {}

    def log(self, line: str, *, show: bool = True) -> None:
        """Rank 0 says it."""

    def metric(self, values: Mapping[str, Any]) -> None:
        """Rank 0 writes it."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Rank 0 writes it."""


def launch(processes: int, args: Sequence[str]) -> int:
    """Run `speedrun train` with these arguments in so many processes on this machine, by torchrun's own machinery."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 1:
        raise UserError(f"--nproc is {processes}; it must be at least 1.")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"speedrun-{os.getpid()}",
        monitor_interval=0.1,
        max_restarts=0,
    )
    command = [sys.executable, "-u", "-m", "speedrun", "train", *args]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as e:
        codes = [failure.exitcode for failure in e.failures.values()]
        return 2 if 2 in codes else 1
    return 0
