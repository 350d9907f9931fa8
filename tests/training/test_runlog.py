"""The run folder keeps whole lines, every digit, and the story of its interruptions."""

import dataclasses
import errno
import json
import math
import os
import resource
import subprocess
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun import files
from speedrun.errors import UserError
from speedrun.recipes import get_recipe
from speedrun.training import runlog
from speedrun.training.config import Options
from speedrun.training.runlog import (
    Result,
    RunFolder,
    read_metrics,
    read_result,
    read_run,
    to_jsonable,
    train_line,
    val_line,
)

DESCRIPTION: dict[str, Any] = {
    "recipe": get_recipe("adamw", "pocket"),
    "track": "pocket",
    "target": 4.31,
    "seed": 7,
    "data": {"folder": "tokens", "files": {}},
    "options": Options(seed=7),
    "machine": ["device: cpu"],
    "threads": 1,
    "world_size": 1,
    "dtype": "float32",
}
RESULT = Result(
    status="interrupted",
    reason="signal 2",
    val_loss=None,
    losses={},
    steps=10,
    train_time=1.5,
    tokens=40,
    tokens_per_second=26.7,
    resumed=False,
    timed=False,
    peak_memory={"resident": 12.0},
    finished=runlog.now(),
    warmup_seconds=0.5,
    wall_seconds=2.0,
    cpu_seconds=3.0,
    machine_load=None,
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git and torch about themselves has tests of its own; here it would only take time."""
    monkeypatch.setattr(runlog, "describe_git", lambda: None)


def quiet(line: str) -> None:
    pass


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", DESCRIPTION, quiet)


def lines(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


# --- creating and opening -------------------------------------------------------------------------


def test_a_new_run_describes_itself(run: RunFolder) -> None:
    written = json.loads((run.path / "run.json").read_text())
    assert written["format"] == 2
    assert {k: written[k] for k in DESCRIPTION} == to_jsonable(DESCRIPTION)
    read = read_run(run.path)
    assert (read.recipe, read.options) == (DESCRIPTION["recipe"], DESCRIPTION["options"])
    assert written["interruptions"] == []
    assert written["started"].endswith("+00:00")
    assert written["devices"]
    assert written["command"]
    assert written["environment"]["packages"]["torch"] == torch.__version__
    assert len(written["source_sha256"]) == 64


def test_the_source_of_the_package_is_copied(run: RunFolder) -> None:
    package = Path(runlog.__file__).parents[1]
    copied = {p.relative_to(run.path / "source" / "speedrun") for p in (run.path / "source").rglob("*.py")}
    assert copied == {p.relative_to(package) for p in package.rglob("*.py")}
    here = Path("training/runlog.py")
    assert (run.path / "source" / "speedrun" / here).read_bytes() == (package / here).read_bytes()


def test_a_folder_with_files_in_it_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds files"):
        RunFolder.create(tmp_path, DESCRIPTION, quiet)
    with pytest.raises(UserError, match="in the way"):
        RunFolder.create(tmp_path / "mine.txt", DESCRIPTION, quiet)
    with pytest.raises(UserError, match="in the way"):
        RunFolder.create(tmp_path / "mine.txt" / "run", DESCRIPTION, quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_an_empty_folder_is_used_as_it_is(tmp_path: Path) -> None:
    inode = tmp_path.stat().st_ino
    RunFolder.create(tmp_path, DESCRIPTION, quiet)
    assert tmp_path.stat().st_ino == inode
    RunFolder.open(tmp_path, quiet)
    assert read_run(tmp_path).seed == 7


@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "run"
    if existing:
        path.mkdir()
    monkeypatch.setattr(runlog, "write_json", full)
    with pytest.raises(UserError, match="disk is full"):
        RunFolder.create(path, DESCRIPTION, quiet)
    assert list(tmp_path.rglob("*")) == ([path] if existing else [])


@dataclass(frozen=True)
class Recipe:
    lr: float
    dtype: torch.dtype
    betas: tuple[float, float]


def test_dataclasses_paths_dates_and_infinities_become_plain_json() -> None:
    given = {"recipe": Recipe(math.inf, torch.bfloat16, (0.9, 0.95)), "data": Path("a/b"), "day": date(2026, 2, 1)}
    assert to_jsonable(given) == {
        "recipe": {"lr": "inf", "dtype": "torch.bfloat16", "betas": [0.9, 0.95]},
        "data": "a/b",
        "day": "2026-02-01",
    }


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.unlink(), "is missing, so .* is no run folder"),
        (lambda p: p.write_text('{"seed": '), "damaged: Input data was truncated"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "damaged: JSON is malformed"),
        (lambda p: p.write_text("[1]"), "not a JSON object"),
        (lambda p: p.write_text('{"format": 2}'), "missing required field `recipe`"),
        (lambda p: (p.unlink(), p.mkdir()), "is a folder"),
    ],
)
def test_opening_a_damaged_run(run: RunFolder, damage: Any, says: str) -> None:
    damage(run.path / "run.json")
    with pytest.raises(UserError, match=says):
        RunFolder.open(run.path, quiet)


def test_opening_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run folder"):
        RunFolder.open(tmp_path / "nowhere", quiet)
    with pytest.raises(UserError, match="There is no run folder"):
        read_metrics(tmp_path / "nowhere", "val")


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_keep_every_bit(run: RunFolder) -> None:
    torch.manual_seed(0)
    losses = torch.randn(100).tolist() + torch.randn(100, dtype=torch.float64).tolist() + [1e-320, 0.1 + 0.2]
    for step, loss in enumerate(losses):
        run.metric({"step": step, "kind": "train", "loss": loss, "lr": 1.0, "time": 0.5})
    assert [m["loss"] for m in read_metrics(run.path, "train")] == losses


def test_each_line_is_there_when_metric_returns(run: RunFolder) -> None:
    for step in range(3):
        run.metric({"step": step, "kind": "train", "loss": 1.0, "lr": 1.0, "time": 0.5})
        assert len(lines(run)) == step + 1


def test_nan_and_inf_are_strings_in_the_file_and_floats_for_us(run: RunFolder) -> None:
    run.metric({"step": 1, "kind": "event", "loss": math.nan, "up": math.inf, "down": -math.inf, "all": [math.nan]})

    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (run.path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=strict)["all"] == ["nan"]
    assert (json.loads(text)["loss"], json.loads(text)["up"], json.loads(text)["down"]) == ("nan", "inf", "-inf")
    (read,) = read_metrics(run.path, "event")
    assert math.isnan(read["loss"])
    assert (read["up"], read["down"]) == (math.inf, -math.inf)


def test_kinds_are_read_apart_and_a_torn_line_does_not_count(run: RunFolder) -> None:
    run.metric({"step": 0, "kind": "train", "loss": 1.0, "lr": 1.0, "time": 0.5})
    run.metric({"step": 1, "kind": "val", "loss": 1.0, "losses": {}, "time": 0.5, "val_seconds": 0.1})
    with open(run.path / "metrics.jsonl", "a") as f:
        f.write('{"step": 1, "kind": "train", "lo')
    assert [m["step"] for m in read_metrics(run.path, "train")] == [0]
    assert [m["step"] for m in read_metrics(run.path / "metrics.jsonl", "val")] == [1]
    assert len(read_metrics(run.path)) == 2
    (run.path / "metrics.jsonl").write_text('{"step": 1, "ki')
    assert read_metrics(run.path) == []


@pytest.mark.parametrize("line", ['{"step": 1', "[]", '{"step": "1", "kind": "val"}', '{"step": 1}', "\0\0\0", ""])
def test_a_damaged_line_in_the_middle_is_named(run: RunFolder, line: str) -> None:
    good = '{"step": 0, "kind": "train", "loss": 1.0, "lr": 1.0, "time": 0.5}\n'
    (run.path / "metrics.jsonl").write_text(good + line + "\n" + good)
    with pytest.raises(UserError, match=r"Line 2 of .* is damaged"):
        read_metrics(run.path)


def test_a_write_that_fails_half_way_leaves_whole_lines(run: RunFolder) -> None:
    line = {"kind": "train", "loss": 1.0, "lr": 1.0, "time": 0.5}
    run.metric({"step": 0, **line})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((run.path / "metrics.jsonl").stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: File too large"):
            run.metric({"step": 1, **line})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [m["step"] for m in read_metrics(run.path)] == [0], "half a line does not count"
    run.metric({"step": 2, **line})
    assert [m["step"] for m in lines(run)] == [0, 1, 2], "nor does it spoil the next one"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(run: RunFolder) -> None:
    (run.path / "log.txt").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"disk is full while writing .*log\.txt"):
        run.log("hello")


# --- resuming -------------------------------------------------------------------------------------


def recorded(path: Path) -> list[tuple[str, int]]:
    return [(m["kind"], m["step"]) for m in read_metrics(path)]


def simulate(run: RunFolder, begin: int, end: int, *, every: int = 2) -> None:
    """Steps begin .. end-1 as the loop writes them: validation before the first step and after every second."""
    if begin == 0:
        run.metric({"step": 0, "kind": "val", "loss": 1.0, "losses": {}, "time": 0.5, "val_seconds": 0.1})
    for step in range(begin, end):
        run.metric({"step": step, "kind": "train", "loss": 1.0, "lr": 1.0, "time": 0.5})
        if step == 3:
            run.metric({"step": step, "kind": "event"})
        if (step + 1) % every == 0:
            run.metric({"step": step, "kind": "telemetry"})
            run.metric({"step": step + 1, "kind": "val", "loss": 1.0, "losses": {}, "time": 0.5, "val_seconds": 0.1})
        run.log(f"step {step}")


@pytest.mark.parametrize(
    ("checkpoint", "torn"), list(zip(range(8), 3 * [b'{"step": 7, "kin', b"", b"\xff\0\0"], strict=False))
)
def test_a_resumed_run_has_the_same_lines_as_one_that_was_never_interrupted(
    tmp_path: Path, checkpoint: int, torn: bytes
) -> None:
    straight = RunFolder.create(tmp_path / "straight", DESCRIPTION, quiet)
    simulate(straight, 0, 10)
    broken = RunFolder.create(tmp_path / "broken", DESCRIPTION, quiet)
    simulate(broken, 0, 7)
    with open(broken.path / "metrics.jsonl", "ab") as f:
        f.write(torn)

    again = RunFolder.open(broken.path, quiet)
    again.cut_back(checkpoint, "killed")
    assert all(step <= checkpoint for _, step in recorded(again.path))
    simulate(again, checkpoint, 10)
    assert (again.path / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes()

    log = (again.path / "log.txt").read_text().splitlines()
    assert log[:7] == [f"step {n}" for n in range(7)]
    assert log[7].startswith(f"--- resumed from step {checkpoint} at ")
    assert log[7].endswith(": killed ---")
    (interruption,) = json.loads((again.path / "run.json").read_text())["interruptions"]
    assert (interruption["resumed_from"], interruption["note"]) == (checkpoint, "killed")


def test_several_interruptions_and_a_result_that_was_not_the_last_word(run: RunFolder) -> None:
    simulate(run, 0, 4)
    run.finish(RESULT)
    first = RunFolder.open(run.path, quiet)
    first.cut_back(2, "asked to stop")
    assert not (run.path / "result.json").exists()
    simulate(first, 2, 6)
    second = RunFolder.open(run.path, quiet)
    second.cut_back(6, "killed")
    one, two = read_run(run.path).interruptions
    assert one["result"]["status"] == "interrupted"
    assert one["dropped_lines"] > 0
    assert "result" not in two
    assert two["dropped_lines"] == 0


def test_killed_before_the_first_line(run: RunFolder) -> None:
    RunFolder.open(run.path, quiet).cut_back(0, "killed")
    assert recorded(run.path) == []


# --- log and result -------------------------------------------------------------------------------


def test_log_goes_to_the_file_and_the_console(tmp_path: Path) -> None:
    shown: list[str] = []
    run = RunFolder.create(tmp_path / "run", DESCRIPTION, shown.append)
    run.log("hello")
    run.log("hidden", show=False)
    run.log("lone surrogate \udc80, umlaut ü")
    assert shown == ["hello", "lone surrogate \udc80, umlaut ü"]
    written = (run.path / "log.txt").read_text(encoding="utf-8")
    assert written == "hello\nhidden\nlone surrogate \\udc80, umlaut ü\n"


def test_result(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="ended as 'ok' has the validation loss None"):
        dataclasses.replace(RESULT, status="ok")
    run.finish(RESULT)
    assert read_result(run.path) == RESULT
    assert json.loads((run.path / "result.json").read_text())["finished"].endswith("+00:00")


def test_greppable_lines() -> None:
    assert val_line(125, 1770, 4.56789, 12345.678) == (
        "step:125/1770 val_loss:4.5679 train_time:12346ms step_avg:98.77ms"
    )
    assert val_line(0, 10, 8.3, 0.0) == "step:0/10 val_loss:8.3000 train_time:0ms step_avg:nanms"
    assert train_line(1, 10, math.nan, 2.5) == "step:1/10 train_loss:nan train_time:2ms step_avg:2.50ms"


# --- the environment ------------------------------------------------------------------------------


def test_environment_is_json_and_keeps_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("TORCH_API_TOKEN", "secret-1")
    monkeypatch.setenv("AWS_SECRET", "secret-2")
    described = runlog.describe_environment()
    text = json.dumps(described, allow_nan=False)
    assert described["variables"]["OMP_NUM_THREADS"] == "2"
    assert "secret-" not in text
    assert described["threads"]["intra_op"] == torch.get_num_threads()
    assert {"python", "platform", "packages", "torch"} <= described.keys()


class TestGit:
    describe = staticmethod(runlog.describe_git)  # as it was before `_quick`

    def test_outside_a_checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runlog, "_PACKAGE", tmp_path)
        assert self.describe() is None
        monkeypatch.setenv("PATH", "")
        assert self.describe() is None

    def test_commit_and_dirty(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def git(*arguments: str) -> str:
            identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
            done = subprocess.run(
                ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
            )
            return done.stdout.strip()

        monkeypatch.setattr(runlog, "_PACKAGE", tmp_path)
        try:
            git("init", "-q")
        except FileNotFoundError:
            pytest.skip("needs git")
        (tmp_path / "__init__.py").write_text("")
        assert self.describe() is None  # in somebody's checkout, but no part of it
        git("add", ".")
        git("commit", "-qm", "x")
        commit = git("rev-parse", "HEAD")
        monkeypatch.setenv("GIT_DIR", "/nonexistent")  # as inside a hook
        assert self.describe() == {"commit": commit, "dirty": False}
        (tmp_path / "__init__.py").write_text("x = 1")
        assert self.describe() == {"commit": commit, "dirty": True}


# --- files.py, where a run folder leans on it -----------------------------------------------------


def test_new_folder_replaces_folders_but_never_a_file(tmp_path: Path) -> None:
    target = tmp_path / "odd [name]"
    for text in ("one", "two"):
        with files.new_folder(target) as temporary:
            (temporary / "file").write_text(text)
    assert (target / "file").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == [target.name]
    with pytest.raises(UserError, match="in the way"), files.new_folder(target / "file"):
        pass
    assert (target / "file").read_text() == "two"


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for owner in (dead.pid, os.getppid()):
        (tmp_path / f".run.tmp-{owner}").mkdir()
        (tmp_path / f".run.old-{owner}").mkdir()
    with files.new_folder(tmp_path / "run"):
        pass
    kept = {f".run.tmp-{os.getppid()}", f".run.old-{os.getppid()}", "run"}
    assert {p.name for p in tmp_path.iterdir()} == kept
