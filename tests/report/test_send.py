"""Runs handed to trackers: real event files, read back with the tracker's own reader."""

import dataclasses
import importlib.util
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedrun import cli
from speedrun.report import send
from speedrun.report.pages import page_of
from speedrun.report.send import measured
from speedrun.training.runlog import LINES, TrainLine, read_metrics
from tests.conftest import make_token_folder

SMALL = (
    "model.num_layers=1 model.dim=32 model.num_heads=2 schedule.batch_size=2 schedule.seq_len=32 validation.seq_len=32"
)
SMALL += " validation.batch_size=8 validation.every=4 schedule.steps=10"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of ten steps. Nobody writes to it."""
    root = tmp_path_factory.mktemp("sent")
    tokens = make_token_folder(root / "tokens")
    fields = [word for pair in SMALL.split() for word in (f"--{pair.split('=')[0]}", pair.split("=")[1])]
    command = ["train", "--data", str(tokens.path), "--recipe", "adamw", "--compile", "False", "--threads", "1"]
    assert cli.main([*command, *fields, "--sample", "False", "--out", str(root / "run")]) == 0
    return root / "run"


class Heard:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float], float]] = []
        self.summary: dict[str, Any] | None = None

    def log(self, step: int, values: dict[str, float], seconds: float) -> None:
        self.lines.append((step, values, seconds))

    def finish(self, summary: dict[str, Any]) -> None:
        self.summary = summary


def test_every_measurement_is_sent_once_in_order(done: Path) -> None:
    heard = Heard()
    assert send.send(done, heard, follow=False) == len(read_metrics(done)) == len(heard.lines)
    steps = [step for step, _, _ in heard.lines]
    assert steps == sorted(steps)
    losses = [(step, v["train/loss"]) for step, v, _ in heard.lines if "train/loss" in v]
    assert losses == [(m["step"] + 1, m["loss"]) for m in read_metrics(done, "train")]
    last, values, _ = heard.lines[-1]
    assert (last, values["tokens"]) == (10, 10 * 2 * 32)
    assert heard.summary is not None
    assert heard.summary["status"] == "ok"


def test_following_sends_what_comes_and_ends_with_the_run(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that grows under the reader's eyes, with a line that is half written for a while."""
    monkeypatch.setattr(send, "PAUSE", 0.01)
    copy = tmp_path / "growing"
    copy.mkdir()
    (copy / "run.json").write_bytes((done / "run.json").read_bytes())
    lines = (done / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    heard = Heard()
    follower = threading.Thread(target=send.send, args=(copy, heard, True))
    follower.start()
    with open(copy / "metrics.jsonl", "ab", buffering=0) as f:
        for line in lines[3:]:
            f.write(line[:10])
            time.sleep(0.02)
            f.write(line[10:])
    assert follower.is_alive()
    (copy / "result.json").write_bytes((done / "result.json").read_bytes())
    follower.join(timeout=30)
    assert not follower.is_alive()
    assert heard.lines == list(measured(done))


def test_tensorboard_shows_the_losses(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["send", str(done), "--to", "tensorboard", "--out", str(tmp_path / "events"), "--project", "mine"]
    assert cli.main(command) == 0
    assert "measurements sent to tensorboard" in capsys.readouterr().out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "events/mine/run"))
    found.Reload()
    sent = [(e.step, e.value) for e in found.Scalars("train/loss")]
    assert sent == [(m["step"] + 1, pytest.approx(m["loss"])) for m in read_metrics(done, "train")]
    assert [e.step for e in found.Scalars("val/loss")] == [m["step"] for m in read_metrics(done, "val")]
    assert cli.main(command) == 2  # a second time would double the curves
    assert "exists already" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_keeps_the_run_offline(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert cli.main(["send", str(done), "--to", "wandb", "--out", str(tmp_path)]) == 0
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = stored.read_bytes()
    assert b"train/loss" in content
    assert b"adamw" in content


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_keeps_the_run_in_its_database(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    assert cli.main(["send", str(done), "--to", "trackio", "--project", "mine"]) == 0
    (file,) = tmp_path.glob("mine*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(row[0]) for row in database.execute("select metrics from metrics order by step")]
    assert [r["train/loss"] for r in rows if "train/loss" in r] == [m["loss"] for m in read_metrics(done, "train")]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (lambda run: [run, "--to", "tensorbord"], "Did you mean"),
        (lambda run: [run.parent / "none", "--to", "tensorboard"], "There is no run folder"),
        (lambda run: [run, run, "--to", "tensorboard", "--follow"], "--follow goes with one run"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    args: Callable[[Path], list[Any]], sentence: str, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["send", *map(str, args(done))]) == 2
    assert sentence in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert cli.main(["send", str(done), "--to", "wandb"]) == 2
    assert "pip install wandb" in capsys.readouterr().err


def test_a_new_metric_of_the_steps_is_sent_and_drawn(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number a train line has: neither trackers nor pages list the metrics."""

    @dataclasses.dataclass(frozen=True)
    class WithNorm(TrainLine):
        grad_norm: float | None = None

    monkeypatch.setitem(LINES, "train", WithNorm)
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    lines = [{**m, "grad_norm": 1.5 + m["step"]} if m["kind"] == "train" else m for m in read_metrics(done)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    norms = [values["train/grad_norm"] for _, values, _ in measured(folder) if "train/grad_norm" in values]
    assert norms == [1.5 + k for k in range(10)]
    assert 'aria-label="grad norm: 1.5 to 10.5."' in page_of(folder)
    assert "grad norm" not in page_of(done)
