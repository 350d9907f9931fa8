"""A small race that was really run, for all tests that read or change one."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from speedrun import cli
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.experiments.plan import Entry
from speedrun.experiments.race import RaceRunner
from tests.conftest import make_token_folder

cache_dir()  # sets TORCHINDUCTOR_CACHE_DIR, which torch would otherwise set during the first run of a race

SMALL = (
    "model.num_layers=1 model.dim=32 model.num_heads=2 optim.lr=0.01 schedule.batch_size=2 schedule.seq_len=32 "
    "validation.seq_len=32 validation.batch_size=8 validation.every=50"
)
SETTINGS = ["--recipe", "adamw", "--target", "9", "--threads", "1", "--compile", "False"]
Speedrun = Callable[..., tuple[int, str, str]]


def words(line: str, data: Path, *, steps: int = 4, against_steps: int | None = None, more: str = "") -> list[str]:
    """`race ...` with tiny recipes: side A has 4 steps; side B, if there is one, has its own number."""
    sides = ["--set", *SMALL.split(), f"schedule.steps={steps}", *more.split()]
    if against_steps is not None:
        sides += ["--against", "adamw", "--against-set", *SMALL.split(), f"schedule.steps={against_steps}"]
    return ["race", "--data", str(data), *SETTINGS, *sides, *shlex.split(line)]


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """A token folder with a shadow split; nobody writes to it."""
    tokens = make_token_folder(tmp_path_factory.mktemp("tokens") / "shadowed")
    write_shard(tokens.path / "shadow_000000.bin", np.arange(700) % 50)
    return TokenFolder.describe(tokens.path, tokenizer="pocket", vocab_size=tokens.vocab_size, bos=tokens.bos)


def run_here(runner: RaceRunner, entry: Entry, path: Path, tick: object) -> None:
    """A run of a race inside this process: the same training without the seconds that starting Python takes."""
    command = runner.trial(entry, path).command[3:]
    before, sys.argv = sys.argv, ["speedrun", *command]
    try:
        cli.main(command)
    finally:
        sys.argv = before


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of this test run inside this process."""
    monkeypatch.setattr(RaceRunner, "execute", run_here)


@pytest.fixture
def speedrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Speedrun:
    """The command inside this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as e:
            code = int(e.code or 0)
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def raced(held_out: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a race of three blocks, four steps against forty: side A is faster. Nobody writes to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaceRunner, "execute", run_here)
        for _ in range(3):  # a machine that stalls can eat even this margin: then the race is run again
            folder = tmp_path_factory.mktemp("races") / "small"
            if cli.main([*words("--runs 6", held_out.path, against_steps=40), "--out", str(folder)]) == 0:
                return folder
    raise AssertionError("three races of four steps against forty, and none was faster")


@pytest.fixture
def race_copy(raced: Path, tmp_path: Path) -> Path:
    """A copy to be changed. Files are linked: whoever changes one must replace it, as `write_atomic` does."""
    shutil.copytree(raced, tmp_path / "copy", copy_function=os.link)
    return tmp_path / "copy"
