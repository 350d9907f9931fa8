"""Tampering is found, also by somebody who rebuilds every hash and the verdict after the edit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedrun.data.shards import TokenFolder
from speedrun.experiments.plan import Plan, recipe_file
from speedrun.experiments.trial import write_recipe
from speedrun.experiments.verdict import judge, read_summary, render
from speedrun.experiments.verification import examine, write_manifest
from speedrun.files import sha256_bytes, write_atomic, write_json
from speedrun.training import runlog
from speedrun.training.config import PublishedCurve
from speedrun.training.runlog import read_run, source_sha256, to_jsonable, train_line, val_line
from tests.experiments.conftest import Speedrun

Json = dict[str, Any]


def read(file: Path) -> Json:
    return dict(json.loads(file.read_text()))


def edit(file: Path, change: Callable[[Json], object]) -> None:
    """Change a JSON file. It is replaced, not written into: it may be a link to the original."""
    value = read(file)
    change(value)
    write_json(file, value)


def edit_metrics(run: Path, change: Callable[[Json], object]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    write_atomic(run / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def rewrite_log(run: Path) -> None:
    """log.txt as it would be, had metrics.jsonl always been like this."""
    total, curve = read(run / "result.json")["steps"], read_run(run).options.curve
    steps = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        m = json.loads(line)
        if m["kind"] == "train":
            steps.append(train_line(m["step"] + 1, total, m["loss"], 1000 * m["time"]))
        elif m["kind"] == "val":
            steps.append(val_line(m["step"], total, m["loss"], 1000 * m["time"], curve))
    others = [line for line in (run / "log.txt").read_text().splitlines() if not line.startswith("step:")]
    write_atomic(run / "log.txt", "\n".join([*others, *steps]) + "\n")


def rebuild(race: Path) -> None:
    """As one who tampers does: the plan's recipe files and hash, the verdict, and the hash of every file."""
    stored = read(race / "plan.json")
    plan = None
    try:
        plan = Plan.read(race)
    except ValueError:
        pytest.fail("the edited plan must be readable: other evidence has to give it away")
    assert plan is not None
    sha256 = sha256_bytes((race / "plan.json").read_bytes())
    for side, recipe in plan.recipes.items():
        write_recipe(race / recipe_file(side), recipe)
    for run in (race / "runs").iterdir():
        edit(run / "run.json", lambda about: about["options"].update(plan=sha256))
    there = {run.name for run in (race / "runs").iterdir()}
    look = next((k for k in plan.looks if {e.name for e in plan.until(k)} == there), None)
    if look is not None:
        verdict = judge(plan, [read_summary(race / "runs" / e.name, e) for e in plan.until(look)], look, sha256)
        write_json(race / "verdict.json", verdict.to_json())
        write_atomic(race / "verdict.txt", render(verdict))
    write_manifest(race)
    assert stored == read(race / "plan.json")


def edit_plan(race: Path, change: Callable[[Json], object]) -> None:
    """Change the plan, and what follows from it: the order of the runs and the levels."""
    value = read(race / "plan.json")
    change(value)
    kept = {key: item for key, item in value.items() if key not in ("format", "runs", "levels")}
    derived = Plan(
        **{
            **{key: tuple(item) if isinstance(item, list) else item for key, item in kept.items()},
            "recipes": Plan.read(race).recipes,
        }
    ).to_json()
    write_json(race / "plan.json", {**value, "runs": derived["runs"], "levels": derived["levels"]})


# -------------------------------------------------------------------- what somebody might try


def lower_the_result(race: Path) -> None:
    edit(race / "runs/001-A/result.json", lambda r: r.update(val_loss=r["val_loss"] - 0.1))


def lower_the_result_and_its_list(race: Path) -> None:
    def change(result: Json) -> None:
        result["val_loss"] -= 0.1
        result["losses"]["val"] -= 0.1

    edit(race / "runs/001-A/result.json", change)


def lower_result_and_metrics(race: Path) -> None:
    lower_the_result_and_its_list(race)

    def change(line: Json) -> None:
        if line["kind"] == "val" and line["step"] == 4:
            line["loss"] -= 0.1
            line["losses"]["val"] -= 0.1

    edit_metrics(race / "runs/001-A", change)


def lower_the_shadow_loss(race: Path) -> None:
    edit(race / "runs/004-A/result.json", lambda r: r["losses"].update(shadow=1.0))


def shorten_the_time(race: Path) -> None:
    def change(result: Json) -> None:
        result["train_time"] *= 0.9
        result["tokens_per_second"] = result["tokens"] / result["train_time"]

    edit(race / "runs/005-A/result.json", change)


def scale(run: Path, factor: float) -> None:
    def result(value: Json) -> None:
        value["train_time"] *= factor
        value["tokens_per_second"] = value["tokens"] / value["train_time"]

    def line(value: Json) -> None:
        if "time" in value:
            value["time"] *= factor

    edit(run / "result.json", result)
    edit_metrics(run, line)


def hide_the_validations(race: Path) -> None:
    """More time for validation than went by on the wall."""

    def change(line: Json) -> None:
        if line["kind"] == "val":
            line["val_seconds"] = 1.5

    edit_metrics(race / "runs/005-A", change)


def claim_no_work(race: Path) -> None:
    edit(race / "runs/005-A/result.json", lambda r: r.update(cpu_seconds=0.0))


def scale_all_but_the_log(race: Path) -> None:
    scale(race / "runs/005-A", 0.9)


def slow_the_baseline_down_everywhere(race: Path) -> None:
    for name in ("002-B", "003-B"):
        scale(race / "runs" / name, 1000.0)
        rewrite_log(race / "runs" / name)


def make_one_step_run_backwards(race: Path) -> None:
    def change(line: Json) -> None:
        if line["kind"] == "train" and line["step"] == 20:
            line["time"] /= 2

    edit_metrics(race / "runs/002-B", change)
    rewrite_log(race / "runs/002-B")


def claim_more_tokens(race: Path) -> None:
    def change(result: Json) -> None:
        result["tokens"] *= 2
        result["tokens_per_second"] *= 2

    edit(race / "runs/001-A/result.json", change)


def claim_more_steps(race: Path) -> None:
    edit(race / "runs/001-A/result.json", lambda r: r.update(steps=40))
    rewrite_log(race / "runs/001-A")


def drop_a_slow_step(race: Path) -> None:
    run = race / "runs/001-A"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    write_atomic(run / "metrics.jsonl", "".join(line for line in lines if '"step": 2, "loss"' not in line))
    rewrite_log(run)


def change_a_learning_rate(race: Path) -> None:
    def change(line: Json) -> None:
        if line["kind"] == "train" and line["step"] == 1:
            line["lr"] *= 1.01

    edit_metrics(race / "runs/001-A", change)


def change_a_seed(race: Path) -> None:
    def change(about: Json) -> None:
        about["seed"] = about["options"]["seed"] = 7

    edit(race / "runs/001-A/run.json", change)


def start_a_run_with_another_recipe_file(race: Path) -> None:
    def change(about: Json) -> None:
        about["command"] = [word.replace("recipe-A.json", "recipe-B.json") for word in about["command"]]

    edit(race / "runs/001-A/run.json", change)


def pick_other_seeds(race: Path) -> None:
    """The plan and all runs say these seeds; the commands still know better."""
    edit_plan(race, lambda plan: plan.update(seeds=list(range(6)), random_seeds=False))
    for entry in Plan.read(race).entries:
        run = race / "runs" / entry.name / "run.json"
        edit(run, lambda about, e=entry: about.update(seed=e.seed, options={**about["options"], "seed": e.seed}))


def loosen_alpha(race: Path) -> None:
    edit_plan(race, lambda plan: plan.update(alpha=0.05))


def deny_the_looks(race: Path) -> None:
    edit_plan(race, lambda plan: plan.update(looks=[2, 3]))


def raise_the_target(race: Path) -> None:
    edit_plan(race, lambda plan: plan.update(target=10.0))


def leave_the_last_block_out(race: Path) -> None:
    edit_plan(race, lambda plan: plan.update(seeds=plan["seeds"][:4], looks=[2]))
    for entry in ("009-A", "010-B", "011-B", "012-A"):
        shutil.rmtree(race / "runs" / entry)


def copy_the_best_run(race: Path) -> None:
    """A run under another's name, with that one's seed everywhere and its own dates."""
    seed, old = (read(race / f"runs/{name}/run.json")["seed"] for name in ("005-A", "001-A"))
    theirs = read(race / "runs/005-A/run.json")
    ends = read(race / "runs/005-A/result.json")["finished"]
    stamps = re.findall(r'"taken": "([^"]+)"', (race / "runs/005-A/metrics.jsonl").read_text())
    shutil.rmtree(race / "runs/005-A")
    shutil.copytree(race / "runs/001-A", race / "runs/005-A")

    def about(value: Json) -> None:
        value.update(seed=seed, started=theirs["started"])
        value["options"]["seed"] = seed
        value["command"] = [str(seed) if word == str(old) else word for word in value["command"]]

    edit(race / "runs/005-A/run.json", about)
    edit(race / "runs/005-A/result.json", lambda result: result.update(finished=ends))
    taken = iter(stamps)
    edit_metrics(race / "runs/005-A", lambda m: m.update(taken=next(taken)) if m["kind"] == "telemetry" else None)


def swap_two_runs(race: Path) -> None:
    (race / "runs/002-B").rename(race / "runs/x")
    (race / "runs/003-B").rename(race / "runs/002-B")
    (race / "runs/x").rename(race / "runs/003-B")


def start_before_the_one_before(race: Path) -> None:
    edit(race / "runs/006-B/run.json", lambda about: about.update(started="2020-01-01T00:00:00+00:00"))


def plan_afterwards(race: Path) -> None:
    edit_plan(race, lambda plan: plan.update(created="2999-01-01T00:00:00+00:00", random_seeds=False))


def train_on_other_data(race: Path) -> None:
    edit(race / "runs/001-A/run.json", lambda about: about["data"]["files"].update({"train_000000.bin": "0" * 64}))


def train_another_recipe(race: Path) -> None:
    edit(race / "runs/001-A/run.json", lambda about: about["recipe"]["optim"].update(lr=0.02))


def train_other_code(race: Path) -> None:
    """The copy of the source and its hash in run.json fit together, but not with the plan."""

    source = race / "runs/001-A/source/speedrun"
    write_atomic(source / "errors.py", (source / "errors.py").read_text() + "\nCHEAT = True\n")
    edit(race / "runs/001-A/run.json", lambda about: about.update(source_sha256=source_sha256(source)))


def change_the_copy_of_the_source(race: Path) -> None:
    write_atomic(race / "runs/001-A/source/speedrun/errors.py", "CHEAT = True\n")


def train_while_validating(race: Path) -> None:
    def change(line: Json) -> None:
        if "weights" in line:
            line["weights"][1] = "0" * 64

    edit_metrics(race / "runs/001-A", change)


def resume_a_run(race: Path) -> None:
    edit(race / "runs/001-A/run.json", lambda about: about["interruptions"].append({"resumed_from": 2}))


def use_two_processes(race: Path) -> None:
    for run in (race / "runs").iterdir():
        edit(run / "run.json", lambda about: about.update(world_size=2))


def plan_two_processes(race: Path) -> None:
    edit_plan(race, lambda plan: plan["settings"].update(nproc=2))


def use_bfloat16(race: Path) -> None:
    for run in (race / "runs").iterdir():
        edit(run / "run.json", lambda about: about.update(dtype="bfloat16"))


def use_another_machine(race: Path) -> None:
    edit_metrics(race / "runs/001-A", lambda m: m.update(cpu_model="faster") if m["kind"] == "telemetry" else None)


def use_another_setting(race: Path) -> None:
    edit(race / "runs/001-A/run.json", lambda about: about["environment"]["variables"].update(OMP_SCHEDULE="static"))


def validate_on_less(race: Path) -> None:
    edit(race / "runs/001-A/run.json", lambda about: about["options"].update(val_tokens=100))


def add_a_run(race: Path) -> None:
    shutil.copytree(race / "runs/001-A", race / "runs/013-A")


def lose_a_run(race: Path) -> None:
    shutil.rmtree(race / "runs/007-B")


def cut_the_log_off(race: Path) -> None:
    text = (race / "runs/001-A/log.txt").read_text()
    write_atomic(race / "runs/001-A/log.txt", text[: -len(text) // 3])


def lose_the_log(race: Path) -> None:
    (race / "runs/001-A/log.txt").unlink()


def cut_metrics_off(race: Path) -> None:
    text = (race / "runs/001-A/metrics.jsonl").read_text()
    write_atomic(race / "runs/001-A/metrics.jsonl", text[: -len(text) // 3])


TAMPERING = {
    lower_the_result: "has the loss",
    lower_the_result_and_its_list: "has the loss",
    lower_result_and_metrics: "log.txt and metrics.jsonl disagree",
    lower_the_shadow_loss: "has the loss",
    shorten_the_time: "the clock at the last step was",
    hide_the_validations: "s of training and validation in",
    claim_no_work: "it claims 0.0 s of CPU time",
    scale_all_but_the_log: "log.txt and metrics.jsonl disagree",
    slow_the_baseline_down_everywhere: "s of warm-up, but was over",
    make_one_step_run_backwards: "the clock runs backwards at step",
    claim_more_tokens: "tokens, the recipe's steps have",
    claim_more_steps: "result.json has 40 steps, the recipe 4",
    drop_a_slow_step: "metrics.jsonl has 3 steps, and not each of 4",
    change_a_learning_rate: "the learning rate of step 1",
    start_a_run_with_another_recipe_file: "recipe-B.json, planned was recipe-A.json",
    change_a_seed: "its seed is 7, planned was",
    pick_other_seeds: "its command says --seed",
    loosen_alpha: "the seeds do not follow from the plan",
    deny_the_looks: "the seeds do not follow from the plan",
    raise_the_target: "with target 9.0, not 'own' with 10.0",
    leave_the_last_block_out: "the seeds do not follow from the plan",
    copy_the_best_run: "001-A and 005-A have the same losses although their seeds differ: one is a copy",
    swap_two_runs: "its seed is",
    start_before_the_one_before: "006-B started at 2020-01-01T00:00:00+00:00, before 005-A was done",
    plan_afterwards: "before the plan was done (2999-01-01T00:00:00+00:00)",
    train_on_other_data: "it ran on other data",
    train_another_recipe: "it trained another recipe than planned (optim.lr: 0.01 -> 0.02)",
    train_other_code: "it ran other code than planned",
    change_the_copy_of_the_source: "its copy of the source is missing or was changed",
    train_while_validating: "the weights changed during validation",
    resume_a_run: "it was interrupted and resumed",
    use_two_processes: "001-A: it was made with --nproc 2, planned was 1",
    plan_two_processes: "001-A: it was made with --nproc 1, planned was 2",
    use_bfloat16: "001-A: it was made with --dtype bfloat16, planned was float32",
    use_another_machine: "it ran on another machine or installation: cpu is 'faster'",
    use_another_setting: "were made with different variables",
    validate_on_less: "its option val_tokens is 100",
    add_a_run: "013-A was never planned",
    lose_a_run: "007-B is missing",
    cut_the_log_off: "log.txt and metrics.jsonl disagree",
    lose_the_log: "log.txt cannot be read",
    cut_metrics_off: "metrics.jsonl has",
}


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_tampering(tamper: Callable[[Path], None], race_copy: Path) -> None:
    tamper(race_copy)
    rebuild(race_copy)
    problems = examine(race_copy).problems
    assert any(TAMPERING[tamper] in problem for problem in problems), problems
    assert not any("manifest.json" in problem for problem in problems)  # the hashes were rebuilt indeed


def test_nothing_is_wrong_with_an_honest_race(race_copy: Path) -> None:
    rebuild(race_copy)
    assert examine(race_copy).problems == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("verdict", "valid"), ("noise_floor", 0.0001), ("plan_sha256", "0" * 64), ("extra", 1)],
)
def test_a_verdict_follows_from_the_runs_alone(race_copy: Path, field: str, value: object) -> None:
    edit(race_copy / "verdict.json", lambda verdict: verdict.update({field: value}))
    write_manifest(race_copy)
    assert examine(race_copy).problems == [f"verdict.json does not follow from the runs: {field}"]


def test_the_text_says_what_the_verdict_says(race_copy: Path) -> None:
    text = (race_copy / "verdict.txt").read_text()
    write_atomic(race_copy / "verdict.txt", text.replace("FASTER", "FASTEST"))
    write_manifest(race_copy)
    assert examine(race_copy).problems == ["verdict.txt does not say what verdict.json says"]


def test_one_digit_anywhere_is_enough(race_copy: Path, speedrun: Speedrun) -> None:
    """Without rebuilt hashes: the last digit of any file, whatever it means."""
    files = ["plan.json", "verdict.json", "verdict.txt", "runs/003-B/run.json", "runs/003-B/log.txt"]
    files += ["runs/003-B/metrics.jsonl", "runs/003-B/result.json", "runs/003-B/source/speedrun/files.py"]
    for name in files:
        original = (race_copy / name).read_text()
        at = max(m.start() for m in re.finditer(r"\d", original))
        digit = str((int(original[at]) + 1) % 10)
        write_atomic(race_copy / name, original[:at] + digit + original[at + 1 :])
        code, _, err = speedrun("verify", race_copy)
        assert code == 2
        assert "does not hold" in err or "was edited" in err
        write_atomic(race_copy / name, original)
    manifest = (race_copy / "manifest.json").read_text()
    at = max(m.start() for m in re.finditer(r"\d", manifest))
    write_atomic(race_copy / "manifest.json", manifest[:at] + str((int(manifest[at]) + 1) % 10) + manifest[at + 1 :])
    assert speedrun("verify", race_copy)[0] == 2


# -------------------------------------------------------------------- the command


def test_verify_says_what_agrees_and_what_it_cannot_know(raced: Path, speedrun: Speedrun) -> None:
    code, out, err = speedrun("verify", raced)
    assert (code, err) == (0, "")
    assert out.startswith("FASTER: ")
    assert "12 runs: plan, logs, losses, clocks and verdict agree" in out
    assert "cannot be known from these files: whether the files were made up as a whole" in out


def test_verify_fails_with_the_reason(race_copy: Path, speedrun: Speedrun) -> None:
    lower_the_result_and_its_list(race_copy)
    rebuild(race_copy)
    code, out, err = speedrun("verify", race_copy)
    assert code == 2
    assert err.count("\n") == 1
    assert "does not hold: 001-A: result.json has the loss" in err
    assert "--  001-A: " in out


def test_a_replay_finds_losses_that_were_changed_everywhere(race_copy: Path, speedrun: Speedrun) -> None:
    """Result, metrics and log agree with each other; only training again can tell."""
    lower_result_and_metrics(race_copy)
    rewrite_log(race_copy / "runs/001-A")
    rebuild(race_copy)
    assert speedrun("verify", race_copy)[0] == 0
    code, out, err = speedrun("verify", race_copy, "--replay", "--steps", "0")
    assert code == 2
    assert "001-A: the final val loss gives" in err
    assert "ok  002-B: 40 steps repeated, losses agree to the last bit" in out


def test_a_replay_of_some_steps(raced: Path, held_out: TokenFolder, speedrun: Speedrun) -> None:
    code, out, err = speedrun("verify", raced, "--replay", "--steps", "3", "--data", held_out.path)
    assert (code, err) == (0, "")
    assert out.count("3 steps repeated, losses agree to the last bit") == 2


def test_another_version_may_round_otherwise(
    race_copy: Path, held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may also be wrong, which is more than rounding."""
    monkeypatch.setattr(runlog, "source_sha256", lambda *of: source_sha256(*of) if of else "0" * 64)
    line = ("verify", race_copy, "--replay", "--steps", "3", "--data", held_out.path)
    code, out, _ = speedrun(*line)
    assert code == 0
    assert out.count("losses agree within 0: another version of speedrun trained it") == 2
    monkeypatch.setattr("speedrun.experiments.replay.TOLERANCE", -1.0)
    assert speedrun(*line)[0] == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nowhere", "nowhere/plan.json is missing"),
        (
            "unfinished",
            "unfinished/manifest.json is missing. Restore it from a copy; if the race has not ended",
        ),
        ("a-file", "a-file is a file, but the folder of plan.json is needed."),
    ],
)
def test_mistakes_in_verify(raced: Path, speedrun: Speedrun, tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "unfinished").mkdir()
    shutil.copy(raced / "plan.json", tmp_path / "unfinished")
    (tmp_path / "a-file").write_text("mine")
    code, out, err = speedrun("verify", line)
    assert (code, out) == (2, "")
    assert said in err


def test_other_tokens_do_not_replay(raced: Path, tokens: TokenFolder, speedrun: Speedrun) -> None:
    code, _, err = speedrun("verify", raced, "--replay", "--data", tokens.path)
    assert code == 2
    assert "are not those of the race" in err


def test_a_challenge_races_the_same_recipes_again(raced: Path, speedrun: Speedrun, tmp_path: Path, here: None) -> None:
    code, out, err = speedrun("challenge", raced, "--runs", "4", "--threads", "1")
    assert err == ""
    assert code in (0, 1)
    mine, theirs = Plan.read(tmp_path / "races/challenge-small"), Plan.read(raced)
    assert mine.recipes == theirs.recipes
    assert not set(mine.seeds) & set(theirs.seeds)
    assert re.search(r"The ratio \d+\.\d+ that was claimed lies (within|outside) the interval measured here", out)


def test_a_run_beside_a_record_holds(race_copy: Path) -> None:
    run, problem = race_copy / "runs/001-A", "001-A: log.txt and metrics.jsonl disagree at line 1 of the steps"
    curve = PublishedCurve("tiny", "own", "a test", ((0, 8.5), (4, 7.0)), 3.0)
    edit(run / "run.json", lambda about: about["options"].update(curve=to_jsonable(curve)))
    write_manifest(race_copy)
    assert any(found.startswith(problem) for found in examine(race_copy).problems)
    rewrite_log(run)
    write_manifest(race_copy)
    assert " record:7.0000 difference:" in (run / "log.txt").read_text()
    assert examine(race_copy).problems == []
