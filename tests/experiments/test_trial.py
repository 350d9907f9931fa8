"""Whoever is told to end takes its runs along."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speedrun.data.shards import TokenFolder
from speedrun.errors import Terminated
from speedrun.experiments.race import change_recipe
from speedrun.experiments.trial import ChildProcesses, handle_sigterm, was_stopped, write_recipe
from speedrun.recipes import get_recipe
from speedrun.training.config import Recipe, differences
from speedrun.training.runlog import read_result, read_run
from tests.experiments.conftest import SMALL, Speedrun
from tests.experiments.test_race import start, wait_for

SLEEP = [sys.executable, "-c", "import time; print('awake', flush=True); time.sleep(600)"]


def test_sigterm_is_an_exception_inside_and_what_it_was_outside() -> None:
    @handle_sigterm()
    def told_to_end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        told_to_end()
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_exception_ends_the_processes_of_all_threads() -> None:
    children, waiting = ChildProcesses(), []

    def fail_while_they_run() -> None:
        with ThreadPoolExecutor(2) as pool, children:
            waiting.extend(pool.submit(children.run, SLEEP) for _ in range(3))  # two at once; the third never begins
            while len(children.alive) < 2:
                time.sleep(0.01)
            raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fail_while_they_run()
    assert time.monotonic() - began < 60
    assert children.alive == set()
    assert [type(one.exception()) for one in waiting] == [KeyboardInterrupt, KeyboardInterrupt, Terminated]


def test_the_errors_of_a_process_and_how_it_ends() -> None:
    with ChildProcesses() as children:
        done = children.run([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"])
        assert (done.returncode, done.stderr) == (1, "err\n")
        stopper = threading.Timer(0.5, lambda: [child.send_signal(signal.SIGTERM) for child in list(children.alive)])
        stopper.start()
        with pytest.raises(KeyboardInterrupt):
            children.run(SLEEP)
    assert [was_stopped(code) for code in (0, 1, 2, 130, 143, -2, -15, -9)] == [False] * 3 + [True] * 4 + [False]


def test_a_process_that_takes_its_time_to_end_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C, after which Popen itself waits for a quarter of a second alone."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        pytest.skip("this process was started with SIGINT ignored, as a shell starts background jobs")
    slow = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(143)))"
    program = f"{slow}; open(sys.argv[1], 'w').close(); time.sleep(600)"
    children = ChildProcesses()

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)  # another thread that took it would not end the waiting

    main = threading.main_thread()
    threading.Thread(target=interrupt).start()
    ended: list[int] = []
    terminate = subprocess.Popen.terminate
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda child: (ended.append(child.pid), terminate(child))[1])
    with pytest.raises(KeyboardInterrupt):
        children.run([sys.executable, "-c", program, str(tmp_path / "ready")])
    with pytest.raises(ProcessLookupError):
        os.kill(ended[0], 0)


def test_sigterm_to_an_ablation_ends_both_of_its_runs(held_out: TokenFolder, tmp_path: Path) -> None:
    line = f"ablate --recipe adamw --set {SMALL} schedule.steps=100000 --jobs 2 --compile False --out here"
    running = start([*shlex.split(line), "--data", str(held_out.path)], tmp_path)

    def both_train() -> bool:
        return len(list((tmp_path / "here" / "runs").glob("*/metrics.jsonl"))) == 2

    wait_for(both_train, running)
    os.kill(running.pid, signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (143, "speedrun: stopped\n")
    results = [read_result(folder).status for folder in (tmp_path / "here" / "runs").iterdir()]
    assert results == ["interrupted"] * 2
    assert not (tmp_path / "here" / "rows.jsonl").exists()


# -------------------------------------------------------------------- stored recipes


def small_recipe() -> Recipe:
    return change_recipe("adamw", "pocket", [*SMALL.split(), "schedule.steps=3"])[1]


def test_a_stored_recipe_is_trained_and_flags_change_it(
    held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "mine.json", small_recipe())
    line = f"train --recipe {recipe} --data {held_out.path} --dtype float32 --threads 1 --compile False --sample False"
    assert speedrun(*line.split(), "--save", "False", "--out", "as-it-is")[0] == 0
    assert read_run(Path("as-it-is")).recipe == small_recipe()
    assert speedrun(*line.split(), "--save", "False", "--out", "changed", "--optim.lr", "0.25", "--steps", "2")[0] == 0
    assert differences(small_recipe(), read_run(Path("changed")).recipe) == [
        "optim.lr: 0.01 -> 0.25",
        "schedule.steps: 3 -> 2",
    ]


@pytest.mark.parametrize("command", ["train", "race", "sweep", "ablate"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "mine.json is missing. Name the file of a stored recipe, or one that `speedrun recipes` lists."),
        ("{", "mine.json is damaged: "),
        ("[]", "mine.json is damaged: it is not a JSON object."),
        ('{"format": 1}', "mine.json was written by an older version of speedrun (format 1; this one reads 2)"),
        ('{"format": 2}', "mine.json is damaged: Object missing required field `name`."),
        ('{"format": 2, "name": "a", "track": "pocket", "about": "", "lr": 1}', "mine.json has the field 'lr', which"),
        ('{"format": 2, "name": "a", "track": "pocket", "about": "", "optim": {"lr": -1.0}}', "mine.json is damaged"),
        ("short", "mine.json has the size of track 'short', not 'pocket'; pass --track short."),
    ],
)
def test_a_recipe_file_that_cannot_be_used_is_named(
    command: str, content: str | None, sentence: str, speedrun: Speedrun, tmp_path: Path
) -> None:
    if content == "short":
        write_recipe(tmp_path / "mine.json", get_recipe("normuon", "short"))
    elif content is not None:
        (tmp_path / "mine.json").write_text(content)
    code, _, err = speedrun(command, "--recipe", "mine.json", "--track", "pocket")
    assert code == 2
    assert err.startswith(f"speedrun: {sentence}")
    assert len(err.splitlines()) == 1
