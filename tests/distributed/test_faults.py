"""Losing a process: all ranks end, one sentence says which one it was and why, and restarts give the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from speedrun.data.shards import TokenFolder
from tests.distributed.test_training import FLAGS, metrics

# `speedrun train`, but one rank meets with something after a step of the first attempt.
ACCIDENT = """
import os, signal, sys, time
from speedrun.cli import main
from speedrun.train.loop import Trainer

kind, rank, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
log_step = Trainer.log_step

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

Trainer.log_step = accident
sys.exit(main(["train", *sys.argv[4:]]))
"""


def torchrun(folder: Path, accident: tuple[str, int, int], *args: str, restarts: int = 0) -> Any:
    """Three ranks, one of which has an accident: (kind, rank, after which step)."""
    script = folder / "accident.py"
    script.write_text(ACCIDENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(script), *map(str, accident), *args]
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    done.seconds = time.monotonic() - start  # type: ignore[attr-defined]
    return done


def told(done: Any) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("speedrun: ")]


@pytest.fixture
def flags(tokens: TokenFolder) -> list[str]:
    return [*FLAGS, "--data", str(tokens.path), "--out", "run", "--checkpoint-every", "3"]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("killed", "rank 1 is gone: no sign of life since it was"),
        ("raises", "rank 1 failed while training the weights in step 4: KeyError: 'an accident'"),
        ("hangs", "rank 1 hangs: training the weights in step 4 for"),
    ],
)
def test_all_ranks_end_and_one_sentence_says_why(kind: str, sentence: str, flags: list[str], tmp_path: Path) -> None:
    done = torchrun(tmp_path, (kind, 1, 4), *flags, "--patience", "3")
    assert done.returncode == 1
    assert len(told(done)) == 1, done.stderr
    assert sentence in told(done)[0]
    assert done.seconds < 60
    assert not (tmp_path / "run" / "result.json").exists(), "so that it can be resumed"


def test_a_run_that_lost_a_process_goes_on_by_itself_to_the_same_bits(flags: list[str], tmp_path: Path) -> None:
    undisturbed = [*flags[:-3], "whole", *flags[-2:]]
    command = [sys.executable, "-m", "speedrun", "train", *undisturbed, "--nproc", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, env=env)
    assert whole.returncode == 0, whole.stderr
    done = torchrun(tmp_path, ("killed", 2, 7), *flags, restarts=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step 6" in done.stdout
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["resumed"]


def children(pid: int) -> list[int]:
    """Processes that a process has started, without asking anybody but the kernel."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_nproc_restarts_by_itself(flags: list[str], tmp_path: Path) -> None:
    """As a person would: one command, and a rank is killed from outside."""
    command = [sys.executable, "-m", "speedrun", "train", *flags, "--nproc", "2", "--max-restarts", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with open(log, "w") as f:
        run = subprocess.Popen(
            [*command, "--schedule.steps", "60"], stdout=f, stderr=subprocess.STDOUT, cwd=tmp_path, env=env
        )
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    while not (metrics_file.exists() and metrics_file.read_text().count("train") >= 5):
        assert run.poll() is None, log.read_text()
        time.sleep(0.02)
    os.kill(children(run.pid)[1], signal.SIGKILL)
    assert run.wait(timeout=200) == 0, log.read_text()
    assert "resumed at step" in log.read_text()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--backend", "nccl"], "--backend nccl needs a GPU"),
        (["--backend", "mpi"], "--backend is 'mpi'"),
        (["--order", "random"], "--order is 'random'"),
        (["--patience", "0"], "--patience is 0"),
        (["--schedule.rows", "1"], "There are 2 ranks, but a step has only 1 row to deal out"),
    ],
)
def test_bad_input_is_told_once(more: list[str], sentence: str, flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "speedrun", "train", *flags, "--nproc", "2", *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert len(told(done)) == 1, done.stderr
    assert sentence in told(done)[0]
    assert not (tmp_path / "run").exists()


def test_restarts_need_a_folder_to_find_again_and_several_processes(flags: list[str], tmp_path: Path) -> None:
    without = [*flags[:-4], *flags[-2:]]
    done = torchrun(tmp_path, ("killed", 0, 0), *without, restarts=1)
    assert done.returncode != 0
    assert "pass --out FOLDER" in told(done)[0]
    command = [sys.executable, "-m", "speedrun", "train", *flags, "--max-restarts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert "--max-restarts 1 goes with --nproc" in told(done)[0]


def test_a_taken_port_is_named(flags: list[str], tmp_path: Path) -> None:
    import socket

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
