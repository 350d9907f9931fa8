"""Token shards: the `.bin` files every corpus ends up in, and the folder that describes them.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), followed
by the tokens as little-endian uint16. It is the format the speedrun community already shares its tokens in, so
those files open here unchanged. A shard is memory-mapped, so its size costs nothing.

A *token folder* holds shards, the `tokenizer.json` that made them, and a `tokens.json` with the sha256 of each
file, so that anyone can check that two runs saw the same tokens: `speedrun data verify`.
"""

import contextlib
import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from speedrun.checks import Count
from speedrun.errors import UserError
from speedrun.files import atomic_file, read_json, sha256_file, write_json

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN = np.dtype("<u2")
LARGEST_VOCABULARY = 2**16  # ids are uint16
CHUNK = 1 << 22  # tokens looked at in one go when a whole shard must be read


def _header(count: int) -> bytes:
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, count
    return header.tobytes()


class ShardWriter(contextlib.ExitStack):
    """Streams tokens into one shard, which appears under its name only when it is complete.

    `with ShardWriter(path) as shard: shard.append(tokens)`. The tokens go to a temporary file beside `path`;
    leaving the block writes the count, syncs and renames. If the block raises, nothing is left behind.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.count = 0
        self._file = self.enter_context(atomic_file(path))
        self.push(self._finish)
        self._file.write(_header(0))

    def append(self, tokens: np.ndarray) -> None:
        """tokens: (N,) of any integer type, each within 0..65535."""
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"A shard takes a vector of integers, not {tokens.dtype} of shape {tokens.shape}")
        if tokens.size == 0:
            return
        if tokens.dtype != TOKEN and (tokens.min() < 0 or tokens.max() >= LARGEST_VOCABULARY):
            raise ValueError(f"Tokens {tokens.min()}..{tokens.max()} do not fit into uint16")
        self._file.write(tokens.astype(TOKEN, copy=False).tobytes())
        self.count += tokens.size

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._file.seek(0)
            self._file.write(_header(self.count))


def write_shard(path: Path, tokens: np.ndarray) -> None:
    with ShardWriter(path) as shard:
        shard.append(tokens)


def open_shard(path: Path, vocab_size: int | None = None) -> np.ndarray:
    """The tokens of a shard as a read-only uint16 memory map, (N,).

    The header is always checked. With `vocab_size` every token is checked too, which reads the file once.
    """
    try:
        with open(path, "rb") as f:
            raw = f.read(HEADER_BYTES)
            size = os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        raise UserError(f"There is no shard {path}; prepare the data first, or check the name.") from None
    except OSError as e:
        raise UserError(f"The shard {path} cannot be read: {e.strerror}.") from e
    if len(raw) < HEADER_BYTES:
        raise UserError(f"{path} is truncated: it has {size} bytes, the header alone {HEADER_BYTES}; get it again.")
    magic, version, count = (int(x) for x in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise UserError(f"{path} is not a token shard: its magic number is {magic}, not {MAGIC}.")
    if version != VERSION:
        raise UserError(f"{path} is a shard of version {version}, but only version {VERSION} is understood.")
    if size != HEADER_BYTES + TOKEN.itemsize * count:
        held = (size - HEADER_BYTES) / TOKEN.itemsize
        raise UserError(
            f"{path} is damaged: its header promises {count} tokens, but it holds {held:.10g}; get it again."
        )
    if count == 0:  # an empty range cannot be mapped
        tokens = np.empty(0, dtype=TOKEN)
        tokens.flags.writeable = False
        return tokens
    # As a plain array: every slice of a np.memmap repeats its bookkeeping in Python, which costs microseconds.
    tokens = np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES, shape=(count,)).view(np.ndarray)
    if vocab_size is not None:
        _check_tokens(path, tokens, vocab_size)
    return tokens


def _check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    if vocab_size >= LARGEST_VOCABULARY:
        return
    for begin in range(0, len(tokens), CHUNK):
        chunk = tokens[begin : begin + CHUNK]
        if chunk.max() >= vocab_size:
            position = begin + int(np.argmax(chunk >= vocab_size))
            raise UserError(
                f"{path} has token {tokens[position]} at position {position}, outside the vocabulary of "
                f"{vocab_size}; it was made with another tokenizer."
            )


def list_shards(folder: Path, split: str) -> list[Path]:
    """`train_000000.bin` and so on, also with a corpus name in front (`fineweb_train_000001.bin`), sorted."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}; prepare the data first, or check the name.")
    wanted = re.compile(rf"(?:.+_)?{re.escape(split)}_\d{{6}}\.bin")
    return sorted(path for path in folder.iterdir() if wanted.fullmatch(path.name))


@dataclass(frozen=True)
class TokenFile:
    tokens: Count
    sha256: str
    """Empty: not known."""

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + TOKEN.itemsize * self.tokens


@dataclass(frozen=True)
class TokenInfo:
    """tokens.json."""

    tokenizer: str
    """The name it was made with; tokenizer.json is the tokenizer itself."""
    tokenizer_sha256: str
    """Empty: there is no tokenizer.json."""
    vocab_size: Annotated[int, Meta(ge=1, le=LARGEST_VOCABULARY)]
    bos: Count
    files: dict[Annotated[str, Meta(pattern=r"^[\w.-]+\.bin$")], TokenFile]
    """The shards, by name."""

    def __post_init__(self) -> None:
        if self.bos >= self.vocab_size:
            raise ValueError(f"bos is {self.bos}, outside the vocabulary of {self.vocab_size}")


@dataclass(frozen=True)
class TokenFolder(TokenInfo):
    """A folder of shards with its description, as read from `tokens.json`."""

    path: Path = dataclasses.field(kw_only=True)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @classmethod
    def read(cls, path: Path) -> "TokenFolder":
        """Read the description. Costs nothing, and says nothing yet about the shards: see `verify`."""
        described = path / "tokens.json"
        if not path.is_file() and not described.exists():
            raise UserError(
                f"{path} is not a token folder: it has no tokens.json; make one with `speedrun data encode`."
            )
        if path.is_file():
            raise UserError(f"{path} is a file, but a token folder is needed.")
        return cls(**vars(read_json(described, TokenInfo, "Prepare or encode the folder again.")), path=path)

    @classmethod
    def describe(cls, path: Path, *, tokenizer: str, vocab_size: int, bos: int) -> "TokenFolder":
        """Write `tokens.json` for the shards and the tokenizer.json that already lie in `path`."""
        files = {p.name: TokenFile(len(open_shard(p)), sha256_file(p)) for p in sorted(path.glob("*.bin"))}
        folder = cls(tokenizer, sha256_file(path / "tokenizer.json"), vocab_size, bos, files, path=path)
        folder.write()
        return folder

    def write(self) -> None:
        """Write the description into the folder."""
        info = {name: value for name, value in dataclasses.asdict(self).items() if name != "path"}
        write_json(self.path / "tokens.json", info)

    def verify(self) -> None:
        """Check every file against its sha256; the error names the first wrong one."""
        if not self.files:
            raise UserError(f"{self.path / 'tokens.json'} lists no shards; prepare, encode or fetch the folder again.")
        expected = {name: file.sha256 for name, file in self.files.items()}
        expected |= {"tokenizer.json": self.tokenizer_sha256} if self.tokenizer_sha256 else {}
        for name, sha256 in expected.items():
            path = self.path / name
            try:
                found = sha256_file(path)
            except FileNotFoundError:
                raise UserError(f"{path} is missing; prepare, encode or fetch the folder again.") from None
            except OSError as e:
                raise UserError(f"{path} cannot be read: {e.strerror}.") from e
            if found != sha256:
                raise UserError(
                    f"{path} is damaged: its sha256 is {found[:12]}..., not {sha256[:12]}... as in tokens.json; "
                    "delete it, then prepare, encode or fetch the folder again."
                )

    def shards(self, split: str) -> list[Path]:
        """The shards of a split that `tokens.json` lists, in order."""
        found = [path for path in list_shards(self.path, split) if path.name in self.files]
        if not found:
            have = ", ".join(sorted({re.sub(r"_\d{6}\.bin$", "", name) for name in self.files})) or "none"
            raise UserError(f"{self.path} has no {split!r} shards; its splits are: {have}.")
        return found

    def tokens(self, split: str) -> int:
        """How many tokens a split has."""
        return sum(self.files[path.name].tokens for path in self.shards(split))
