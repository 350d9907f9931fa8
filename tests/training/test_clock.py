"""What the clock counts: with the default flags of the records' tracks, training alone, however slow the disk is."""

import dataclasses
import itertools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.recipes import RECIPES
from speedrun.tracks import TRACKS
from speedrun.training.runlog import read_result
from tests.training.tiny import TINY

SECONDS = 7.0  # that the disk takes for everything that must be durable


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes on the disk alone; computing takes nothing. Returns what it took, one entry for each wait."""
    waits: list[float] = []

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any, **options: Any) -> Any:
            waits.append(SECONDS)
            return call(*args, **options)

        return slowed

    for name in ("fsync", "replace", "rename"):
        monkeypatch.setattr(os, name, slow(getattr(os, name)))
    readings = itertools.count()
    watch = SimpleNamespace(perf_counter=lambda: sum(waits) + 1e-9 * next(readings))
    monkeypatch.setattr("speedrun.training.clock.time", watch)
    return waits


@pytest.mark.parametrize("track", ["short", "medium"])
@pytest.mark.parametrize(("flags", "checkpoints"), [("", 0), ("--checkpoint-every 5", 2)])
def test_nothing_but_training_and_the_checkpoints_asked_for_is_timed(
    track: str,
    flags: str,
    checkpoints: int,
    slow_disk: list[float],
    tokens: TokenFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A real run by the command line, on stand-ins for the track's tokens and for a recipe of its size."""
    monkeypatch.setitem(TRACKS, track, dataclasses.replace(TRACKS[track], locate=lambda: tokens, val_tokens=900))
    monkeypatch.setitem(RECIPES, "adamw", {track: lambda: dataclasses.replace(TINY, name="adamw", track=track)})
    out = tmp_path / "run"
    command = f"train --recipe adamw --track {track} --compile False --threads 1 --sample False --out {out} {flags}"
    assert cli.main(shlex.split(command)) == 1  # the target is not reached
    said = capsys.readouterr().out
    assert len(slow_disk) > 5, "the run folder and the final model are durable"
    assert (out / "checkpoints" / "step-000012").is_dir(), "the final model, outside of the clock"
    clock = read_result(out).train_time
    if checkpoints:
        assert clock >= SECONDS * checkpoints
    else:
        assert clock < 1e-3
    hint = f"no checkpoints on the way: the clock of track '{track}' would count them; --checkpoint-every 5 writes them"
    assert (hint in said) == (not checkpoints)


def test_the_pocket_track_goes_on_writing_them(tokens: TokenFolder, tmp_path: Path) -> None:
    flags = (
        "--recipe adamw --model.num-layers 1 --model.dim 32 --model.num-heads 2 --schedule.steps 4 --validation.every 2"
    )
    flags += " --schedule.batch-size 2 --schedule.seq-len 32 --validation.seq-len 32 --compile False"
    flags += " --threads 1 --sample False"
    assert cli.main(shlex.split(f"train {flags} --data {tokens.path} --out {tmp_path / 'run'}")) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
