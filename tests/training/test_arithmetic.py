"""Arithmetic by trial: both are tried in a child process, the answer is kept, and nothing that goes wrong hurts."""

import datetime
import json
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.model.config import GPTConfig
from speedrun.recipes import get_recipe
from speedrun.training import arithmetic
from speedrun.training.arithmetic import Shapes, Tried
from speedrun.training.runlog import read_metrics, read_run
from tests.conftest import choose_on_cpu

MODEL = GPTConfig(num_layers=2, dim=32, num_heads=2, vocab_size=64)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(arithmetic.ONEDNN_LIMIT, "")  # so that it is put back whatever happens
    monkeypatch.delenv(arithmetic.ONEDNN_LIMIT)
    arithmetic.processor.cache_clear()
    return tmp_path / "home"


class Python:
    """Stands in for the interpreter that makes the trials: prints these seconds, or ends otherwise."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.count = folder / "python", folder / "count"
        monkeypatch.setattr(sys, "executable", str(self.file))

    def does(self, script: str) -> None:
        self.file.write_text(f"#!/bin/sh\necho trial >> {self.count}\n{script}\n")
        self.file.chmod(self.file.stat().st_mode | stat.S_IXUSR)

    def measures(self, float32: list[float], bfloat16: list[float]) -> None:
        self.does(f"echo '{json.dumps({'float32': float32, 'bfloat16': bfloat16})}'")

    @property
    def trials(self) -> int:
        return len(self.count.read_text().split()) if self.count.exists() else 0


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Python:
    return Python(tmp_path, monkeypatch)


def test_a_real_trial_measures_both_and_is_made_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, why = choose_on_cpu(MODEL, 64, 1)
    (stored,) = json.loads((home / arithmetic.FILE).read_text())["trials"]
    assert stored["failed"] is None
    assert stored["shapes"] == {"tokens": 128, "width": 32, "hidden": 128, "vocab": 32}
    assert len(stored["float32"]) == len(stored["bfloat16"]) >= 1
    assert all(seconds > 0 for seconds in stored["float32"] + stored["bfloat16"])
    monkeypatch.setattr(arithmetic, "tried", lambda *_: pytest.fail("it was tried again"))
    assert choose_on_cpu(MODEL, 64, 1) == (chosen, why)
    assert "ms of CPU time" in why


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [
        ([1.0, 1.0, 1.0], [0.5, 0.85, 0.6], torch.bfloat16),
        ([1.0, 1.0, 1.0], [0.5, 0.86, 0.6], torch.float32),  # not in each of them
        ([1.0], [5.0], torch.float32),  # it ends with the first that decides
    ],
)
def test_bfloat16_must_be_clearly_faster_every_time(
    float32: list[float], bfloat16: list[float], chosen: torch.dtype, python: Python
) -> None:
    python.measures(float32, bfloat16)
    found, why = choose_on_cpu(MODEL, 64, 2)
    assert found == chosen
    assert "takes 1000 ms of CPU time" in why


def test_another_machine_torch_thread_count_or_shape_is_tried_anew(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    python.measures([1.0] * 3, [0.5] * 3)
    for _ in range(2):
        choose_on_cpu(MODEL, 4096, 2)
    assert python.trials == 1
    choose_on_cpu(MODEL, 4096, 1)
    choose_on_cpu(MODEL, 2048, 2)
    assert python.trials == 3
    monkeypatch.setattr(torch, "__version__", "9.9")
    choose_on_cpu(MODEL, 4096, 2)
    assert python.trials == 4
    monkeypatch.setattr(arithmetic, "processor", lambda: "another one")
    python.measures([1.0] * 3, [2.0] * 3)
    assert choose_on_cpu(MODEL, 4096, 2)[0] == torch.float32
    assert python.trials == 5, "a trial of another machine does not count here"


@pytest.mark.parametrize("content", ["{", '{"format": 2, "trials": 3}', '{"format": 99}', "{}"])
def test_a_damaged_file_is_said_and_written_anew(content: str, home: Path, python: Python) -> None:
    home.mkdir()
    (home / arithmetic.FILE).write_text(content)
    python.measures([1.0] * 3, [0.5] * 3)
    found, why = choose_on_cpu(MODEL, 64, 1)
    assert found == torch.bfloat16
    assert str(home / arithmetic.FILE) in why
    assert choose_on_cpu(MODEL, 64, 1)[1].count(";") == 0, "it is whole again"
    assert python.trials == 1


@pytest.mark.parametrize(
    "seconds", [{}, {"float32": [1.0] * 3, "bfloat16": [0.5]}, {"float32": [1.0], "bfloat16": [1.0], "failed": "died"}]
)
def test_a_trial_that_cannot_have_been_is_made_again(seconds: dict[str, Any], home: Path, python: Python) -> None:
    python.measures([1.0] * 3, [0.5] * 3)
    choose_on_cpu(MODEL, 64, 1)
    file = home / arithmetic.FILE
    stored = json.loads(file.read_text())
    for field in ("float32", "bfloat16", "failed"):
        del stored["trials"][0][field]
    stored["trials"][0] |= seconds
    file.write_text(json.dumps(stored))
    found, why = choose_on_cpu(MODEL, 64, 1)
    assert found == torch.bfloat16
    assert f"{file} is damaged at trials[0]" in why
    assert python.trials == 2


def test_a_home_that_cannot_be_written_costs_a_sentence_and_a_trial_each_time(home: Path, python: Python) -> None:
    home.write_text("a file where a folder is needed")
    python.measures([1.0] * 3, [0.5] * 3)
    for trials in (1, 2):
        found, why = choose_on_cpu(MODEL, 64, 1)
        assert found == torch.bfloat16
        assert "this cannot be kept for the next time" in why
        assert python.trials == trials


def test_a_file_that_is_a_link_to_itself_costs_a_sentence(home: Path, python: Python) -> None:
    home.mkdir()
    file = home / arithmetic.FILE
    file.symlink_to(file)
    python.measures([1.0] * 3, [0.5] * 3)
    found, why = choose_on_cpu(MODEL, 64, 1)
    assert found == torch.bfloat16
    assert "is a link to itself. Remove it, or choose another name" in why


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("kill -ILL $$", "the trial was ended by SIGILL"),
        ("echo oh no >&2; exit 3", "the trial failed (oh no)"),
        ("exec sleep 5", "the trial was not over after 0.2 s"),
    ],
)
def test_a_cpu_that_dies_of_it_gets_float32_and_is_not_tried_again(
    script: str, says: str, python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "LONGEST", 0.2)
    monkeypatch.setattr(arithmetic, "lists_amx", lambda: False)
    python.does(script)
    for _ in range(2):
        found, why = choose_on_cpu(MODEL, 64, 1)
        assert (found, why) == (torch.float32, f"bfloat16 was tried here, and {says}")
    assert python.trials == 1


def test_where_amx_kills_the_rest_of_bfloat16_may_still_be_faster(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some virtual machines list AMX and kill whoever uses it."""
    seconds = json.dumps({"float32": [1.0] * 3, "bfloat16": [0.5] * 3})
    python.does(f"test \"$ONEDNN_MAX_CPU_ISA\" = AVX512_CORE_FP16 || kill -ILL $$\necho '{seconds}'")
    monkeypatch.setattr(arithmetic, "lists_amx", lambda: True)
    assert choose_on_cpu(MODEL, 64, 1)[0] == torch.bfloat16
    assert os.environ[arithmetic.ONEDNN_LIMIT] == "AVX512_CORE_FP16", "from now on, also in child processes"
    del os.environ[arithmetic.ONEDNN_LIMIT]
    assert choose_on_cpu(MODEL, 64, 1)[0] == torch.bfloat16
    assert os.environ[arithmetic.ONEDNN_LIMIT] == "AVX512_CORE_FP16", "also where the answer is an old one"
    assert python.trials == 2


@pytest.mark.parametrize(("dies", "works"), [(True, False), (False, True)])
def test_bfloat16_that_is_asked_for_keeps_off_an_amx_that_kills(
    dies: bool, works: bool, python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    python.does("kill -ILL $$" if dies else "exit 0")
    for _ in range(2):
        arithmetic.amx_works.cache_clear()
        assert arithmetic.amx_works() == works, "the second time from the environment"
    assert os.environ.get(arithmetic.ONEDNN_LIMIT) == (None if works else "AVX512_CORE_FP16")
    arithmetic.amx_works.cache_clear()


def test_the_step_that_is_tried_has_the_recipes_proportions() -> None:
    pocket = Shapes.of(get_recipe("normuon", "pocket").model, 2048)
    assert pocket == Shapes(2048, 128, 512, 4096 // 3)
    native = Shapes.of(get_recipe("interleaved", "short").model, 131_072)
    assert (native.width, native.hidden, native.tokens) == (768, 3072, arithmetic.FEWEST_TOKENS)


def test_both_numbers_are_said() -> None:
    shapes, day = Shapes(1, 1, 1, 1), datetime.date(2026, 1, 2)
    tried = Tried("me", "2.13", 2, shapes, day, (0.05, 0.04, 0.09), (0.02, 0.03, 0.01))
    assert str(tried) == "tried on 2026-01-02: a small step takes 50 ms of CPU time, 20 in bfloat16"


# -------------------------------------------------------------------- stored and obeyed

TINY = shlex.split(
    "--recipe normuon --model.num-layers 3 --model.dim 32 --model.num-heads 2 --schedule.batch-size 2 "
    "--validation.batch-size 2 --steps 6 --threads 1 --no-compile --checkpoint-every 3 --sample False"
)


def test_a_run_keeps_its_arithmetic_when_it_is_resumed(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16 to the same bits as undisturbed, also if a trial would say otherwise by now."""
    answers = [torch.bfloat16]
    monkeypatch.setattr(arithmetic, "choose_on_cpu", lambda *_: (answers[-1], "tried"))
    for name in ("whole", "cut"):
        assert cli.main(["train", "--data", str(tokens.path), *TINY, "--out", str(tmp_path / name)]) == 0
    assert read_run(tmp_path / "whole").dtype == "bfloat16"
    (tmp_path / "cut" / "result.json").unlink()
    (last,) = (tmp_path / "cut" / "checkpoints").glob("*6")
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    answers.append(torch.float32)
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(tmp_path / "cut"), "--dtype", "float32"]) == 2
    assert "was started with --dtype bfloat16, not float32; drop that" in capsys.readouterr().err
    auto = ["train", "--data", str(tokens.path), *TINY, "--resume", "auto", "--out", str(tmp_path / "cut")]
    assert cli.main([*auto, "--dtype", "float32"]) == 2
    assert cli.main(auto) == 0
    metrics = [read_metrics(tmp_path / name) for name in ("whole", "cut")]
    losses = [[m["loss"] for m in lines if m["kind"] in ("train", "val")] for lines in metrics]
    assert losses[0] == losses[1]
    files = [sorted((tmp_path / name / "checkpoints" / last.name).glob("*.safetensors")) for name in ("whole", "cut")]
    assert files[0]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def damage(home: Path, python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / arithmetic.FILE).write_text("{")
    python.measures([1.0] * 3, [2.0] * 3)


def make_read_only(home: Path, python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", "/sys/kernel")  # where not even root makes a file
    python.measures([1.0] * 3, [2.0] * 3)


def let_it_die(home: Path, python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "lists_amx", lambda: False)
    python.does("kill -ILL $$")


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (damage, "in bfloat16; HOME/arithmetic.json is damaged"),
        (make_read_only, "in bfloat16; this cannot be kept for the next time: /sys/kernel/arithmetic.json"),
        (let_it_die, "(bfloat16 was tried here, and the trial was ended by SIGILL)"),
    ],
)
def test_the_run_goes_on_in_float32_and_says_why(
    happens: Any, says: str, home: Path, python: Python, tokens: TokenFolder, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(arithmetic, "choose_on_cpu", choose_on_cpu)
    happens(home, python, monkeypatch)
    out = tmp_path / "run"
    assert cli.main(["train", "--data", str(tokens.path), *TINY, "--save", "False", "--out", str(out)]) == 0
    assert read_run(out).dtype == "float32"
    (line,) = (line for line in (out / "log.txt").read_text().splitlines() if "arithmetic: " in line)
    assert says.replace("HOME", str(home)) in line
    assert capsys.readouterr().err == ""


def test_the_optimizers_of_a_run_use_it(tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speedrun.optim import Muon

    seen = set()
    step = Muon._step_same_shape
    monkeypatch.setattr(
        Muon, "_step_same_shape", lambda self, b, f: (seen.add(self.param_groups[0]["dtype"]), step(self, b, f))[1]
    )
    for dtype in ("bfloat16", "float32"):
        assert cli.main(["train", "--data", str(tokens.path), *TINY, "--dtype", dtype, "--save", "False"]) == 0
        assert seen == {getattr(torch, dtype)}
        seen.clear()


def test_dtype_of_a_run_is_one_of_two(tokens: TokenFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--data", str(tokens.path), "--dtype", "float16"]) == 2
    assert "Unknown dtype 'float16'; choose auto, float32 or bfloat16." in capsys.readouterr().err
    with pytest.raises(UserError, match="--steps is 1; this schedule needs at least 2"):
        get_recipe("normuon", "pocket").schedule.scaled(1)
