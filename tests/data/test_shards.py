"""The .bin format, and token folders."""

import contextlib
import errno
import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from speedrun.data.shards import (
    MAGIC,
    ShardWriter,
    TokenFolder,
    list_shards,
    open_shard,
    write_shard,
)
from speedrun.errors import UserError


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train_000000.bin"
    with ShardWriter(path) as shard:
        shard.append(np.array([0, 1, 65535], dtype=np.uint16))
        shard.append(np.array([], dtype=np.int64))
        shard.append(np.arange(7, dtype=np.int64))
        assert not path.exists()
    assert list(open_shard(path)) == [0, 1, 65535, 0, 1, 2, 3, 4, 5, 6]
    assert os.listdir(tmp_path) == [path.name]


def test_the_format_byte_by_byte(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([258, 3]))
    expected = struct.pack("<3i", 20240520, 1, 2) + bytes(1024 - 12) + bytes([2, 1, 3, 0])
    assert (tmp_path / "a.bin").read_bytes() == expected


def test_an_opened_shard_cannot_be_changed(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(5))
    with pytest.raises(ValueError, match="read-only"):
        open_shard(tmp_path / "a.bin")[0] = 1


def test_an_empty_shard_opens(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.empty(0, dtype=np.uint16))
    assert open_shard(tmp_path / "a.bin", vocab_size=3).shape == (0,)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(5))

    def interrupted() -> None:
        with ShardWriter(path) as shard:
            shard.append(np.arange(100))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ["a.bin"]
    assert len(open_shard(path)) == 5


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="disk is full"):
        write_shard(tmp_path / "a.bin", np.arange(5))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tokens", [[-1], [65536], [0.5], [[1]]])
def test_what_is_not_a_token_is_refused(tmp_path: Path, tokens: list[float]) -> None:
    with pytest.raises(ValueError, match=r"uint16|vector"):
        write_shard(tmp_path / "a.bin", np.array(tokens))
    assert os.listdir(tmp_path) == []


def shard_bytes(magic: int = MAGIC, version: int = 1, count: int = 4, tokens: int = 4) -> bytes:
    return struct.pack("<3i", magic, version, count) + bytes(1024 - 12) + bytes(2 * tokens)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "truncated: it has 0 bytes"),
        (shard_bytes()[:1000], "truncated: it has 1000 bytes"),
        (shard_bytes(magic=7), "magic number is 7"),
        (shard_bytes(version=2), "version 2"),
        (shard_bytes(count=5), "promises 5 tokens, but it holds 4"),
        (shard_bytes(count=3), "promises 3 tokens, but it holds 4"),
        (shard_bytes(count=-1), "promises -1 tokens"),
        (shard_bytes() + b"x", "but it holds 4.5"),
    ],
)
def test_a_damaged_shard_is_told(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)


def test_a_missing_shard_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no shard"):
        open_shard(tmp_path / "a.bin")
    with pytest.raises(UserError, match="cannot be read"):
        open_shard(tmp_path)


def test_a_token_outside_the_vocabulary_is_told(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([1, 2, 9, 3, 10]))
    assert len(open_shard(tmp_path / "a.bin", vocab_size=11)) == 5
    with pytest.raises(UserError, match=r"token 9 at position 2, outside the vocabulary of 9"):
        open_shard(tmp_path / "a.bin", vocab_size=9)


def test_no_header_makes_anything_but_a_sentence_or_the_right_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(50))
    good = path.read_bytes()
    dice = random.Random(0)
    opened = 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(16) if dice.random() < 0.7 else dice.randrange(len(data))
            data[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        if dice.random() < 0.3:
            data = data[: dice.randrange(len(data) + 1)]
        if dice.random() < 0.1:
            data += bytes(dice.randrange(9))
        path.write_bytes(data)
        try:
            tokens = open_shard(path, vocab_size=50)
        except UserError:
            continue
        opened += 1
        expected = np.frombuffer(bytes(data[1024:]), dtype="<u2")
        assert struct.unpack("<3i", data[:12]) == (MAGIC, 1, len(expected))
        assert np.array_equal(tokens, expected)
        assert (expected < 50).all()
    assert opened > 20  # some mutations are harmless, such as those of the header's unused part


def test_listing(tmp_path: Path) -> None:
    wanted = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "train_000000.bin"]
    others = [
        "train_1.bin",
        "train_000000.bin.tmp",
        "val_000000.bin",
        "xtrain_000000.bin",
        "trainer_000000.bin",
    ]
    for name in wanted + others:
        (tmp_path / name).touch()
    assert [path.name for path in list_shards(tmp_path, "train")] == wanted
    assert [path.name for path in list_shards(tmp_path, "val")] == ["val_000000.bin"]
    assert list_shards(tmp_path, "shadow") == []
    with pytest.raises(UserError, match="no folder"):
        list_shards(tmp_path / "nowhere", "train")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shard(tmp_path / "train_000000.bin", np.arange(30))
    write_shard(tmp_path / "train_000001.bin", np.arange(12))
    write_shard(tmp_path / "val_000000.bin", np.arange(7))
    (tmp_path / "tokenizer.json").write_text("{}")
    TokenFolder.describe(tmp_path, tokenizer="pocket", vocab_size=4096, bos=0)
    return tmp_path


def test_a_token_folder_describes_itself(folder: Path) -> None:
    read = TokenFolder.read(folder)
    read.verify()
    assert (read.tokenizer, read.vocab_size, read.bos) == ("pocket", 4096, 0)
    assert [path.name for path in read.shards("train")] == ["train_000000.bin", "train_000001.bin"]
    assert (read.tokens("train"), read.tokens("val")) == (42, 7)
    (folder / "train_000009.bin").write_bytes(b"not listed")
    assert len(read.shards("train")) == 2
    with pytest.raises(UserError, match="no 'shadow' shards; its splits are: train, val"):
        read.shards("shadow")


@pytest.mark.parametrize("name", ["train_000001.bin", "val_000000.bin", "tokenizer.json"])
def test_verify_names_the_damaged_file(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        TokenFolder.read(folder).verify()
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        TokenFolder.read(folder).verify()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 1}, "format 1"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"bos": 4096}, "bos"),
        (
            {"files": {"../../etc/passwd": {"tokens": 1, "sha256": "0"}}},
            "damaged at a key of files: Expected `str`",
        ),
        ({"files": {"train_000000.bin": {"tokens": 1}}}, "sha256"),
        ({"files": []}, "damaged"),
        ({"tokenizer": None}, "tokenizer"),
    ],
)
def test_a_wrong_description_is_told(folder: Path, change: dict[str, object], sentence: str) -> None:
    value = json.loads((folder / "tokens.json").read_text()) | change
    (folder / "tokens.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=sentence):
        TokenFolder.read(folder)


def test_no_description_makes_anything_but_a_sentence_or_a_folder(folder: Path) -> None:
    path = folder / "tokens.json"
    good = path.read_bytes()
    dice = random.Random(0)
    for _ in range(500):
        data = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(data))
            data[at : at + dice.randrange(3)] = dice.choice([b"", b"[", b"{}", b'"', b"null", b"-1", b"\xff"])
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            TokenFolder.read(folder)


def test_what_is_no_token_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokens.json"):
        TokenFolder.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        TokenFolder.read(tmp_path / "file")
