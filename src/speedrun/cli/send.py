"""`speedrun send`: send a run to tensorboard, wandb or trackio."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedrun.cli.common import parse, say, unset
from speedrun.report import send


@dataclass(frozen=True)
class Send:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, unset("RUN ...")]
    """Run folders."""
    to: str
    """tensorboard, wandb or trackio."""
    project: str = "speedrun"
    """What the tracker files the runs under."""
    out: Path = Path("tracked")
    """Where tensorboard's event files, and what wandb keeps, are put."""
    follow: bool = False
    """Continue until the run ends."""


def main(args: Sequence[str]) -> int:
    given: Send = parse(Send, "send", args, about=send.__doc__)
    send.send_runs(**vars(given), say=say)
    return 0
