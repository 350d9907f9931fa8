"""Races: the plan comes first and stays, runs alternate, and a race that was killed goes on."""

import dataclasses
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speedrun import cli
from speedrun.cli.common import parse
from speedrun.cli.train import Train
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.experiments import ablate
from speedrun.experiments.plan import Entry, Plan
from speedrun.experiments.race import RaceRunner
from speedrun.experiments.trial import Trial, write_recipe
from speedrun.experiments.verification import examine
from speedrun.files import write_json
from speedrun.recipes import RECIPES, get_recipe
from speedrun.training import arithmetic
from speedrun.training.config import with_fields
from speedrun.training.runlog import read_metrics, read_run
from tests.conftest import make_token_folder
from tests.experiments.conftest import Speedrun, run_here, words


def read(file: Path) -> dict:
    return dict(json.loads(file.read_text()))


# -------------------------------------------------------------------- a race from beginning to end


def test_a_race_ends_in_a_verdict(raced: Path) -> None:
    verdict = read(raced / "verdict.json")
    assert verdict["verdict"] == "faster"
    assert [run["name"] for run in verdict["runs"]][:5] == ["001-A", "002-B", "003-B", "004-A", "005-A"]
    assert 1 < verdict["time"]["low"] < verdict["time"]["ratio"] < verdict["time"]["high"]
    assert verdict["time"]["p_faster"] < 0.01
    assert verdict["sides"]["A"]["valid"]
    assert verdict["sides"]["B"]["valid"]
    assert verdict["sides"]["A"]["shadow"]["mean"] > 0
    assert 0 < verdict["noise_floor"] < 1
    assert f"at least {verdict['time']['low']:.3f} times as fast" in (raced / "verdict.txt").read_text()


def test_both_sides_have_the_same_seeds_and_each_run_knows_the_plan(raced: Path) -> None:
    plan = Plan.read(raced)
    assert plan.random_seeds
    seeds: dict[str, list[int]] = {"A": [], "B": []}
    for entry in plan.entries:
        about = read_run(raced / "runs" / entry.name)
        seeds[entry.side].append(about.seed)
        assert about.options.plan == read(raced / "verdict.json")["plan_sha256"]
        assert about.options.splits == ("val", "shadow")
    assert seeds["A"] == seeds["B"] == list(plan.seeds)
    assert len(set(plan.seeds)) == 6


def test_runs_write_no_checkpoints_and_validation_leaves_the_weights_alone(raced: Path) -> None:
    for run in (raced / "runs").iterdir():
        assert not (run / "checkpoints").exists()
        before, after = read_metrics(run, "val")[-1]["weights"]
        assert before == after
        assert len(before) == 64


def test_the_same_command_shows_the_verdict_again(
    raced: Path, held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RaceRunner, "execute", lambda *_: pytest.fail("nothing is left to run"))
    before = (raced / "manifest.json").read_bytes()
    code, out, err = speedrun(*words("--runs 6", held_out.path, against_steps=40), "--out", raced)
    assert (code, err) == (0, "")
    assert "FASTER: " in out
    assert out.count("(done before)") == 12
    assert (raced / "manifest.json").read_bytes() == before


def test_one_side_alone_is_raced_against_the_target(held_out: TokenFolder, speedrun: Speedrun, here: None) -> None:
    code, out, err = speedrun(*words("--runs 3 --seed 5", held_out.path))
    assert (code, err) == (0, "")
    verdict = read(Path("races/own-adamw/verdict.json"))
    assert (verdict["verdict"], verdict["time"]) == ("valid", None)
    assert [run["seed"] for run in verdict["runs"]] == [5, 6, 7]
    assert "[3/3] adamw" in out
    assert "VALID: the mean loss" in out


def test_a_race_that_is_decided_at_a_look_ends_there(held_out: TokenFolder, speedrun: Speedrun, here: None) -> None:
    code, out, _ = speedrun(*words("--runs 12 --looks every", held_out.path))
    assert code == 0
    done = len(list(Path("races/own-adamw/runs").iterdir()))
    assert 2 <= done < 12
    assert out.count("not decided yet") == done - 2
    assert examine(Path("races/own-adamw")).problems == []
    assert read(Path("races/own-adamw/verdict.json"))["look"]["after"] == done


def test_a_run_that_goes_nan_counts_as_failed(held_out: TokenFolder, speedrun: Speedrun, here: None) -> None:
    code, out, _ = speedrun(*words("--runs 2", held_out.path, more="optim.lr=1e30 validation.first=False"))
    assert code == 1
    assert "FAILED: 2 of 2 runs of adamw" in out
    verdict = read(Path("races/own-adamw/verdict.json"))
    assert [run["status"] for run in verdict["runs"]] == ["failed", "failed"]
    assert "the loss of step" in verdict["runs"][0]["reason"]
    assert examine(Path("races/own-adamw")).problems == []


def test_a_systems_race_needs_bit_equal_losses(held_out: TokenFolder, speedrun: Speedrun, here: None) -> None:
    line = words("--runs 4 --kind systems --out same", held_out.path, against_steps=4)
    _, out, _ = speedrun(*line)
    verdict = read(Path("same/verdict.json"))
    assert verdict["pairs"] == {"all": 4, "equal": 4}
    assert verdict["verdict"] in ("inconclusive", "faster", "slower")
    assert "bit-equal for 4 of 4 seeds" in out


# -------------------------------------------------------------------- stopped and continued


def test_an_interrupted_run_starts_again_and_is_kept(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run ends as after Ctrl-C: its folder has a result, but not one that counts."""

    def stopped(runner: RaceRunner, entry: Entry, path: Path, tick: object) -> None:
        run_here(runner, entry, path, tick)
        if path.name == "002-A":
            write_json(path / "result.json", {**read(path / "result.json"), "status": "interrupted", "val_loss": None})
            raise KeyboardInterrupt

    line = words("--runs 3", held_out.path)
    monkeypatch.setattr(RaceRunner, "execute", stopped)
    code, out, err = speedrun(*line)
    assert (code, err) == (130, "speedrun: stopped\n")
    assert "The same command continues" in out
    race = Path("races/own-adamw")
    first = (race / "runs/001-A/result.json").read_bytes()
    monkeypatch.setattr(RaceRunner, "execute", run_here)
    code, out, _ = speedrun(*line)
    assert code == 0
    assert "002-A was interrupted; it starts again from step 0" in out
    assert (race / "runs/001-A/result.json").read_bytes() == first
    assert [p.name for p in (race / "interrupted").iterdir()] == ["002-A-1"]
    found = examine(race)
    assert found.problems == []
    assert any("interrupted" in note for note in found.notes)


def start(line: list[str], folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "speedrun", *line]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=-1, stderr=-1, start_new_session=True)


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ten_kills_at_random_moments(held_out: TokenFolder, tmp_path: Path, here: None) -> None:
    """A copy of this process races, and is killed between two steps, two writes or two runs, again and again."""
    rng, folder, kills = random.Random(0), tmp_path / "race", 0
    line = [*words("--runs 4 --seed 3", held_out.path, steps=10, against_steps=20), "--out", str(folder)]
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                    os._exit(cli.main(line))
            finally:
                os._exit(99)
        deadline = time.monotonic() + rng.uniform(0.05, 0.9) if kills < 10 else time.monotonic() + 100
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills += 1
                break
            time.sleep(0.005)
        else:
            if kills >= 10:
                break
            assert (folder / "manifest.json").exists()
            shutil.rmtree(folder)  # it got through between two kills
    names = sorted(p.name for p in (folder / "runs").iterdir() if p.name[0] != ".")
    assert names == ["001-A", "002-B", "003-B", "004-A", "005-A", "006-B", "007-B", "008-A"]
    found = examine(folder)
    assert found.problems == []
    assert found.verdict is not None
    assert found.verdict.sides["A"].valid


def test_runs_are_processes_of_their_own(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run inside this process, to save time; the second one as every run outside of tests."""
    execute = RaceRunner.execute

    def first_here(runner: RaceRunner, entry: Entry, path: Path, tick: Callable[[Entry, int], None]) -> None:
        (run_here if entry.number == 1 else execute)(runner, entry, path, tick)

    monkeypatch.setattr(RaceRunner, "execute", first_here)
    code, out, err = speedrun(*words("--runs 2 --seed 3", held_out.path))
    assert (code, err) == (0, "")
    assert "VALID" in out
    folder = Path("races/own-adamw")
    assert examine(folder).problems == []
    here, there = (read_run(folder / "runs" / name).command for name in ("001-A", "002-A"))
    assert there[0].endswith("__main__.py")
    assert there[there.index("--seed") + 1] == "4"
    assert len(here) == len(there)


@pytest.mark.slow
def test_kill_minus_nine(held_out: TokenFolder, tmp_path: Path) -> None:
    """First the race alone is killed: its run goes on and is adopted. Then both: that run starts again."""
    line = words("--runs 2 --seed 3 --out race", held_out.path, steps=300)
    runs = tmp_path / "race" / "runs"
    race = start(line, tmp_path)
    wait_for(lambda: (runs / "001-A" / "metrics.jsonl").exists(), race)
    os.kill(race.pid, signal.SIGKILL)
    race.communicate()
    race = start(line, tmp_path)
    wait_for(lambda: (runs / "002-A" / "metrics.jsonl").exists(), race)
    os.killpg(race.pid, signal.SIGKILL)
    out, _ = race.communicate()
    assert (runs / "001-A" / "result.json").exists()
    assert not (tmp_path / "race" / "interrupted").exists()
    race = start(line, tmp_path)
    out, err = race.communicate()
    assert (race.returncode, err) == (0, "")
    assert "[1/2]" in out
    assert "(done before)" in out
    assert "002-A was interrupted; it starts again from step 0" in out
    assert sorted(p.name for p in runs.iterdir() if p.name[0] != ".") == ["001-A", "002-A"]
    assert examine(tmp_path / "race").problems == []


def test_a_run_that_cannot_start_says_why_and_the_race_can_go_on(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; sys.exit('speedrun: The disk is full.')"
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "command", [sys.executable, "-c", program])
        code, _, err = speedrun(*words("--runs 5", held_out.path))
    assert code == 2
    assert err == (
        "speedrun: Run 001-A ended without a result: The disk is full. Repair that; the same command continues.\n"
    )
    assert Path("races/own-adamw/plan.json").exists()
    monkeypatch.setattr(RaceRunner, "execute", run_here)
    assert speedrun(*words("--runs 5", held_out.path))[0] == 0


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--runs 1", "--runs is 1; it must be at least 2."),
        ("--runs 0", "--runs is 0; it must be at least 2."),
        ("--runs 2 --against adamw", "two ABBA blocks, so at least 4 runs a side."),
        ("--runs 5 --against adamw", "--runs is 5; an ABBA block has two runs a side, so choose 4 or 6."),
        ("--looks 1 4", "The looks 1 4 10 do not fit: they must rise, from run 2 or later to the last one, 10."),
        ("--looks 4 2", "The looks 4 2 10 do not fit"),
        ("--looks 4 12", "The looks 4 12 do not fit"),
        ("--looks sometimes", "--looks is sometimes; write `end`, `every`, or numbers such as 2 4 10."),
        ("--nproc 0", "--nproc is 0; it must be at least 1."),
        ("--nproc 3", "There are 3 ranks, but a step has only 2 rows to deal out; start at most 2"),
        ("--alpha 0.5", "--alpha is 0.5; it must be above 0 and at most 0.1."),
        ("--seed -1", "--seed is -1; it must be at least 0."),
        ("--kind systems", "A systems race compares two sides; name the other one with --against."),
        ("--set optim.lrr=1", "Recipe 'adamw' has no field 'optim.lrr'. Did you mean 'optim.lr'?"),
        ("--set name=mine", "has no field 'name'"),
        ("--set optim.lr", "'optim.lr' changes nothing; write FIELD=value"),
        ("--set optim.lr=fast", "optim.lr=fast does not fit: its type is float"),
        ("--set schedule.steps=0", "schedule.steps is 0; it must be at least 1."),
        ("--against-set optim.lr=1", "--against-set changes side B's recipe, but there is none"),
        ("--against adam", "Unknown recipe 'adam'. Did you mean 'adamw'?"),
        ("--recipe adam", "Unknown recipe 'adam'"),
        ("--track poket", "Unknown track 'poket'"),
        ("--target 0", "The target 0.0 is not a loss that can be reached"),
        ("--data nowhere", "nowhere is not a token folder"),
        ("--submit ../mine", "The record name '../mine' does not do"),
        ("--submit a/b", "The record name 'a/b' does not do"),
        ("--submit <script>", "The record name '<script>' does not do"),
        ("--out a-file/below", "a-file/below is in the way"),
        ("--out mine", "mine already holds files that are no race; choose another --out."),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "a-file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = speedrun(*words("", held_out.path), *shlex.split(line))
    assert code == 2
    assert out == ""
    assert said in " ".join(err.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_target_belongs_to_one_s_own_data(held_out: TokenFolder, speedrun: Speedrun) -> None:
    assert "--target 3.0 goes with --data" in speedrun("race", "--target", "3")[2]
    assert "needs a --target" in speedrun("race", "--data", held_out.path)[2]


def test_the_plan_cannot_be_changed(raced: Path, held_out: TokenFolder, speedrun: Speedrun) -> None:
    before = (raced / "plan.json").read_bytes()
    code, _, err = speedrun(*words("--runs 8 --alpha 0.05", held_out.path, against_steps=40), "--out", raced)
    assert code == 2
    assert "holds a race with another alpha, levels, looks, runs, seeds; a plan is not changed" in err
    assert (raced / "plan.json").read_bytes() == before


def test_a_plan_that_was_edited_is_refused(race_copy: Path, held_out: TokenFolder, speedrun: Speedrun) -> None:
    """A different number of spaces is enough: every run has the hash of the file."""
    plan = read(race_copy / "plan.json")
    (race_copy / "plan.json").unlink()
    (race_copy / "plan.json").write_text(json.dumps(plan))
    code, _, err = speedrun(*words("--runs 6", held_out.path, against_steps=40), "--out", race_copy)
    assert code == 2
    assert "001-A: it belongs to another plan: plan.json was edited after this run" in err
    (race_copy / "plan.json").write_text("{")
    code, _, err = speedrun(*words("--runs 6", held_out.path, against_steps=40), "--out", race_copy)
    assert code == 2
    assert "plan.json is damaged: Input data was truncated" in err


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("machine", "was planned on another machine or installation"),
        ("source_sha256", "was planned with other code"),
    ],
)
def test_other_machines_and_other_code_do_not_continue_a_race(
    raced: Path, held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch, what: str, said: str
) -> None:
    if what == "machine":
        machine = dataclasses.replace(Plan.read(raced).machine, cpu="another")
        monkeypatch.setattr("speedrun.experiments.plan.this_machine", lambda: machine)
    else:
        monkeypatch.setattr("speedrun.training.runlog.source_sha256", lambda: "0" * 64)
    code, _, err = speedrun(*words("--runs 6", held_out.path, against_steps=40), "--out", raced)
    assert code == 2
    assert said in err


def test_other_data_does_not_continue_a_race(raced: Path, speedrun: Speedrun, tmp_path: Path) -> None:
    other = make_token_folder(tmp_path / "other", seed=9)
    code, _, err = speedrun(*words("--runs 6", other.path, against_steps=40), "--out", raced)
    assert code == 2
    assert "was planned on other data" in err


# -------------------------------------------------------------------- plans


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_through_its_file_unchanged(name: str, tmp_path: Path) -> None:
    """Every field of every recipe can be handed to a run: tuples of pairs, empty ones, truth values."""
    for size in RECIPES[name]:
        wanted = with_fields(get_recipe(name, size), {"optim.lr": 0.0123, "validation.every": 7})
        file = str(write_recipe(tmp_path / "recipe.json", wanted))
        read = get_recipe(file, size)
        given = parse(Train, "train", ["--recipe", file], default=Train.from_recipe(read))
        assert given.resolved(read) == read == wanted


def test_looks_cost_something_and_are_part_of_the_plan(raced: Path, tmp_path: Path) -> None:
    plan = Plan.read(raced)
    assert plan.looks == (3,)
    assert plan.levels(3) == (0.01, 0.01)
    write_json(tmp_path / "plan.json", {**read(raced / "plan.json"), "looks": [2, 3]})
    with pytest.raises(UserError, match="was edited: its levels cannot follow from the rest of it"):
        Plan.read(tmp_path)


# -------------------------------------------------------------------- arithmetic


def test_a_race_decides_its_arithmetic_once_and_both_sides_obey(
    speedrun: Speedrun, held_out: TokenFolder, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 only where it is faster for both; a race that goes on keeps to its plan, whatever a trial says then."""
    answers = [torch.bfloat16, torch.float32]
    monkeypatch.setattr(arithmetic, "choose_on_cpu", lambda *_: (answers.pop(0), "tried"))
    race = words("--runs 4 --out race", held_out.path, against_steps=5)
    code, out, _ = speedrun(*race)
    assert code in (0, 1)
    assert "float32 arithmetic" in out
    assert answers == []
    assert Plan.read(Path("race")).settings.dtype == "float32"
    assert {read_run(run).dtype for run in Path("race/runs").iterdir()} == {"float32"}
    assert speedrun(*race)[0] == code, "nothing is tried again"
    code, _, err = speedrun(*race, "--dtype", "bfloat16")
    assert code == 2
    assert "The plan in race says --dtype float32, not bfloat16; drop that, or choose another --out." in err
    answers += [torch.bfloat16, torch.bfloat16]
    code, out, _ = speedrun(*words("--runs 4 --out other", held_out.path, against_steps=5))
    assert "bfloat16 arithmetic" in out
    assert {read_run(run).dtype for run in Path("other/runs").iterdir()} == {"bfloat16"}


def test_all_trials_of_a_sweep_share_one_arithmetic(
    speedrun: Speedrun, held_out: TokenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [torch.bfloat16]
    monkeypatch.setattr(arithmetic, "choose_on_cpu", lambda *_: (answers.pop(0), "tried"))
    sweep = ["sweep", "--data", str(held_out.path), "--recipe", "adamw", "--budget", "0", "--out", "sweep"]
    sweep += ["--vary", "optim.lr=0.001,0.002"]
    for _ in range(2):  # the second time from the plan
        assert speedrun(*sweep)[0] == 0
    assert json.loads(Path("sweep/sweep.json").read_text())["args"]["dtype"] == "bfloat16"
    code, _, err = speedrun(*sweep, "--dtype", "float32")
    assert code == 2
    assert "The plan in sweep says --dtype bfloat16, not float32" in err


def test_an_ablation_keeps_the_arithmetic_of_its_plan(
    speedrun: Speedrun, held_out: TokenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, taken = [torch.bfloat16], []
    monkeypatch.setattr(arithmetic, "choose_on_cpu", lambda *_: (answers.pop(0), "tried"))

    def execute(args: ablate.AblationArgs, children: object, name: str, recipe: object, seed: int) -> dict[str, object]:
        taken.append(args.dtype)
        numbers = {"loss": 1.0, "seconds": 1.0, "tokens": 1, "steps": 1, "minutes": 1.0}
        return {"variant": name, "seed": seed, "status": "ok", **numbers}

    monkeypatch.setattr(ablate, "execute", execute)
    ablation = ["ablate", "--data", str(held_out.path), "--recipe", "adamw", "--out", "ablation", "--seeds"]
    for seeds in "12":  # the second time from the plan
        assert speedrun(*ablation, seeds)[0] == 0
    assert {*taken} == {"bfloat16"}
    code, _, err = speedrun(*ablation, "3", "--dtype", "float32")
    assert code == 2
    assert "The plan in ablation says --dtype bfloat16, not float32" in err
