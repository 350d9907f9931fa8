"""What is shown while something goes on."""

import io
import time

import pytest
from rich.console import Console

from speedrun.training import progress
from speedrun.training.progress import Progress, Status


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Status:
    found = Status()
    found.console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(progress, "status", found)
    monkeypatch.setattr(progress, "LINES_EVERY", 0.3)
    return found


def shown(status: Status) -> list[str]:
    assert isinstance(status.console.file, io.StringIO)
    return status.console.file.getvalue().splitlines()


def test_a_line_moves_while_nothing_else_is_said(status: Status) -> None:
    status.at("loading torch")
    for _ in range(100):
        time.sleep(0.05)
        if len(shown(status)) >= 3:
            break
    status.stop()
    assert shown(status)[:3] == ["loading torch", "loading torch, 0 s so far", "loading torch, 0 s so far"]
    said = len(shown(status))
    time.sleep(0.4)
    assert len(shown(status)) == said, "it has stopped"


def test_steps_are_shown_by_the_clock_not_each_of_them(status: Status) -> None:
    with Progress(1000) as report:
        report.line("device: cpu")
        report.at("compiling the training step")
        time.sleep(0.5)
        for done in range(1, 201):
            report.step(done, 4.0, 0.003, 1e6)
            time.sleep(0.003)
    lines = shown(status)
    assert lines[:2] == ["device: cpu", "compiling the training step"]
    steps = [line for line in lines if line.startswith("step ")]
    assert 1 <= len(steps) < 20
    assert "/1000  loss 4.000  3 ms/step  1,000,000 tok/s" in steps[0]


def test_a_quiet_report_says_nothing(status: Status) -> None:
    with Progress(10, quiet=True) as report:
        report.line("device: cpu")
        report.at("compiling")
        report.step(1, 1.0, 1.0, 1.0)
    assert shown(status) == []
    assert status._thread is None


def test_a_terminal_gets_one_bar_that_moves(status: Status) -> None:
    status.console = Console(file=io.StringIO(), width=200, force_terminal=True)
    status.at("loading torch")
    with Progress(10) as report:
        report.at("compiling the training step")
        time.sleep(0.3)
        report.step(3, 4.0, 0.1, 2048.0)
        time.sleep(0.3)
    status.stop()
    assert isinstance(status.console.file, io.StringIO)
    text = status.console.file.getvalue()
    for part in ("loading torch", "compiling the training step", "3/10", "loss 4.000"):
        assert part in text
