"""Real processes that talk through gloo, for tests."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

SECONDS = 60  # how long a rank waits for another before the test fails

# Importing torch takes seconds. A server does it once, computes nothing, and forks the ranks.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "speedrun.cli", "pytest"]
)


def _rank(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting-point",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    dist.barrier()  # all are connected before the first one may end
    try:
        torch.save(function(rank, size, *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def together(folder: Path, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, size, *args)` returns on each of `size` ranks. It must be a function of a module."""
    folder = folder / f"{function.__name__}-{size}-{len(list(folder.iterdir()))}"
    folder.mkdir()
    multiprocessing.start_processes(_rank, (size, str(folder), function, args), size, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
