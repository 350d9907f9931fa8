"""Ablations: which switches a recipe has, what is run, and what the table says about made-up and about real runs."""

import json
import math
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.experiments import ablate
from speedrun.experiments.ablate import BASE, SHORTER, AblationArgs, Line, lines_of, switches_of, variants
from speedrun.experiments.statistics import Effect, effect, holm
from speedrun.experiments.trial import ChildProcesses
from speedrun.files import write_json
from speedrun.recipes import RECIPES, get_recipe
from speedrun.report.ablation import ablation_svg, bounds
from speedrun.templates import markdown
from speedrun.training.config import differences
from speedrun.training.runlog import Result, now, to_jsonable
from tests.experiments.conftest import SMALL, Speedrun

LINE = f"ablate --recipe adamw --set {SMALL} schedule.steps=10 --threads 1 --compile False"


def read_rows(folder: str = "ablations/ablation") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]


def pretend(monkeypatch: pytest.MonkeyPatch, minutes: float = 1.0) -> list[tuple[str, int]]:
    """Runs whose loss is a formula; returns what is run, as it comes."""
    ran: list[tuple[str, int]] = []

    def execute(args: AblationArgs, children: ChildProcesses, name: str, recipe: object, seed: int) -> dict[str, Any]:
        ran.append((name, seed))
        loss = 4.0 + 0.001 * seed + {BASE: 0.0, SHORTER: 0.02, "qk-norm": 0.04, "zero-init": -0.01}.get(name, 0.0)
        noise = 0.001 * math.sin(1000 * seed + len(name))
        row = {"variant": name, "seed": seed, "status": "ok", "loss": loss + noise, "seconds": 10.0, "tokens": 1}
        return row | {"steps": 1, "minutes": minutes}

    monkeypatch.setattr(ablate, "execute", execute)
    return ran


# -------------------------------------------------------------------- switches


@pytest.mark.parametrize("name", RECIPES)
def test_every_switch_of_every_recipe_can_be_turned_off_alone(name: str) -> None:
    for size in RECIPES[name]:
        recipe = get_recipe(name, size)
        found = variants(recipe, AblationArgs())
        assert list(found)[:2] == [BASE, SHORTER]
        assert set(found) == {BASE, SHORTER, *switches_of(recipe)}
        for switch, other in found.items():
            assert bool(differences(recipe, other)) == (switch != BASE)
            assert other.schedule.tokens == recipe.schedule.tokens or switch == SHORTER  # equal tokens


def test_the_default_recipe_has_what_its_page_promises() -> None:
    found = switches_of(get_recipe("normuon", "pocket"))
    for name in ("muon", "row-norms", "value-embeddings", "attention-gates", "smear", "skips", "backout", "windows"):
        assert name in found
    assert "snoo" not in found


def test_pairs_are_turned_off_together() -> None:
    recipe = get_recipe("normuon", "pocket")
    both = variants(recipe, AblationArgs(pairs=("smear+skips",)))["smear+skips"]
    assert (both.model.embeddings.smear, both.model.residual.skips) == (False, ())


# -------------------------------------------------------------------- statistics


def test_effects_are_paired_t_intervals() -> None:
    values = [0.01, 0.03, 0.02, 0.05]
    found = effect(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert effect([0.1]).p == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_table_is_sorted_and_keeps_what_harms_and_what_failed() -> None:
    rows = []
    for seed in range(5):
        for name, loss, seconds in (
            (BASE, 4.0, 10.0), (SHORTER, 4.02, 9.0), ("a", 4.04, 9.5), ("b", 3.99, 10.0), ("c", 4.0, 8.0)
        ):  # fmt: skip
            noise = 1e-4 * math.sin(100 * seed + len(name))
            row = {"variant": name, "seed": seed, "status": "ok", "loss": loss + 0.01 * seed + noise}
            rows.append(row | {"seconds": seconds})
        rows.append({"variant": "d", "seed": seed, "status": "failed: nan", "loss": None, "seconds": 1.0})
    lines = lines_of(rows, [BASE, SHORTER, "a", "b", "c", "d"])
    assert [line.name for line in lines] == [SHORTER, "a", "c", "b", "d"]
    a, b = lines[1], lines[3]
    assert a.loss is not None
    assert a.loss.mean == pytest.approx(0.04, abs=1e-3)
    assert a.to_target is not None
    # The loss is worth two tenths of the steps, and the run is a twentieth shorter.
    assert a.to_target.mean == pytest.approx(math.log(0.95) - 2 * math.log(0.9), abs=0.01)
    assert a.p is not None
    assert a.p < 0.001
    assert b.loss is not None
    assert b.loss.high < 0
    text = "\n".join("  ".join(row) for row in ablate.ablation_table(lines))
    assert "5 runs failed" in text
    assert "| a | 5 |" in markdown(ablate.ablation_table(lines))


def test_one_huge_effect_does_not_flatten_the_others() -> None:
    small = [Effect(5, mean, mean - 0.01, mean + 0.01, 0.5) for mean in (0.05, -0.02, 0.0)]
    huge = Effect(5, 2.0, 1.9, 2.1, 0.001)
    assert bounds([*small, huge]) == pytest.approx((-0.03, 0.06))
    assert bounds([*small[:2], Effect(5, 0.14, 0.1, 0.2, 0.1)]) == pytest.approx((-0.03, 0.2)), "large, not huge"
    assert bounds([huge]) == (0.0, 2.1)
    assert bounds([Effect(1, 0.0, math.nan, math.nan, math.nan)]) == (0.0, 0.0)
    lines = [Line(name, 0, e, 0.5, None, None) for name, e in zip("abcd", [*small, huge], strict=True)]
    drawn = ablation_svg("some recipe", lines)
    assert drawn.count("\u25b6") == 1, "an arrow points to what lies outside"
    assert drawn.count("<circle") == 3
    assert "+2.0000" in drawn


# -------------------------------------------------------------------- the command


def test_a_real_ablation_of_one_switch(
    held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real training, inside this process: three starts of Python would take longer than everything else."""

    def run_here(processes: ChildProcesses, words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, cli.main(words[3:]), "", "")

    monkeypatch.setattr(ChildProcesses, "run", run_here)
    extra = "--switches zero-init --seeds 1 --plot a.svg --markdown a.md"
    code, _, err = speedrun(*shlex.split(LINE), "--data", held_out.path, *extra.split())
    assert (code, err) == (0, "")
    rows = read_rows()
    assert [(row["variant"], row["steps"], row["status"]) for row in rows] == [
        (BASE, 10, "ok"),
        (SHORTER, 9, "ok"),
        ("zero-init", 10, "ok"),
    ]
    assert rows[0]["loss"] != rows[2]["loss"]
    assert "zero-init" in (tmp_path / "a.svg").read_text()
    assert "| zero-init | 1 |" in (tmp_path / "a.md").read_text()


def test_rounds_turn_round_and_the_budget_decides(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = pretend(monkeypatch)
    line = [*shlex.split(LINE), "--data", str(held_out.path), "--switches", "qk-norm", "zero-init", "--seeds", "5"]
    code, out, _ = speedrun(*line, "--budget", "11")
    assert code == 0
    assert ran == [
        *[(name, 3000) for name in (BASE, SHORTER, "qk-norm", "zero-init")],
        *[(name, 3001) for name in ("zero-init", "qk-norm", SHORTER, BASE)],
    ]
    assert "the budget of 11 minutes allows no further round" in out
    with open("ablations/ablation/rows.jsonl", "a") as f:
        f.write('{"variant": "zer')
    code, out, _ = speedrun(*line, "--budget", "100")
    assert code == 0
    assert len(ran) == len(set(ran)) == 20
    lines = [text.split()[0] for text in out.splitlines() if text.startswith(("qk-norm ", "zero-init "))]
    assert lines == ["qk-norm", "zero-init"]  # the useful one first, the harmful one last


def test_jobs_share_the_cores(held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs at a time, each with half of the cores, while a third one waits for its turn."""
    both, threads, ranks = threading.Barrier(2, timeout=30), [], []

    def process(processes: ChildProcesses, words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if len(threads) < 2:
            both.wait()  # nobody gets here alone
        threads.append(words[words.index("--threads") + 1])
        ranks.append(words[words.index("--nproc") + 1] if "--nproc" in words else "1")
        result = Result(
            status="ok",
            reason=None,
            val_loss=4.0,
            losses={"val": 4.0},
            steps=1,
            train_time=1.0,
            tokens=1,
            tokens_per_second=1.0,
            resumed=False,
            timed=True,
            peak_memory={},
            finished=now(),
            warmup_seconds=0.0,
            wall_seconds=1.0,
            cpu_seconds=1.0,
            machine_load=None,
        )
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True)
        write_json(folder / "result.json", to_jsonable(result))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(ChildProcesses, "run", process)
    monkeypatch.setattr(ablate, "usable_cores", lambda: 6)
    line = LINE.replace("--threads 1", "--jobs 2 --seeds 1 --switches zero-init")
    assert speedrun(*shlex.split(line), "--data", held_out.path)[0] == 0
    assert threads == ["3", "3", "3"]
    assert [row["variant"] for row in read_rows()] == [BASE, SHORTER, "zero-init"]
    assert ranks == ["1", "1", "1"]
    threads[:], ranks[:] = [], []
    assert speedrun(*shlex.split(line), "--data", held_out.path, "--out", "two", "--nproc", "2")[0] == 0
    assert (threads, ranks) == (["1"] * 3, ["2"] * 3), "six cores for two jobs of two processes"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nproc 0", "--nproc is 0; it must be at least 1."),
        ("--nproc 3", "There are 3 ranks, but a step has only 2 rows to deal out; start at most 2"),
        ("--set schedule.steps=20 model.head.fp8=True schedule.batch_size=4096", "rounds to zero in 8-bit floats"),
        ("--jobs 0", "--jobs is 0; it must be at least 1."),
        ("--switches qk-nrom", "There is no switch 'qk-nrom'. Did you mean 'qk-norm'?"),
        ("--switches smear", "Recipe 'adamw' does not use 'smear'; it has"),
        ("--pairs qk-norm", "'qk-norm' is no pair of switches; write one+other."),
        ("--seeds 0", "--seeds is 0; it must be at least 1."),
        ("--budget -1", "--budget is -1.0; it must be at least 0."),
        ("--set schedule.steps=1", "schedule.steps is 1, too few for a run that is a tenth shorter."),
        ("--recipe adam", "Unknown recipe 'adam'"),
        ("--data nowhere", "nowhere is not a token folder"),
    ],
)
def test_mistakes_in_ablate(held_out: TokenFolder, speedrun: Speedrun, tmp_path: Path, line: str, said: str) -> None:
    code, _, err = speedrun(*shlex.split(LINE), "--data", held_out.path, *shlex.split(line))
    assert code == 2
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_continues_only_its_own_ablation(
    held_out: TokenFolder, speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    line = [*shlex.split(LINE), "--data", str(held_out.path), "--seeds", "1"]
    assert speedrun(*line, "--switches", "qk-norm")[0] == 0
    code, _, err = speedrun(*line, "--switches", "zero-init")
    assert code == 2
    assert "holds an ablation with another switches, variants; choose another --out." in err
