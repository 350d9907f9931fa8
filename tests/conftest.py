"""Shared fixtures. Slow tests run only with `--slow`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from speedrun.data.shards import TokenFolder, write_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.files import write_atomic
from speedrun.training import arithmetic

torch.set_num_threads(1)  # the suite runs in two workers on two cores


choose_on_cpu = arithmetic.choose_on_cpu


def float32_for_tests(*_: object) -> tuple[torch.dtype, str]:
    return torch.float32, "pinned by the tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure() -> None:
    arithmetic.choose_on_cpu = float32_for_tests  # the same bits everywhere; tests of trials call the original
    if arithmetic.lists_amx():
        # Keeps bf16 matmuls alive where AMX is listed but refused; the workers inherit the answer.
        arithmetic.amx_works()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(autouse=True)
def same_random_numbers_every_time() -> None:
    torch.manual_seed(0)


def make_token_folder(path: Path, *, train: int = 20_000, val: int = 1_000, seed: int = 0) -> TokenFolder:
    """A token folder of learnable nonsense in the pocket vocabulary: each token mostly follows from the last."""
    rng = np.random.default_rng(seed)
    successor = np.random.default_rng(1).integers(1, 60, size=60)

    def stream(count: int) -> np.ndarray:
        tokens = np.zeros(count, dtype=np.int64)
        surprise, fresh = rng.random(count) < 0.2, rng.integers(1, 60, size=count)
        for i in range(1, count):
            tokens[i] = fresh[i] if surprise[i] else successor[tokens[i - 1]]
        tokens[::97] = 0
        return tokens

    path.mkdir(parents=True)
    write_shard(path / "train_000000.bin", stream(train))
    write_shard(path / "val_000000.bin", stream(val))
    pocket = Tokenizer.load("pocket")
    write_atomic(path / "tokenizer.json", (Path(tokenizer_file())).read_bytes())
    return TokenFolder.describe(path, tokenizer="pocket", vocab_size=pocket.vocab_size, bos=pocket.bos)


def tokenizer_file() -> Path:
    import speedrun.data

    return Path(speedrun.data.__file__).parent / "pocket_bpe.json"


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """A small token folder, shared; nobody writes to it."""
    return make_token_folder(tmp_path_factory.mktemp("tokens") / "small")
