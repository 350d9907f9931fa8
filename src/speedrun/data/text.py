"""Text files become documents.

A plain text file is a document, and one that is larger than 16,384 characters is cut at blank lines into
documents of about that size, so that even a single big file has documents to hold out, and memory stays constant.
A line of a `.jsonl` file is a document: its "text". Folders are searched for .txt, .md and .jsonl files. Windows
line ends become `\\n`, a byte order mark and blank lines around a document are removed, and documents without text
are skipped.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from speedrun.errors import UserError

SUFFIXES = {".txt", ".md", ".jsonl"}
DOCUMENT_CHARACTERS = 1 << 14  # a plain file is cut at the first blank line after this many,
LONGEST_CHARACTERS = 1 << 16  # and at white space before this many if there is no blank line
READ_CHARACTERS = 1 << 17


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those found in folders (sorted, hidden ones left out), each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            files = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            inside = sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts))
            if not inside:
                raise UserError(f"The folder {path} has no .jsonl, .md or .txt files; name the files themselves.")
            for file in inside:
                found.setdefault(file.resolve(), file)
        elif path.exists():
            found.setdefault(path.resolve(), path)
        else:
            raise UserError(f"There is no file or folder {path}; check the name.")
    if not found:
        raise UserError("No files were named; name at least one text file or folder.")
    return list(found.values())


def read_documents(path: Path, notice: Callable[[str], None]) -> Iterator[str]:
    """The documents of a file, one after the other; never the whole file in memory."""
    any_text = False
    try:
        for document in _read_jsonl(path) if path.suffix.lower() == ".jsonl" else _read_plain(path):
            document = document.strip("\n")
            if document.strip():
                any_text = True
                yield document
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}.") from e
    if not any_text:
        notice(f"{path} has no text; skipped")


def _not_utf8(where: str, e: UnicodeDecodeError) -> UserError:
    return UserError(f"{where} is not UTF-8: byte {e.object[e.start]:#x} cannot be decoded; convert the file to UTF-8.")


def _read_plain(path: Path) -> Iterator[str]:
    pending = ""
    with open(path, encoding="utf-8-sig") as f:
        try:
            while text := f.read(READ_CHARACTERS):
                pending += text
                while len(pending) > LONGEST_CHARACTERS:  # so much that the cut cannot depend on what is still to come
                    at = _cut(pending)
                    yield pending[:at]
                    pending = pending[at:]
        except UnicodeDecodeError as e:
            raise _not_utf8(str(path), e) from None
    while len(pending) > DOCUMENT_CHARACTERS and (at := _cut(pending)) < len(pending):
        yield pending[:at]
        pending = pending[at:]
    yield pending


_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_LAST_SPACE = re.compile(r".*\s", re.DOTALL)


def _cut(text: str) -> int:
    """Where the first document of `text` ends."""
    blank = _BLANK_LINE.search(text, DOCUMENT_CHARACTERS, LONGEST_CHARACTERS)
    if blank:
        return blank.end()
    if len(text) <= LONGEST_CHARACTERS:
        return len(text)
    space = _LAST_SPACE.match(text, DOCUMENT_CHARACTERS, LONGEST_CHARACTERS)
    return space.end() if space else LONGEST_CHARACTERS


def _read_jsonl(path: Path) -> Iterator[str]:
    with open(path, "rb") as f:
        for number, raw in enumerate(f, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as e:
                raise _not_utf8(f"{path}:{number}", e) from None
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f"{path}:{number} is not valid JSON ({e}); correct or remove the line.") from None
            text = value.get("text") if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise UserError(f'{path}:{number} has no "text" field with a string; add it or remove the line.')
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"{path}:{number} holds half of a surrogate pair, which is not text; remove it."
                ) from None
            yield text.replace("\r\n", "\n")
