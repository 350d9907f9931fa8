"""`speedrun data`: prepare, fetch, verify and make token folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Meta

from speedrun.checks import Positive
from speedrun.cli.common import dispatch, parse, say, unset
from speedrun.data import TokenFolder, fineweb, pocket
from speedrun.data import encode as encoding
from speedrun.errors import UserError, nearest, plural
from speedrun.recipes import default_for, get_recipe
from speedrun.tracks import get_track
from speedrun.training import usable_cores


@dataclass(frozen=True)
class Prepare:
    """Fetch, clean, split and encode the pocket corpus. Quick when it is already there."""


@dataclass(frozen=True)
class Fetch:
    """Download the tokens of the short and medium tracks: 200 MB per chunk of 100 M. Continues where it stopped."""

    dataset: Annotated[str, tyro.conf.Positional]
    """fineweb10B."""
    chunks: int | None = None
    """How many training chunks, 1 to 103; default: what the recipe needs."""
    recipe: str | None = None
    """For which recipe; default: that of `speedrun train`."""
    track: str | None = None
    """At the size of which track, short or medium; default: short."""


@dataclass(frozen=True)
class Verify:
    """Check every token file against its sha256."""

    folder: Annotated[Path | None, tyro.conf.Positional, unset("PATH")] = None
    """A folder made by `speedrun data encode` or `speedrun data fetch`; default: the pocket corpus."""


@dataclass(frozen=True)
class Encode:
    """Turn your own text into a token folder for `speedrun train --data`."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, unset("PATH ...")]
    """Text files, .jsonl files with a text field, or folders of them."""
    out: Path
    """The token folder to make."""
    tokenizer: str = "pocket"
    """`pocket`, `gpt2`, or the path of a tokenizer.json."""
    val_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Share of the documents that become the validation split."""
    processes: Positive | None = None
    """Worker processes; default: one per usable core. Does not change the result."""


def main(args: Sequence[str]) -> int:
    actions = (prepare, fetch, verify, encode)
    return dispatch(
        "speedrun data",
        {action.__name__: action for action in actions},
        args,
        "Prepare, fetch, verify and make token folders.",
    )


def prepare(args: Sequence[str]) -> int:
    parse(Prepare, "data prepare", args)
    return describe(pocket.prepare(notice=say))


def fetch(args: Sequence[str]) -> int:
    given: Fetch = parse(Fetch, "data fetch", args)
    if given.dataset != fineweb.NAME:
        raise UserError(f"Unknown dataset {given.dataset!r}.{nearest(given.dataset, [fineweb.NAME])}")
    chunks = given.chunks
    if chunks is None:
        track = get_track(given.track or "short")
        if track.locate is not fineweb.load:
            raise UserError(f"Track {track.name!r} does not use {fineweb.NAME}; choose short or medium.")
        recipe = get_recipe(given.recipe or default_for(track.name), track.name)
        tokens = recipe.schedule.tokens
        chunks = fineweb.chunks_needed(tokens, recipe.schedule.seq_len, recipe.loader)
        say(f"{recipe.name} at {recipe.track} size trains on {plural(tokens, 'token')}: {plural(chunks, 'chunk')}")
    elif given.recipe or given.track:
        raise UserError(f"--chunks {chunks} says it already; drop --recipe and --track.")
    folder = fineweb.fetch(chunks, say)
    try:
        folder = fineweb.add_tokenizer(folder)
    except UserError as e:  # the tokens are complete without it
        say(f"no tokenizer.json, so `speedrun sample` will not work for these tokens: {e}")
    return describe(folder)


def verify(args: Sequence[str]) -> int:
    given: Verify = parse(Verify, "data verify", args)
    tokens = TokenFolder.read(given.folder) if given.folder else pocket.load()
    tokens.verify()
    return describe(tokens)


def encode(args: Sequence[str]) -> int:
    given: Encode = parse(Encode, "data encode", args)
    tokens = encoding.encode_files(
        given.files,
        given.out,
        given.tokenizer,
        val_fraction=given.val_fraction,
        processes=usable_cores() if given.processes is None else given.processes,
        notice=say,
    )
    return describe(tokens)


def describe(tokens: TokenFolder) -> int:
    for name, file in sorted(tokens.files.items()):
        say(f"{name:18}  {file.tokens:>13,} tokens  sha256 {file.sha256[:16]}…")
    say(f"good: {tokens.path}")
    return 0
