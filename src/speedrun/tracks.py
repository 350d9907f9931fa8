"""Tracks: what must be reached, on which tokens.

`pocket` is the embedded default; `short` and `medium` are the two tracks of the NanoGPT speedrun on FineWeb. A folder
made by `speedrun data encode` becomes a track of its own.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from speedrun.data import TokenFolder, pocket
from speedrun.data import load as fineweb
from speedrun.errors import UserError, nearest

# The mean of five fresh seeds of the tuned `adamw` recipe (4.2895) plus two standard deviations (0.0069), rounded up to
# 0.01. Fixed: the baseline may be replaced by a faster one, the target is not moved (docs/experiments.md).
POCKET_TARGET = 4.31


@dataclass(frozen=True)
class Track:
    name: str
    about: str
    target: float | None
    """Validation loss to reach, in nats per token; None: nothing is claimed."""
    locate: Callable[[], TokenFolder]
    """Finds the prepared tokens, or raises a UserError that says how to get them."""
    val_tokens: int | None = None
    """Predicted tokens of the split that validation covers, from its start; None: all of them."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of each token file that is part of the track's definition."""
    once: bool = False
    """Whether a run sees each training token at most once, so that one which needs more than there are is refused."""
    compiler_flags: bool = True
    """Whether a recipe may tell torch.compile more than what to compile."""
    checkpoints: bool = True
    """Whether a run writes checkpoints on the way by default. They are inside the clock."""


TRACKS = {
    t.name: t
    for t in (
        Track(
            name="pocket",
            about="18 MB of public-domain books, 4096-entry BPE; minutes on two CPU cores",
            target=POCKET_TARGET,
            locate=pocket.load,
            files=pocket.POCKET_FILES,
        ),
        Track(
            name="short",
            about="FineWeb, GPT-2 tokens, the NanoGPT speedrun's first track",
            target=3.28,
            locate=fineweb,
            val_tokens=10_485_760,
            once=True,
            compiler_flags=False,
            checkpoints=False,
        ),
        Track(
            name="medium",
            about="FineWeb, GPT-2 tokens, the NanoGPT speedrun's second track",
            target=2.92,
            locate=fineweb,
            val_tokens=10_485_760,
            once=True,
            checkpoints=False,
        ),
    )
}


def get_track(name: str) -> Track:
    if name not in TRACKS:
        raise UserError(f"Unknown track {name!r}.{nearest(name, TRACKS)}")
    return TRACKS[name]


def find_track(
    track: str = "pocket", data: Path | None = None, target: float | None = None, val_tokens: int | None = None
) -> Track:
    """A track by name, or one of your own tokens. With `val_tokens` validation is cut short: no target then."""
    if target is not None and data is None:
        raise UserError(f"--target {target} goes with --data; the target of track {track!r} is fixed.")
    found = own_track(data, target) if data else get_track(track)
    return dataclasses.replace(found, val_tokens=val_tokens, target=None) if val_tokens is not None else found


def own_track(folder: Path, target: float | None) -> Track:
    """A track made of your own token folder."""
    if target is not None and not target > 0:
        raise UserError(f"The target {target} is not a loss that can be reached; it must be above 0.")
    tokens = TokenFolder.read(folder)
    return Track(
        name="own",
        about=f"your tokens in {folder}",
        target=target,
        locate=lambda: TokenFolder.read(folder),
        files={name: file.sha256 for name, file in tokens.files.items()},
    )
