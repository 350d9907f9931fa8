"""One's own text becomes a token folder.

    speedrun data encode --tokenizer pocket --out my-folder books/ notes.txt chats.jsonl

Text streams through: files are read piece by piece, encoded by all cores, and written as the results come in, so
that memory does not grow with the text. text.py says what counts as a document.

Whether a document goes to `val` depends on the hash of its text alone, so it stays there when more files are
added, and a text that occurs twice is never on both sides.
"""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from speedrun.data.shards import LARGEST_VOCABULARY, ShardWriter, TokenFolder
from speedrun.data.text import find_files, read_documents
from speedrun.data.tokenizer import Tokenizer
from speedrun.errors import UserError
from speedrun.files import new_folder

TASK_CHARACTERS = 1 << 18  # how much text a worker takes at a time


def encode_files(
    paths: Sequence[Path],
    out: Path,
    tokenizer: str,
    *,
    val_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
    processes: int = 1,
    notice: Callable[[str], None] = print,
) -> TokenFolder:
    """Encode files and folders into a token folder with `train` and `val` shards; it appears when complete.

    The result does not depend on `processes`. An older token folder at `out` is replaced.
    """
    loaded = Tokenizer.load(tokenizer)
    if loaded.vocab_size > LARGEST_VOCABULARY:
        raise UserError(
            f"The tokenizer {tokenizer} has {loaded.vocab_size} entries, but shards hold at most "
            f"{LARGEST_VOCABULARY}; choose a smaller one."
        )
    _ = loaded.bos  # a tokenizer without a separator is refused before any work
    files = find_files(paths)
    _refuse_to_replace(out)
    with new_folder(out) as folder:
        tasks = _tasks(document for file in files for document in read_documents(file, notice))
        documents = _encode_all(tasks, loaded, processes)
        train, val = _write(folder, documents, val_fraction, shard_tokens)
        if train + val == 0:
            raise UserError(f"There is no text in {_named(files)}; name files that have some.")
        if train == 0 or val == 0:
            raise UserError(
                f"Train and val need a document each, but of {train + val} document(s) in {_named(files)} {val} would "
                "go to val; add more text (every 16,384 characters make a document) or change val_fraction."
            )
        loaded.save(folder / "tokenizer.json")
        TokenFolder.describe(folder, tokenizer=tokenizer, vocab_size=loaded.vocab_size, bos=loaded.bos)
    result = TokenFolder.read(out)
    notice(
        f"{out}: {train + val:,} documents of {len(files):,} files; "
        f"tokens: train {result.tokens('train'):,}, val {result.tokens('val'):,}"
    )
    return result


def _named(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"the {len(files)} files"


def _refuse_to_replace(out: Path) -> None:
    """`new_folder` replaces what is there; only an older result may be."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file, but --out names a folder; choose another name.")
    inside = sorted(path.name for path in out.iterdir())
    strange = [n for n in inside if n not in ("tokens.json", "tokenizer.json") and not n.endswith(".bin")]
    if strange:
        raise UserError(f"{out} is not empty: replacing it would delete {strange[0]}; choose a new name for --out.")
    if inside and "tokens.json" not in inside:
        raise UserError(f"{out} holds shards without a tokens.json; choose a new name for --out.")


Task = list[str]  # documents
Encoded = list[tuple[int, np.ndarray]]  # per document: hash of its text, and its tokens with the separator in front


def _tasks(documents: Iterable[str]) -> Iterator[Task]:
    task: Task = []
    size = 0
    for document in documents:
        task.append(document)
        size += len(document)
        if size >= TASK_CHARACTERS:
            yield task
            task, size = [], 0
    if task:
        yield task


def _encode(tokenizer: Tokenizer, task: Task) -> Encoded:
    encoded = []
    for document, ids in zip(task, tokenizer.encode_batch(task), strict=True):
        key = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")
        encoded.append((key, np.array([tokenizer.bos, *ids], dtype=np.uint16)))
    return encoded


_worker: Tokenizer | None = None


def _start_worker(content: str, name: str) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to everyone; the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_follow_parent, daemon=True).start()
    _worker = Tokenizer(content, name)


def _follow_parent() -> None:
    """End with the parent even if it was killed; otherwise a worker would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(task: Task) -> Encoded:
    assert _worker is not None
    return _encode(_worker, task)


def _encode_all(tasks: Iterator[Task], tokenizer: Tokenizer, processes: int) -> Generator[Encoded, None, None]:
    """The encoded tasks in order. At most a few tasks per process are in memory at any time."""
    head = list(itertools.islice(tasks, 2))
    tasks = itertools.chain(head, tasks)
    if processes == 1 or len(head) < 2:  # starting a process takes longer than encoding one task
        yield from (_encode(tokenizer, task) for task in tasks)
        return
    # spawn: a forked copy of a process with threads may hang
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start_worker, (tokenizer.content, tokenizer.name)
    )
    waiting: deque[Future[Encoded]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_work, task))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as e:
        raise UserError("A worker process ended, probably for lack of memory; use fewer processes.") from e
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _SplitWriter(contextlib.ExitStack):
    """Documents of one split into as many shards as needed. Only one that no shard could hold is cut."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        super().__init__()
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.documents = 0
        self._shards = 0
        self._shard: ShardWriter | None = None

    def add(self, tokens: np.ndarray) -> None:
        """tokens: (N,) uint16"""
        self.documents += 1
        while len(tokens):
            if self._shard and self._shard.count and self._shard.count + len(tokens) > self.shard_tokens:
                self.close()
                self._shard = None
            if self._shard is None:
                self._shard = self.enter_context(ShardWriter(self.folder / f"{self.split}_{self._shards:06d}.bin"))
                self._shards += 1
            self._shard.append(tokens[: self.shard_tokens])
            tokens = tokens[self.shard_tokens :]


def _write(
    folder: Path, results: Generator[Encoded, None, None], val_fraction: float, shard_tokens: int
) -> tuple[int, int]:
    """Distribute documents over train and val; returns how many went to each.

    If no hash is small enough for val, the document with the smallest one goes there. It is held back until that
    is known, which moves it within `train` if it turns out not to be needed.
    """
    limit = int(val_fraction * 2**64)
    smallest: tuple[int, np.ndarray] | None = None
    with (
        _SplitWriter(folder, "train", shard_tokens) as train,
        _SplitWriter(folder, "val", shard_tokens) as val,
        contextlib.closing(results),  # ends the workers
    ):
        for key, tokens in (document for encoded in results for document in encoded):
            if key < limit:
                val.add(tokens)
            elif val.documents or (smallest and smallest[0] <= key):
                train.add(tokens)
            else:
                if smallest:
                    train.add(smallest[1])
                smallest = key, tokens
        if smallest:
            (train if val.documents or not train.documents else val).add(smallest[1])
    return train.documents, val.documents
