"""Races whose runs are several processes: planned, stopped, killed, continued and verified."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.experiments.plan import Entry, Plan
from speedrun.experiments.race import RaceRunner
from speedrun.experiments.records import describe, readme
from speedrun.experiments.sweep import SweepRunner
from speedrun.experiments.trial import Trial
from speedrun.experiments.verdict import judge, read_summary
from speedrun.experiments.verification import examine
from speedrun.report.race_page import plan_section
from speedrun.training.runlog import read_metrics, read_run
from tests.distributed.test_faults import children
from tests.experiments.conftest import SMALL, Speedrun, words
from tests.experiments.test_race import start, wait_for

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


def ranks_here(runner: RaceRunner, entry: Entry, path: Path, tick: object) -> None:
    """A run of a race as copies of this process: real ranks without the seconds that starting Python takes."""
    command = runner.trial(entry, path).command[3:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = runner.plan.settings.nproc
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                sys.argv = ["speedrun", *command]
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                    os._exit(cli.main(command))
            finally:
                os._exit(99)
    assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0] * size


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    return [found for child in children(pid) for found in (child, *below(child))]


def running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def training(run: Path, attempts: int = 0) -> Callable[[], bool]:
    """Whether a run has done some steps, after so many earlier attempts were set aside."""

    def condition() -> bool:
        aside = len(list((run.parents[1] / "interrupted").glob(f"{run.name}-*")))
        return aside == attempts and (run / "metrics.jsonl").exists() and len(read_metrics(run, "train")) > 3

    return condition


def kill_race_and_launcher(race: subprocess.Popen[str]) -> list[int]:
    """Returns the ranks, whom nobody has told anything."""
    launcher = children(race.pid)[0]
    ranks = children(launcher)
    os.kill(race.pid, signal.SIGKILL)
    os.kill(launcher, signal.SIGKILL)
    race.communicate()
    return ranks


@needs_proc
def test_a_race_in_two_processes_stopped_killed_and_continued(
    held_out: TokenFolder, tmp_path: Path, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = words("--runs 4 --seed 3 --nproc 2 --out race", held_out.path, steps=120, against_steps=10)
    folder = tmp_path / "race"
    race = start(line, tmp_path)
    wait_for(training(folder / "runs/001-A"), race)
    family = below(race.pid)
    assert len(family) == 3
    os.kill(race.pid, signal.SIGTERM)
    _, err = race.communicate()
    assert (race.returncode, err) == (143, "speedrun: stopped\n")
    assert not any(map(running, family))
    race = start(line, tmp_path)
    wait_for(training(folder / "runs/001-A", attempts=1), race)
    ranks = kill_race_and_launcher(race)
    monkeypatch.setattr(RaceRunner, "execute", ranks_here)
    code, out, err = speedrun(*line)
    assert (code in (0, 1), err) == (True, "")
    assert not any(map(running, ranks))
    assert "001-A was interrupted; it starts again from step 0" in out
    assert sorted(p.name for p in (folder / "interrupted").iterdir()) == ["001-A-1", "001-A-2"]
    assert [read_run(folder / "runs" / e.name).world_size for e in Plan.read(folder).entries] == [2] * 8
    code, out, err = speedrun("verify", "race", "--replay", "--steps", "5")
    assert (code, err) == (0, "")
    assert out.count(": 2 processes trained it, one repeats it here") == 2
    code, _, err = speedrun(*line, "--nproc", "1")
    assert code == 2
    assert "holds a race with another settings; a plan is not changed" in err


@needs_proc
@pytest.mark.slow
def test_kill_minus_nine_with_a_launcher(held_out: TokenFolder, tmp_path: Path) -> None:
    """First the race alone is killed: its run goes on and is adopted. Then its launcher, too: that run starts again."""
    line = words("--runs 4 --seed 3 --nproc 2 --out race", held_out.path, steps=300, against_steps=100)
    folder = tmp_path / "race"
    race = start(line, tmp_path)
    wait_for(training(folder / "runs/001-A"), race)
    os.kill(race.pid, signal.SIGKILL)
    race.communicate()
    race = start(line, tmp_path)
    wait_for(training(folder / "runs/002-B"), race)
    kill_race_and_launcher(race)
    race = start(line, tmp_path)
    out, err = race.communicate()
    assert (race.returncode in (0, 1), err) == (True, "")
    assert "002-B was interrupted; it starts again from step 0" in out
    assert [p.name for p in (folder / "interrupted").iterdir()] == ["002-B-1"]
    found = examine(folder)
    assert found.problems == []
    assert len(found.runs) == 8


def test_somebody_who_stops_a_launcher_stops_the_race(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "command", [sys.executable, "-c", "import sys; sys.exit(143)"])
    code, out, err = speedrun(*words("--runs 2 --nproc 2", held_out.path))
    assert (code, err) == (130, "speedrun: stopped\n")
    assert "The same command continues" in out


def test_what_a_rank_says_is_told_and_not_the_log_of_its_launcher(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; sys.exit('speedrun: The disk is full.\\nE1118 failed (exitcode: 2) local_rank: 0')"
    monkeypatch.setattr(Trial, "command", [sys.executable, "-c", program])
    assert (
        "Run 001-A ended without a result: The disk is full. Repair" in speedrun(*words("--runs 2", held_out.path))[2]
    )


def test_more_processes_than_gpus_are_refused(
    held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    fields = SMALL.split()
    for line in (words("", held_out.path), ["sweep", "--fix", *fields], ["ablate", "--recipe", "adamw"]):
        code, _, err = speedrun(*line, "--nproc", "2")
        assert code == 2
        assert "2 processes were asked for, but torch sees 1 GPU here" in err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_hands_it_to_its_trials_and_skips_candidates_that_cannot_run(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[int] = []

    def execute(runner: SweepRunner, kind: str, changes: dict, seed: int, steps: int, key: str) -> dict:
        trials.append(runner.args.nproc)
        row = {"key": key, "kind": kind, "fields": changes, "seed": seed, "steps": steps, "minutes": 0.0}
        return row | {"status": "ok", "loss": 1.0, "train_time": 1.0, "tokens": 1}

    monkeypatch.setattr(SweepRunner, "execute", execute)
    line = ["sweep", "--recipe", "adamw", "--data", str(held_out.path), "--nproc", "2", "--method", "grid"]
    fields = [*SMALL.split(), "model.head.fp8=True"]
    code, out, _ = speedrun(*line, "--fix", *fields, "--vary", "schedule.batch_size=1,4,4096")
    assert code == 0
    assert trials == [2]
    assert "skipped" in out
    assert "There are 2 ranks, but a step has only 1 row to deal out" in out
    assert "rounds to zero in 8-bit floats" in " ".join(out.split())


def test_a_challenge_has_as_many_processes_as_the_race(
    raced: Path, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("speedrun.cli.challenge.run_plan", lambda _, make, *__: plans.append(make(None)) or sys.exit(0))
    for more in ([], ["--nproc", "2"]):
        speedrun("challenge", raced, *more)
    assert [plan.settings.nproc for plan in plans] == [1, 2]
    code, _, err = speedrun("challenge", raced, "--nproc", "0")
    assert (code, err) == (2, "speedrun: --nproc is 0; it must be at least 1.\n")


def test_records_and_pages_tell_it_if_it_is_more_than_one(raced: Path) -> None:
    plan = Plan.read(raced)
    rows = [read_summary(raced / "runs" / e.name, e) for e in plan.entries]
    for nproc, told in ((1, False), (2, True)):
        object.__setattr__(plan.settings, "nproc", nproc)
        verdict = judge(plan, rows, plan.looks[-1], "")
        record = describe("mine", plan, verdict, None)
        assert (f", {nproc} processes. Official time" in readme(record, plan, verdict)) == told
        assert (("setting: nproc", nproc) in plan_section(plan).data) == told
