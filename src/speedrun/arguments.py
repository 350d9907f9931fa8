"""Arguments that several commands and functions take, declared once."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from speedrun.checks import Positive

T = TypeVar("T")


@dataclass(frozen=True)
class TrackArgs:
    track: str = "pocket"
    """Which track; `speedrun tracks` lists them. With --data: at the size of which track."""
    data: Path | None = None
    """A folder made by `speedrun data encode`, instead of a track's tokens."""


@dataclass(frozen=True)
class MachineArgs:
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the arithmetic of matmuls. On a CPU auto tries both and takes the faster one."""
    threads: Positive | None = None
    """CPU threads of each process; default: all usable cores, shared by all processes."""
    attention: str = "auto"
    """auto, or a backend by name, such as sdpa (torch's SDPA); `speedrun doctor` shows what auto takes, and why."""


@dataclass(frozen=True)
class Settings(MachineArgs):
    """How the runs of an experiment are executed, all alike."""

    compile: bool = True
    """Use torch.compile where it works."""
    nproc: Positive = 1
    """Processes of each run, on this machine."""


def narrow(args: Any, kind: type[T]) -> T:
    """The fields of `kind` alone, from arguments that have more."""
    return kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]
