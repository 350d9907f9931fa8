"""The search: what it tries, what it keeps, and what it does not repeat. Trials are real runs of a tiny model."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.experiments.sweep import Range, SweepRunner, effort, grouped
from speedrun.experiments.trial import ChildProcesses
from speedrun.recipes import get_recipe, read_recipe
from speedrun.training.runlog import read_result
from tests.conftest import make_token_folder

TINY = shlex.split(
    "--recipe adamw --fix model.num_layers=1 model.dim=32 model.num_heads=2 schedule.steps=4 schedule.batch_size=2 "
    "schedule.seq_len=32 validation.seq_len=32 validation.batch_size=4 --threads 1"
)
RECIPE = get_recipe("adamw", "pocket")
LR = RECIPE.optim.lr
BETA1 = RECIPE.optim.beta1

Sweep = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    """`speedrun sweep` on the small token folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than these runs

    def run(line: str, data: Path = tokens.path) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main(["sweep", "--data", str(data), *TINY, *shlex.split(line)])
        except SystemExit as e:
            code = int(e.code or 0)
        return code, *capsys.readouterr()

    return run


def strictly(line: str) -> dict[str, Any]:
    """A row as any JSON reader would read it: Infinity is no number there."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return dict(json.loads(line, parse_constant=refuse))


def rows(folder: str | Path = "sweeps/sweep") -> list[dict[str, Any]]:
    return [strictly(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]


def pretend(
    monkeypatch: pytest.MonkeyPatch, loss: Callable[[dict[str, Any], int], float]
) -> list[tuple[dict[str, Any], int]]:
    """Trials whose loss is a formula of what is not fixed and of the steps; returns what is tried, as it comes."""
    tried: list[tuple[dict[str, Any], int]] = []

    def execute(
        runner: SweepRunner, kind: str, changes: dict[str, Any], seed: int, steps: int, key: str
    ) -> dict[str, Any]:
        own = {k: v for k, v in changes.items() if k not in runner.fixed}
        tried.append((own, steps))
        row = {"key": key, "kind": kind, "fields": changes, "seed": seed, "steps": steps, "minutes": 1.0}
        return row | {"status": "ok", "loss": loss(own, seed), "train_time": 60.0, "tokens": 64 * steps}

    monkeypatch.setattr(SweepRunner, "execute", execute)
    return tried


# -------------------------------------------------------------------- real trials


def test_a_grid_goes_on_past_candidates_that_fail(sweep: Sweep) -> None:
    """Heads that do not fit are never started; a rate that makes the loss NaN leaves a row without a loss."""
    code, out, _ = sweep("--method grid --vary optim.lr=0.01,1e30 model.num_heads=2,5")
    assert code == 0
    good, bad = rows()
    assert good["fields"]["optim.lr"] == 0.01
    assert (good["status"], good["steps"], good["tokens"]) == ("ok", 4, 4 * 2 * 32)
    assert 0 < good["loss"] < 9
    assert 0 < good["minutes"] < 5
    assert bad["fields"]["optim.lr"] == 1e30
    assert bad["status"].startswith("failed: the loss of step")
    assert bad["loss"] is None
    assert out.count("skipped") == 2
    assert "does not split into 5 heads" in out
    assert "search complete" in out
    assert " failed " in out
    best = out.partition("the best of them:\n")[2].splitlines()[0]
    assert shlex.split(best)[:2] == ["speedrun", "train"]
    stored = read_recipe(shlex.split(best)[shlex.split(best).index("--recipe") + 1])
    assert (stored.optim.lr, stored.schedule.steps) == (0.01, 4)
    assert cli.main([*shlex.split(best)[1:], "--out", "again", "--save", "False", "--sample", "False"]) == 0
    assert read_result(Path("again")).val_loss == good["loss"]


def test_one_field_at_a_time_tries_the_recipe_as_it_is_once(sweep: Sweep) -> None:
    code, out, _ = sweep(f"--method coordinate --rounds 2 --vary optim.lr={LR},0.02")
    assert code == 0
    assert [row["fields"].get("optim.lr", LR) for row in rows()] == [LR, 0.02]
    assert "effort so far" in out


def test_halving_gives_the_better_ones_more_steps(sweep: Sweep) -> None:
    code, _, _ = sweep("--method halving --trials 2 --eta 2 --rungs 2 --vary optim.lr=0.02..0.03")
    assert code == 0
    first, second, last = rows()
    assert (first["steps"], second["steps"], last["steps"]) == (2, 2, 4)
    better = min((first, second), key=lambda row: row["loss"])
    assert last["fields"] == better["fields"]


def test_random_draws_are_the_same_for_the_same_seed_of_draws(sweep: Sweep) -> None:
    assert sweep("--method random --trials 2 --vary optim.lr=0.001..0.01:log")[0] == 0
    _, drawn = rows()
    assert 0.001 <= drawn["fields"]["optim.lr"] <= 0.01
    assert sweep("--method random --trials 2 --vary optim.lr=0.001..0.01:log")[0] == 0
    assert len(rows()) == 2


def test_the_clock_decides_the_steps(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same timing serves candidates that differ only in numbers that cost no time."""
    monkeypatch.setattr(sys.modules[__name__], "TINY", [word for word in TINY if word != "schedule.steps=4"])
    code, out, _ = sweep(f"--method grid --clock 0.5 --vary optim.lr={LR},0.01")
    assert code == 0
    timing, *trials = rows()
    assert (timing["kind"], timing["steps"]) == ("calibration", 24)
    assert [row["kind"] for row in trials] == ["trial", "trial"]
    for trial in trials:
        assert trial["steps"] == int(0.5 / timing["step_seconds"])
        assert 0.1 < trial["train_time"] < 5
    assert "ms/step" in out


def test_the_shadow_split_is_never_opened(sweep: Sweep, tmp_path: Path) -> None:
    tokens = make_token_folder(tmp_path / "tokens")
    described = json.loads((tokens.path / "tokens.json").read_text())
    described["files"]["shadow_000000.bin"] = {"tokens": 77, "sha256": "0" * 64}
    (tokens.path / "tokens.json").write_text(json.dumps(described))
    (tokens.path / "shadow_000000.bin").write_bytes(os.urandom(500))
    code, out, err = sweep("", tokens.path)
    assert (code, err) == (0, "")
    assert rows()[0]["status"] == "ok"
    assert "search complete" in out


def test_a_candidate_that_only_the_run_refuses_does_not_end_the_sweep(sweep: Sweep) -> None:
    """The training tokens make no row of that length, which only opening them shows."""
    code, _, _ = sweep("--method grid --vary schedule.seq_len=20000,16")
    assert code == 0
    refused, good = rows()
    assert refused["status"].startswith("no result: No row of 20000 tokens can be made")
    assert refused["loss"] is None
    assert good["status"] == "ok"


def test_a_killed_sweep_repeats_no_finished_trial(tokens: TokenFolder, tmp_path: Path, sweep: Sweep) -> None:
    line = "--method grid --vary optim.lr=0.01,0.02,0.03"
    command = [sys.executable, "-m", "speedrun", "sweep", "--data", str(tokens.path), *TINY, *line.split()]
    running = subprocess.Popen(command, stdout=-1, stderr=-1, start_new_session=True)
    file, deadline = tmp_path / "sweeps" / "sweep" / "rows.jsonl", time.monotonic() + 100
    while not (file.exists() and file.read_text().endswith("\n")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    [before] = rows()
    with open(file, "a") as f:
        f.write('{"key": "abc", "kind": "tri')
    code, out, _ = sweep(line)
    assert code == 0
    assert f"the last row of {Path('sweeps/sweep/rows.jsonl')} was torn; it is dropped" in out
    after = rows()
    assert after[0] == before
    assert [row["fields"]["optim.lr"] for row in after] == [0.01, 0.02, 0.03]


# -------------------------------------------------------------------- the methods, with losses from a formula


def test_coordinate_search_walks_to_the_minimum(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def bowl(own: dict[str, Any], seed: int) -> float:
        return abs(own.get("optim.lr", LR) - 0.02) * 100 + abs(own.get("optim.beta1", BETA1) - 0.6) + 1

    tried = pretend(monkeypatch, bowl)
    code, out, _ = sweep("--vary optim.lr=0.01,0.02,0.04 optim.beta1=0.7,0.6")
    assert code == 0
    assert {"optim.lr": 0.02, "optim.beta1": 0.6} in [own for own, _ in tried]
    assert len(tried) == len({json.dumps(own, sort_keys=True) for own, _ in tried})
    best = out.partition("the best of them:\n")[2].splitlines()[0]
    assert min(rows(), key=lambda row: row["loss"])["key"] in best


def test_halving_keeps_one_in_eta(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, lambda own, seed: own.get("optim.lr", LR))
    line = "--method halving --trials 9 --eta 3 --rungs 3 --vary optim.lr=0.001..1:log --fix schedule.steps=90"
    assert sweep(line)[0] == 0
    assert [steps for _, steps in tried] == [10] * 9 + [30] * 3 + [90]
    rates = sorted(own.get("optim.lr", LR) for own, _ in tried[:9])
    assert [own.get("optim.lr", LR) for own, _ in tried[9:]] == [*rates[:3], rates[0]]


def test_the_mean_over_the_seeds_counts(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda own, seed: 1.0 + seed * (5 if own else 1))
    assert sweep(f"--method grid --vary optim.lr=0.01,{LR} --seeds 0 1")[0] == 0
    means = {found[0]["fields"].get("optim.lr", LR): mean for mean, found in grouped(rows())}
    assert means == {0.01: 3.5, LR: 1.5}


def test_no_budget_stops_at_once_and_more_goes_on(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, lambda own, seed: 1.0)
    code, out, _ = sweep("--budget 0 --vary optim.lr=0.01,0.02,0.03")
    assert code == 0
    assert "the budget of 0 minutes is spent; raise --budget to continue" in out
    assert tried == []
    assert "the budget of 2 minutes is spent" in sweep("--budget 2 --vary optim.lr=0.01,0.02,0.03")[1]
    assert len(tried) == 2  # a minute each
    assert "search complete" in sweep("--budget 9 --vary optim.lr=0.01,0.02,0.03")[1]
    assert len(tried) == 4


def test_the_effort_adds_up_over_the_sweeps_beside_this_one(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda own, seed: 1.0)
    sweep("--method grid --vary optim.lr=0.01,0.02 --out all/one")
    sweep("--method grid --vary optim.lr=0.01,0.02,0.03 --out all/two")
    _, out, _ = sweep("--recipe gpt2 --out all/three")
    assert effort(Path("all")) == {"adamw on own data": (5, 5.0), "gpt2 on own data": (1, 1.0)}
    assert "  adamw on own data: 5 trials, 5.0 minutes\n" in out
    Path("all/two/sweep.json").write_text("{")
    with open("all/one/rows.jsonl", "a") as f:
        f.write('{"key": ')
    assert effort(Path("all"))["adamw on own data"] == (2, 2.0)


def test_somebody_who_stops_a_trial_stops_the_sweep(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ChildProcesses.run
    stopped = [sys.executable, "-c", f"import sys; sys.exit({128 + signal.SIGTERM})"]
    monkeypatch.setattr(ChildProcesses, "run", lambda processes, words, **_: run(processes, stopped))
    code, _, err = sweep("--vary optim.lr=0.01,0.02")
    assert (code, err) == (130, "speedrun: stopped\n")
    assert not Path("sweeps/sweep/rows.jsonl").exists()


# -------------------------------------------------------------------- values and mistakes


def test_ranges_become_values_of_the_field_s_type() -> None:
    rng = random.Random(0)
    rate = Range.parse("optim.lr=0.001..0.1:log", RECIPE)
    assert rate.grid_values() == [0.001, 0.00316, 0.01, 0.0316, 0.1]
    draws = [rate.sample(rng) for _ in range(200)]
    assert all(0.001 <= x <= 0.1 for x in draws)
    assert 0.3 < sum(x < 0.01 for x in draws) / 200 < 0.7  # as many below as above, in the logarithm
    rows_ = Range.parse("schedule.batch_size=2..4", RECIPE)
    assert rows_.grid_values() == [2, 3, 4]
    assert {rows_.sample(rng) for _ in range(50)} == {2, 3, 4}
    assert Range.parse("model.head.tied=true,False", RECIPE).choices == [True, False]
    assert Range.parse("model.activation=gelu,relu2", RECIPE).choices == ["gelu", "relu2"]
    assert Range.parse("schedule.min_lr_ratio=0,1", RECIPE).choices == [0.0, 1.0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--vary optim.lrr=1,2", "Recipe 'adamw' has no field 'optim.lrr'. Did you mean 'optim.lr'?"),
        ("--vary name=me", "has no field 'name'"),
        ("--vary optim.lr", "'optim.lr' names no values; write optim.lr=a,b,c"),
        ("--vary optim.lr=,", "'optim.lr=,' names no values"),
        ("--vary optim.lr=a,b", "optim.lr=a does not fit: its type is float"),
        ("--vary schedule.steps=1.5", "schedule.steps=1.5 does not fit: its type is int"),
        ("--vary optim.lr=3..1", "'optim.lr=3..1' is no range; low must be below high"),
        ("--vary optim.lr=0..1:log", "above 0 for :log"),
        ("--vary optim.lr=1..2:lin", "'optim.lr=1..2:lin' is no range"),
        ("--vary optim.lr=a..b", "'optim.lr=a..b' is no range; write optim.lr=low..high"),
        ("--vary optim.lr=1..inf", "'optim.lr=1..inf' is no range"),
        ("--vary model.head.tied=0..1", "model.head.tied is no number"),
        ("--fix optim.lr=1..2", "does not fix a value; write optim.lr=value"),
        ("--fix optim.lr=1,2", "does not fix a value; write optim.lr=value"),
        ("--fix optim.lr=-1", "optim.lr is -1.0"),
        ("--eta 1", "--eta is 1; it must be at least 2."),
        ("--trials 0", "--trials is 0; it must be at least 1."),
        ("--budget -1", "--budget is -1.0; it must be at least 0."),
        ("--budget nan", "--budget is nan; it must be at least 0."),
        ("--nproc 0", "--nproc is 0; it must be at least 1."),
        ("--nproc 99", "There are 99 ranks, but a step has only"),
        ("--threads 0", "--threads is 0; it must be at least 1."),
        ("--clock 0 --fix optim.lr=1", "--clock is 0.0; it must be above 0."),
        ("--clock 1", "--clock 1 decides the steps; drop schedule.steps"),
        ("--seeds", "--seeds is empty; name at least one"),
        ("--seeds 0 -1", "--seeds is 0 -1; name at least one, none negative."),
        ("--method guess", "invalid choice 'guess'"),
        ("--recipe adam", "Unknown recipe 'adam'"),
        ("--track poket", "Unknown track 'poket'"),
        ("--data nowhere", "nowhere is not a token folder"),
        ("--out a-file/below", "a-file/below is in the way"),
    ],
)
def test_mistakes_are_told_before_anything_runs(sweep: Sweep, tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "a-file").write_text("mine")
    code, out, err = sweep(line)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_folder_continues_only_the_sweep_it_holds(sweep: Sweep, tmp_path: Path) -> None:
    assert sweep("--budget 0 --vary optim.lr=0.01,0.02")[0] == 0
    assert sweep("--budget 0 --vary optim.lr=0.01,0.02")[0] == 0
    code, _, err = sweep("--budget 0 --vary optim.lr=0.01,0.03 --eta 4")
    assert code == 2
    assert "holds a sweep with another vary, eta; choose another --out." in err
    other = make_token_folder(tmp_path / "other", seed=4)
    assert "another token_files;" in sweep("--budget 0 --vary optim.lr=0.01,0.02", other.path)[2]
    Path("sweeps/sweep/sweep.json").write_text("{")
    code, _, err = sweep("--budget 0 --vary optim.lr=0.01,0.02")
    assert code == 2
    assert "sweep.json is damaged" in err
