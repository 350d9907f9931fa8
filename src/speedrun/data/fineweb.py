"""FineWeb as the speedrun community shares it: GPT-2 tokens in chunks of 100 M, from the Hugging Face hub.

    speedrun data fetch fineweb10B --chunks 9

The files go to home()/fineweb10B: `fineweb_val_000000.bin` and `fineweb_train_000001.bin` to `..._000103.bin`. The
folder's tokens.json lists each with its size and the sha256 that the hub has for it, so it is a token folder like any
other: `speedrun data verify` checks it, and `speedrun train --data` takes it. Shards that were put there by hand are
used as they are, with no sha256, until a fetch has looked at them.
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from speedrun.data import gpt2, hub
from speedrun.data.loader import Loader, LoaderConfig
from speedrun.data.shards import TokenFile, TokenFolder, list_shards, open_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.errors import UserError
from speedrun.files import fsync_file, fsync_folder, home, locked, scratch, sha256_file

NAME = "fineweb10B"
DATASET = "kjj0/fineweb10B-gpt2"
CHUNKS = 103  # of training; there is one more for validation
CHUNK_TOKENS = 100_000_000
VAL = "fineweb_val_000000.bin"
FETCH = f"speedrun data fetch {NAME} --chunks"

# How much tail="discard" throws away is only known by looking at the documents. This estimate is meant to be too high:
# the records that cut documents at 2,048 tokens trained on 599 M tokens with 9 chunks, so 1.5 times what is trained on
# is enough. It has two parts: the ends of long documents, and the rest of the document that is cut where a row ends,
# which weighs more the shorter the rows are.
DISCARDED = 0.45  # tokens per token trained
DISCARDED_PER_ROW = 700


def fineweb_folder() -> Path:
    return home() / NAME


def train_name(chunk: int) -> str:
    return f"fineweb_train_{chunk:06d}.bin"


# --- how much is needed ---


def chunks_needed(tokens: int, seq_len: int, loader: LoaderConfig) -> int:
    """Chunks for one pass that trains on `tokens` tokens in rows of `seq_len`. Exact, unless tails are discarded."""
    rows = -(-tokens // seq_len)
    if loader.packing == "documents" and loader.tail == "discard":
        return -(-int(tokens * (1 + DISCARDED) + rows * DISCARDED_PER_ROW) // CHUNK_TOKENS)
    return -(-rows // max(1, (CHUNK_TOKENS - 1) // seq_len))  # a row never takes tokens of two chunks


def check_supply(folder: TokenFolder, loader: LoaderConfig, *, tokens: int, seq_len: int) -> None:
    """Refuse a run that would come to the end of the shards: it would go on with tokens it has already seen.

    Quick when there are plenty or too few; in between the rows are counted, which reads every shard.
    """
    have = folder.tokens("train")
    needed = chunks_needed(tokens, seq_len, loader)
    if have >= needed * CHUNK_TOKENS:
        return
    if have <= tokens:
        usable = have
    else:
        shards = folder.shards("train")
        rows = Loader(shards, loader, bos=folder.bos, vocab_size=folder.vocab_size, seed=0).rows_in_epoch(seq_len)
        usable = rows * seq_len
        if usable >= tokens:
            return
    counted = f"{have:,}" if usable == have else f"{have:,}, of which rows of {seq_len:,} can use {usable:,}"
    way_out = f"run `{FETCH} {needed}`" if needed <= CHUNKS else "choose fewer schedule.steps"
    raise UserError(f"The run trains on {tokens:,} tokens, but {folder.path} has only {counted}; {way_out}.")


# --- what is there ---


def load() -> TokenFolder:
    """The shards that are there, checked by size alone: `speedrun data verify` reads them."""
    path = fineweb_folder()
    listed = _listed(path)
    again = f"run `{FETCH} {max(_chunks(listed.files), default=1)}`"
    for name, file in listed.files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise UserError(f"{path / name} is missing, though tokens.json lists it; {again}.") from None
        if size != file.bytes:
            raise UserError(f"{path / name} has {size:,} bytes, not {file.bytes:,} as in tokens.json; {again}.")
    shards = {split: list_shards(path, split) if path.is_dir() else [] for split in ("train", "val")}
    missing = [split for split, found in shards.items() if not found]
    if missing:
        raise UserError(
            f"There are no FineWeb {' and no '.join(missing)} shards in {path}; run `speedrun data fetch {NAME}`, or "
            "set SPEEDRUN_HOME to where you keep them."
        )
    files = {p.name: listed.files.get(p.name) or TokenFile(len(open_shard(p)), "") for s in shards.values() for p in s}
    chunks = _chunks(files)
    gaps = sorted(set(range(1, max(chunks, default=0))) - chunks)
    if gaps:  # the track's stream has no holes
        raise UserError(
            f"{path / train_name(gaps[0])} is missing, though later chunks are there; run `{FETCH} {max(chunks)}`."
        )
    return dataclasses.replace(listed, files=files)


def _chunks(names: Iterable[str]) -> set[int]:
    """The numbers of the training chunks among these files."""
    return {int(name[-10:-4]) for name in names if re.fullmatch(r"fineweb_train_\d{6}\.bin", name)}


def _listed(path: Path) -> TokenFolder:
    """What tokens.json lists, which is nothing if there is none."""
    if (path / "tokens.json").exists():
        listed = TokenFolder.read(path)
        if (listed.vocab_size, listed.bos) != (gpt2.VOCAB_SIZE, gpt2.BOS):
            raise UserError(f"{path} holds tokens of {listed.tokenizer!r}, not of GPT-2; move it away.")
        return listed
    return _nothing(path)


def _nothing(path: Path) -> TokenFolder:
    return TokenFolder("gpt2", "", gpt2.VOCAB_SIZE, gpt2.BOS, {}, path=path)


# --- fetching ---


def fetch(chunks: int, notice: hub.Notice) -> TokenFolder:
    """Make sure that the validation shard and the first `chunks` training chunks are there; downloads what is missing.

    Files that tokens.json lists and that have their size are taken as good, so a second call needs no network.
    """
    if not 1 <= chunks <= CHUNKS:
        raise UserError(f"{NAME} has training chunks 1 to {CHUNKS}, so --chunks {chunks} is not possible.")
    wanted = [VAL, *(train_name(chunk) for chunk in range(1, chunks + 1))]
    path = fineweb_folder()
    with locked(home() / f".{NAME}.lock", lambda: notice(f"another process is fetching {NAME}; waiting")):
        try:
            listed = _listed(path)
        except UserError as e:  # the files themselves may be good, and are looked at below
            notice(f"{e} Checking every file.")
            listed = _nothing(path)
        missing = [name for name in wanted if not _in_place(listed, name)]
        if missing:
            remote = _remote(missing, notice)
            with scratch(path) as folder:
                for name in [name for name in missing if (path / name).exists()]:
                    if _same(path / name, remote[name]):
                        listed = _add(listed, name, remote[name].sha256)
                        missing.remove(name)
                    else:
                        notice(f"{path / name} is not what the hub has; downloading it")
                _check_space(path, [remote[name].size for name in missing])
                for number, name in enumerate(missing, start=1):
                    part = hub.download(DATASET, name, remote[name], folder, notice)
                    open_shard(part)
                    fsync_file(part)
                    os.replace(part, path / name)
                    fsync_folder(path)
                    listed = _add(listed, name, remote[name].sha256)
                    notice(f"{name} is here and good, {number} of {len(missing)}")
        return load()


def _in_place(listed: TokenFolder, name: str) -> bool:
    path = listed.path / name
    return name in listed.files and path.is_file() and path.stat().st_size == listed.files[name].bytes


def _remote(names: list[str], notice: hub.Notice) -> dict[str, hub.Remote]:
    remote = hub.list_files(DATASET, notice)
    absent = [name for name in names if name not in remote]
    if absent:
        raise UserError(f"{hub.endpoint()} lists no {absent[0]} in {DATASET}; check HF_ENDPOINT, or ask for less.")
    return {name: remote[name] for name in names}


def _same(path: Path, remote: hub.Remote) -> bool:
    return path.is_file() and path.stat().st_size == remote.size and sha256_file(path) == remote.sha256


def _add(listed: TokenFolder, name: str, sha256: str) -> TokenFolder:
    """tokens.json with one more file; written after the file, so that it never promises what is not there."""
    files = {**listed.files, name: TokenFile(len(open_shard(listed.path / name)), sha256)}
    grown = dataclasses.replace(listed, files=files)
    grown.write()
    return grown


def _check_space(path: Path, sizes: list[int]) -> None:
    need, free = sum(sizes), shutil.disk_usage(path).free
    if need > free:
        raise UserError(
            f"{len(sizes)} files of {NAME} take {need / 1e9:,.2f} GB more, but {path} has {free / 1e9:,.2f} GB free; "
            "make room, ask for fewer --chunks, or set SPEEDRUN_HOME to a larger disk."
        )


def add_tokenizer(folder: TokenFolder) -> TokenFolder:
    """Put GPT-2's tokenizer.json beside the shards: with it, models trained on them can write text."""
    if not folder.tokenizer_path.exists() or sha256_file(folder.tokenizer_path) != folder.tokenizer_sha256:
        Tokenizer.load("gpt2").save(folder.tokenizer_path)
        sha256 = sha256_file(folder.tokenizer_path)
        dataclasses.replace(_listed(folder.path), tokenizer_sha256=sha256).write()
    return load()
