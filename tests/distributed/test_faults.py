"""Losing a process: all ranks end, one sentence says which one it was and why, and restarts give the same bits."""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.recipes import get_recipe
from speedrun.training import watchdog
from speedrun.training.config import with_fields
from speedrun.training.distributed import choose_transport, meeting_point
from speedrun.training.run import check_ranks
from speedrun.training.watchdog import Watchdog
from tests.distributed.test_training import FLAGS, metrics

# `speedrun train`, but one rank meets with something after a step of the first attempt.
ACCIDENT = """
import os, signal, sys, time
from speedrun import errors
from speedrun.cli import main
from speedrun.errors import UserError
from speedrun.training import distributed
from speedrun.training.loop import Loop

kind, rank, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
log_step = Loop.log_step

def accident(self, stage, loss):
    log_step(self, stage, loss)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == rank and stage.step == step:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "hangs":
            time.sleep(1000)
        raise KeyError("an accident")

def mistake(self, saved):
    time.sleep(1.5 if os.environ["RANK"] == rank else 0)
    raise UserError("a mistake that all ranks find, one of them late")

def early(asked, device):
    if os.environ["RANK"] == rank:
        time.sleep(1.5)
    elif kind == "alone":
        return choose_transport(asked, device)
    raise UserError("a mistake before the ranks have met")

Loop.log_step = accident
if kind == "mistaken":
    Loop.run = mistake
if kind in ("early", "alone"):
    choose_transport = distributed.choose_transport
    distributed.choose_transport = early
if kind == "alone":
    errors.PRECEDENCE = 1.0
sys.exit(main(["train", *sys.argv[4:]]))
"""


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(folder: Path, accident: tuple[str, int, int], *args: str) -> Any:
    """Two ranks, one of which has an accident: (kind, rank, after which step)."""
    script = folder / "accident.py"
    script.write_text(ACCIDENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--monitor-interval=0.1", str(script), *map(str, accident), *args]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200, env=ONE_THREAD)
    done.seconds = time.monotonic() - start  # type: ignore[attr-defined]
    return done


def told(done: Any) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("speedrun: ")]


@pytest.fixture
def flags(tokens: TokenFolder) -> list[str]:
    return [*FLAGS, "--data", str(tokens.path), "--checkpoint-every", "3", "--out", "run"]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("killed", "rank 1 is gone: no sign of life since it was"),
        ("raises", "rank 1 failed while training the weights in step 4: KeyError: 'an accident'"),
        ("hangs", "rank 1 hangs: training the weights in step 4 for"),
        pytest.param("stopped", "rank 1 is gone: no sign of life since it was", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_and_one_sentence_says_why(kind: str, sentence: str, flags: list[str], tmp_path: Path) -> None:
    done = torchrun(tmp_path, (kind, 1, 4), *flags, "--timeout", "60" if kind == "stopped" else "3")
    assert done.returncode == 1
    assert len(told(done)) == 1, done.stderr
    assert sentence in told(done)[0]
    if kind == "raises":
        cause = done.stderr.split("Root Cause")[1]
        assert "KeyError: 'an accident'" in cause, "torchrun tells it, too"
        assert "rank      : 1" in cause
    assert done.seconds < (90 if kind == "stopped" else 60), "torchrun waits 30 s before it kills one that is stopped"
    assert not (tmp_path / "run" / "result.json").exists(), "so that it can be resumed"


def test_ranks_that_find_a_mistake_leave_nothing_behind_even_if_the_first_is_the_last(
    flags: list[str], tmp_path: Path
) -> None:
    """torchrun kills the ranks that are left as soon as one has ended; rank 0 has a folder to remove before."""
    done = torchrun(tmp_path, ("mistaken", 0, 0), *flags)
    assert done.returncode == 1, "torchrun's own"
    assert len(told(done)) == 1, done.stderr
    assert "a mistake that all ranks find" in told(done)[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "rank"), [("early", 0), ("alone", 1)])
def test_what_ranks_find_before_they_have_met_is_told_once(
    kind: str, rank: int, flags: list[str], tmp_path: Path
) -> None:
    """By the first, even if it comes last; by another, if the first does not find it."""
    done = torchrun(tmp_path, (kind, rank, 0), *flags)
    assert done.returncode == 1, "torchrun's own"
    assert [line for line in told(done) if "before the ranks have met" in line] == told(done), done.stderr
    assert len(told(done)) == 1, done.stderr


def children(pid: int) -> list[int]:
    """Processes that a process has started, without asking anybody but the kernel."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_run_that_lost_a_process_goes_on_by_itself_to_the_same_bits(flags: list[str], tmp_path: Path) -> None:
    """As a person would: one command, and a rank is killed from outside."""
    flags += ["--nproc", "2", "--max-restarts", "1", "--schedule.steps", "60"]
    log = tmp_path / "log"

    def start(folder: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "speedrun", "train", *flags, "--out", folder]
        with open(log, "w") as f:
            return subprocess.Popen(command, stdout=f, stderr=f, cwd=tmp_path, env=ONE_THREAD)

    assert start("whole").wait(timeout=200) == 0, log.read_text()
    run = start("run")
    written = tmp_path / "run" / "metrics.jsonl"
    while not (written.exists() and written.read_text().count("train") >= 8):
        assert run.poll() is None, log.read_text()
        time.sleep(0.02)
    os.kill(children(run.pid)[1], signal.SIGKILL)
    assert run.wait(timeout=200) == 0, log.read_text()
    assert "resumed at step" in log.read_text()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["resumed"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all_ranks(number: signal.Signals, flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "speedrun", "train", *flags, "--nproc", "2", "--schedule.steps", "100000"]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=ONE_THREAD)
    written = tmp_path / "run" / "metrics.jsonl"
    while not (written.exists() and written.read_text().count("train") >= 8):
        assert run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    ranks = children(run.pid)
    assert len(ranks) == 2
    run.send_signal(number)
    assert run.wait(timeout=100) == 128 + number
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_no_rank_outlives_a_killed_launcher(flags: list[str], tmp_path: Path) -> None:
    """Nobody else would end them; the store where they met has gone with it."""
    command = [sys.executable, "-m", "speedrun", "train", *flags, "--nproc", "2", "--schedule.steps", "100000"]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=ONE_THREAD)
    written = tmp_path / "run" / "metrics.jsonl"
    while not (written.exists() and written.read_text().count("train") >= 8):
        assert run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    ranks = children(run.pid)
    assert len(ranks) == 2
    run.kill()
    run.wait()
    killed = time.monotonic()
    while any(psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() - killed < 60
        time.sleep(0.1)
    assert "the store where the ranks met is gone" in (tmp_path / "log").read_text()


def test_ranks_whose_launcher_is_gone_do_not_wait_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of a run is for ranks that are there; a store that torchrun keeps is there before them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("speedrun.training.distributed.REACHED", 0.5)
    began = time.monotonic()
    with pytest.raises(UserError, match="The ranks cannot meet at"):
        meeting_point(datetime.timedelta(seconds=1500))
    assert time.monotonic() - began < 60


# ---------------------------------------------------------------------------------------------- the watchdog alone


ENDS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # as a process would


@pytest.fixture
def watchdogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Watchdog], list[str]]]:
    """Those of three ranks, here in one process, where nobody dies; and what they would tell."""
    told: list[str] = []
    monkeypatch.setattr(watchdog, "BEAT", 0.02)
    monkeypatch.setattr(watchdog.os, "_exit", sys.exit)
    monkeypatch.setattr(Watchdog, "tell", lambda _, why: told.append(why))
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(3) as pool:  # each waits for the others
        found = list(pool.map(lambda rank: Watchdog(rank, 3, store, 2.0), range(3)))
    yield found, told
    for one in found:
        one.close()


@ENDS
def test_the_rank_without_signs_of_life_is_named(watchdogs: tuple[list[Watchdog], list[str]]) -> None:
    (first, second, third), told = watchdogs
    for one in (first, second, third):
        one.progress("computing step 7", compiling=True)
    time.sleep(0.3)
    assert told == []
    second.close()
    first.thread.join(60)
    assert told[0] == "rank 1 is gone: no sign of life since it was computing step 7"


@ENDS
def test_those_who_are_behind_are_named(watchdogs: tuple[list[Watchdog], list[str]]) -> None:
    (first, second, third), told = watchdogs
    for one in (first, second, third):
        one.progress("reading the batch of step 5")
    second.progress("computing step 5")
    first.thread.join(60)
    assert told[0].startswith("ranks 0, 2 hang: reading the batch of step 5 for ")


# ------------------------------------------------------------------------------------------------- bad input


def test_what_is_asked_for_must_be_there() -> None:
    cpu = torch.device("cpu")
    assert choose_transport("auto", cpu) == choose_transport("gloo", cpu) == "gloo"
    assert choose_transport("auto", torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    with pytest.raises(UserError, match="--backend nccl needs a GPU, and the device is cpu"):
        choose_transport("nccl", cpu)
    with pytest.raises(UserError, match="--backend is 'mpi'"):
        choose_transport("mpi", cpu)
    recipe = with_fields(get_recipe("adamw", "pocket"), {"schedule.batch_size": 3})
    check_ranks(recipe, 3)
    with pytest.raises(UserError, match="There are 4 ranks, but a step has only 3 rows"):
        check_ranks(recipe, 4)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--nproc", "2", "--backend", "nccl"], "--backend nccl needs a GPU"),
        (["--nproc", "2", "--max-restarts", "-1"], "--max-restarts is -1"),
        (["--timeout", "0"], "--timeout is 0.0; it must be above 0."),
        (["--max-restarts", "1"], "--max-restarts 1 goes with --nproc"),
    ],
)
def test_bad_input_is_told_once(more: list[str], sentence: str, flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "speedrun", "train", *flags, *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=ONE_THREAD)
    assert done.returncode == 2, done.stderr
    assert len(told(done)) == 1, done.stderr
    assert sentence in told(done)[0]
    assert not (tmp_path / "run").exists()


def test_restarts_need_a_folder_to_find_again(flags: list[str], tmp_path: Path) -> None:
    env = {**ONE_THREAD, "TORCHELASTIC_MAX_RESTARTS": "1"}  # as torchrun --max-restarts=1 sets it
    command = [sys.executable, "-m", "speedrun", "train", *flags[:-2]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=env)
    assert done.returncode == 2
    assert "pass --out FOLDER" in told(done)[0]


def test_a_taken_port_is_named(flags: list[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "speedrun", "train", *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env={**env, "MASTER_PORT": str(port)}
        )
    assert done.returncode == 2, done.stderr
    assert f"127.0.0.1:{port}, where the ranks meet, is taken" in told(done)[0]
