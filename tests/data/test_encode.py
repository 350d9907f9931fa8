"""One's own text: files to documents, documents to a token folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from speedrun.data import encode, text
from speedrun.data.encode import encode_files
from speedrun.data.shards import TokenFolder, open_shard
from speedrun.data.text import find_files, read_documents
from speedrun.data.tokenizer import SEPARATOR, Tokenizer
from speedrun.errors import UserError

POCKET = Tokenizer.load("pocket")


def quiet(line: str) -> None:
    pass


def documents_of(path: Path) -> list[str]:
    return list(read_documents(path, quiet))


def stories(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        words = " ".join(f"story {number} line {line}, and so on." for line in range(number % 9 + 1))
        (folder / f"{number:03d}.txt").write_text(words)
    return folder


def decoded(folder: TokenFolder, split: str) -> list[str]:
    tokens = np.concatenate([open_shard(path, folder.vocab_size) for path in folder.shards(split)])
    pieces = np.split(tokens, np.flatnonzero(tokens == folder.bos))[1:]
    return [POCKET.decode(piece[1:].tolist()) for piece in pieces]


# --- files to documents ---


def test_a_small_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\n\r\nfirst  \r\n\r\nsecond \xc3\xa9\n\n")
    assert documents_of(path) == ["first  \n\nsecond é"]


@pytest.mark.parametrize("read_characters", [1, 7, 1000, 1 << 20])
def test_a_large_file_is_cut_at_blank_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_characters: int
) -> None:
    paragraphs = [f"{number} é " + "word " * (number % 50) for number in range(500)]
    path = tmp_path / "a.txt"
    path.write_text("\r\n\r\n".join(paragraphs))
    monkeypatch.setattr(text, "READ_CHARACTERS", read_characters)
    documents = documents_of(path)
    assert "\n\n".join(documents) == "\n\n".join(paragraphs)
    assert len(documents) > 3
    assert all(text.DOCUMENT_CHARACTERS <= len(d) < text.LONGEST_CHARACTERS for d in documents[:-1])


def test_text_without_blank_lines_is_cut_at_white_space(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(40_000)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    documents = documents_of(tmp_path / "a.txt")
    assert [word for document in documents for word in document.split()] == words
    assert len(documents) > 3
    (tmp_path / "b.txt").write_text("x" * 200_000)
    assert "".join(documents_of(tmp_path / "b.txt")) == "x" * 200_000


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with open(path, "w") as f:
        for number in range(200_000):
            f.write(f"{number} some words that make a line of text, one of very many\n" + "\n" * (number % 3 == 0))
    tracemalloc.start()
    count = sum(len(document) for document in read_documents(path, quiet))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 10_000_000
    assert peak < 2_000_000


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\ntwo", "id": 1}\n\n{"text": "\\n"}\n{"text": "\xc3\xa9"}')
    assert documents_of(path) == ["one\ntwo", "é"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"ab\xffcd", r"a.txt is not UTF-8: byte 0xff "),
        ("a.txt", b"x" * 200_000 + b"\xe9t\xe9", r"a.txt is not UTF-8: byte 0xe9 "),
        ("a.txt", b"abc\xe2\x82", r"a.txt is not UTF-8: byte 0xe2 "),
        ("a.txt", b"x" * ((1 << 17) - 1) + b"\xe2\x28\xa1", r"a.txt is not UTF-8: byte 0xe2 "),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl:2 is not UTF-8: byte 0xff "),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "a"\n', r"a.jsonl:3 is not valid JSON"),
        ("a.jsonl", b'{"txt": "a"}\n', r'a.jsonl:1 has no "text" field'),
        ("a.jsonl", b'{"text": 3}\n', r'a.jsonl:1 has no "text" field'),
        ("a.jsonl", b'"text"\n', r'a.jsonl:1 has no "text" field'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1 holds half of a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1 is not valid JSON"),
    ],
)
def test_files_that_are_not_text_are_told(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        documents_of(tmp_path / name)


def test_finding_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.MD", "a/b.jsonl", "c.py", ".git/x.txt", "a/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert find_files([tmp_path]) == [tmp_path / "a/b.jsonl", tmp_path / "a/z.MD", tmp_path / "b.txt"]
    assert find_files([tmp_path / "c.py", tmp_path / "b.txt", tmp_path])[:2] == [
        tmp_path / "c.py",
        tmp_path / "b.txt",
    ]
    assert len(find_files([tmp_path, tmp_path / "b.txt"])) == 3
    with pytest.raises(UserError, match=r"no file or folder .*nothing"):
        find_files([tmp_path / "nothing"])
    with pytest.raises(UserError, match="No files were named"):
        find_files([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no .jsonl, .md or .txt files"):
        find_files([tmp_path / "empty"])


# --- documents to tokens ---


def test_every_document_comes_back(tmp_path: Path) -> None:
    source = stories(tmp_path / "in", 60)
    (source / "special.txt").write_text(f"a {SEPARATOR} in the text")
    said: list[str] = []
    folder = encode_files([source], tmp_path / "out", "pocket", val_fraction=0.2, notice=said.append)
    folder.verify()
    assert TokenFolder.read(tmp_path / "out") == folder
    assert (folder.tokenizer, folder.vocab_size, folder.bos) == ("pocket", 4096, 0)
    train, val = decoded(folder, "train"), decoded(folder, "val")
    assert sorted(train + val) == sorted(path.read_text() for path in source.iterdir())
    assert 4 <= len(val) <= 24
    assert "61 documents of 61 files" in said[-1]
    assert Tokenizer.load(folder.tokenizer_path).encode("text") == POCKET.encode("text")


def test_the_number_of_processes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stories(tmp_path / "in", 80)
    monkeypatch.setattr(encode, "TASK_CHARACTERS", 1000)
    results = [
        encode_files([source], tmp_path / f"out{n}", "pocket", processes=n, notice=quiet).files for n in (1, 2, 3)
    ]
    assert results[0] == results[1] == results[2]


def test_held_out_documents_stay_held_out(tmp_path: Path) -> None:
    source = stories(tmp_path / "in", 60)
    before = encode_files([source], tmp_path / "out", "pocket", val_fraction=0.2, notice=quiet)
    held = set(decoded(before, "val"))
    (source / "000a.txt").write_text("a new file in the middle")
    (source / "copy.txt").write_text((source / "007.txt").read_text())
    after = encode_files([source], tmp_path / "out", "pocket", val_fraction=0.2, notice=quiet)
    assert held <= set(decoded(after, "val"))
    assert not set(decoded(after, "val")) & set(decoded(after, "train"))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_documents_still_give_one_to_val(tmp_path: Path, count: int) -> None:
    source = stories(tmp_path / "in", count)
    folder = encode_files([source], tmp_path / "out", "pocket", val_fraction=1e-9, notice=quiet)
    assert (len(decoded(folder, "train")), len(decoded(folder, "val"))) == (count - 1, 1)


def test_shards_are_cut_between_documents(tmp_path: Path) -> None:
    source = stories(tmp_path / "in", 60)
    (source / "long.txt").write_text("many words " * 500)
    folder = encode_files([source], tmp_path / "out", "pocket", shard_tokens=300, notice=quiet)
    lengths = [len(open_shard(path)) for path in folder.shards("train")]
    assert len(lengths) > 5
    assert max(lengths) <= 300
    whole = encode_files([source], tmp_path / "whole", "pocket", notice=quiet)
    assert decoded(folder, "train") == decoded(whole, "train")
    headless = [path for path in folder.shards("train") if open_shard(path)[0] != folder.bos]
    assert 0 < len(headless) < len(lengths) / 2  # only the long document goes on in another shard


@pytest.mark.parametrize(
    ("files", "options", "sentence"),
    [
        ({"a.txt": ""}, {}, r"There is no text in .*a.txt"),
        ({"a.txt": " \n\n ", "b.txt": ""}, {}, "There is no text in the 2 files"),
        ({"a.txt": "only one"}, {}, r"Train and val need a document each, but of 1 document\(s\) in .*a.txt"),
        ({"a.txt": "x", "b.txt": "y"}, {"val_fraction": 0.999999}, "change val_fraction"),
        ({"a.txt": "x"}, {"tokenizer": "poket"}, "no tokenizer 'poket'"),
        ({"a.txt": "x", "b.jsonl": "{"}, {}, r"b.jsonl:1 is not valid JSON"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(
    tmp_path: Path, files: dict[str, str], options: dict[str, object], sentence: str
) -> None:
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_text(content)
    arguments = {"tokenizer": "pocket", "notice": quiet} | options
    with pytest.raises(UserError, match=sentence) as caught:
        encode_files([tmp_path / "in"], tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]


def test_an_empty_file_among_others_is_skipped_with_a_word(tmp_path: Path) -> None:
    source = stories(tmp_path / "in", 5)
    (source / "empty.txt").touch()
    said: list[str] = []
    encode_files([source], tmp_path / "out", "pocket", notice=said.append)
    assert said[0] == f"{source / 'empty.txt'} has no text; skipped"


def test_a_vocabulary_too_large_for_shards_is_refused(tmp_path: Path) -> None:
    content = json.loads(POCKET.content)
    content["model"]["vocab"] |= {f"filler{number}": number for number in range(4096, 65537)}
    (tmp_path / "t.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="65537 entries, but shards hold at most 65536"):
        encode_files([tmp_path / "a.txt"], tmp_path / "out", str(tmp_path / "t.json"), notice=quiet)


def test_only_a_token_folder_is_replaced(tmp_path: Path) -> None:
    source = stories(tmp_path / "in", 5)

    def run(name: str) -> TokenFolder:
        return encode_files([source], tmp_path / name, "pocket", notice=quiet)

    assert run("out") == run("out")
    (tmp_path / "out" / "letter.txt").write_text("do not delete me")
    with pytest.raises(UserError, match=r"would delete letter.txt"):
        run("out")
    assert (tmp_path / "out" / "letter.txt").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        run("file")
    (tmp_path / "bare").mkdir()
    run("bare").verify()


@pytest.mark.skipif(not shutil.which("ps"), reason="needs ps")
def test_a_killed_encode_leaves_no_folder_and_no_workers(tmp_path: Path) -> None:
    source = stories(tmp_path / "in", 5)
    (source / "big.txt").write_text("".join(f"{n} and many more words\n\n" for n in range(400_000)))
    code = "import sys; from pathlib import Path; from speedrun.data.encode import encode_files; "
    code += "encode_files([Path(sys.argv[1])], Path(sys.argv[2]), 'pocket', processes=2)"
    script = tmp_path / "script.py"
    script.write_text(f"if __name__ == '__main__':\n    {code}\n")
    process = subprocess.Popen([sys.executable, str(script), str(source), str(tmp_path / "out")])

    def processes() -> dict[int, int]:
        """The worker processes on this machine, with their parents."""
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=", "-o", "ppid=", "-o", "args="], capture_output=True, text=True
        ).stdout
        found = [line.split(maxsplit=2) for line in listed.splitlines() if "spawn_main" in line]
        return {int(pid): int(parent) for pid, parent, _ in found}

    deadline = time.monotonic() + 30
    workers: set[int] = set()
    while len(workers) < 2 and time.monotonic() < deadline:
        workers = {pid for pid, parent in processes().items() if parent == process.pid}
    assert len(workers) == 2
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while workers & processes().keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers & processes().keys()
    assert not (tmp_path / "out").exists()
    (source / "big.txt").unlink()
    encode_files([source], tmp_path / "out", "pocket", notice=quiet).verify()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
