"""Shards become batches of rows.

A row of length T takes T + 1 tokens of the stream: the first T are its inputs, the last T its targets. There are
two packings:

- `stream`: rows of the token stream, which know nothing of documents;
- `documents`: rows that know where a piece of a document begins, so that attention can stay inside it.
  `tail="split"` uses every token: a document that does not fit goes on in the next row as a new piece.
  `tail="discard"` begins every row at a document, and throws away what does not fit, as the records did.

Nothing is copied when a shard is opened. A shuffled epoch is a permutation of document positions, and a row is
gathered from the memory map when it is asked for. The batches depend on the seed and on the sizes asked for, and
on nothing else: every rank makes the same ones, and takes its share of the rows (`Batch.rows`).

    loader = Loader(shards, LoaderConfig(), bos=folder.bos, vocab_size=folder.vocab_size, seed=0)
    batch = loader.next(batch_size=8, seq_len=1024)
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from speedrun.checks import Positive, check_fields
from speedrun.data.documents import DocumentOrder, find_documents, piece_starts
from speedrun.data.shards import open_shard
from speedrun.errors import UserError

IGNORED = -1  # the target of a position that is not counted
USUAL_DOCUMENT = 256  # tokens; the documents of a batch are longer on average
OPEN_SHARDS = 8  # how many shards keep their document index in memory

Packing = Literal["stream", "documents"]


@dataclass(frozen=True)
class LoaderConfig:
    packing: Packing = "stream"
    """stream: rows of the token stream, no boundaries. documents: rows know where documents begin."""
    shuffle: Literal["documents", "sequences"] | None = "documents"
    """None: the stream as it lies in the shards. documents: these in an order drawn per epoch. sequences: the sequences
    of that stream in a drawn order, too, so that a batch is not a few neighbouring pages."""
    tail: Literal["split", "discard"] = "split"
    """What becomes of a document that does not fit; for documents packing only."""
    max_doc_len: Positive = 2048
    """Longest piece of a document, in tokens; for documents packing only."""

    def __post_init__(self) -> None:
        check_fields(self, "loader.")


@dataclass(frozen=True)
class Batch:
    inputs: torch.Tensor  # (R, T) int64
    targets: torch.Tensor  # (R, T) int64, -1 = not counted
    doc_starts: tuple[np.ndarray, ...] | None
    """Per row the offsets (int64, ascending, first 0) where a piece begins; None for stream packing."""
    state: dict[str, Any]
    """State of the loader after this batch, for checkpoints."""
    max_doc_len: int | None = None
    """No piece is longer; None: a row's length."""

    def rows(self, begin: int, end: int) -> "Batch":
        doc_starts = None if self.doc_starts is None else self.doc_starts[begin:end]
        return Batch(self.inputs[begin:end], self.targets[begin:end], doc_starts, self.state, self.max_doc_len)

    @property
    def counted(self) -> int:
        """How many tokens are predicted and count."""
        return int((self.targets >= 0).sum())

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """int32: where each piece begins in the rows laid end to end, and the end, once for each empty piece after it.

        Empty pieces make batches of one shape alike: the usual number has room for pieces of USUAL_DOCUMENT tokens and
        for the cuts of `max_doc_len`. Any data may have more, so it doubles until they fit.
        """
        if self.doc_starts is None:
            return None
        rows, seq_len = self.inputs.shape
        begins = np.concatenate([[0], *(starts + row * seq_len for row, starts in enumerate(self.doc_starts))])[1:]
        room = rows * (math.ceil(seq_len / USUAL_DOCUMENT) + math.ceil(seq_len / (self.max_doc_len or seq_len)))
        while room < len(begins):
            room *= 2
        return torch.from_numpy(np.pad(begins, (0, room + 1 - len(begins)), constant_values=rows * seq_len)).int()

    @property
    def doc_ids(self) -> torch.Tensor | None:
        """(R, T) int64: each position's number of its piece in the row, from 0."""
        if self.doc_starts is None:
            return None
        begins = np.zeros(self.inputs.shape, dtype=np.int64)
        for row, starts in enumerate(self.doc_starts):
            begins[row, starts[1:]] = 1
        return torch.from_numpy(begins.cumsum(1))


class Loader:
    """An endless source of batches. Its place is (epoch, shard, position), see `state_dict`.

    `position` counts tokens of the epoch's line of documents, or documents when tails are discarded. A row
    never takes tokens of two shards: what is left of a shard and too short for a row is dropped.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        config: LoaderConfig,
        *,
        bos: int,
        vocab_size: int,
        seed: int,
        notice: Callable[[str], None] = print,
    ) -> None:
        if not shards:
            raise UserError("There are no shards to load; name a folder that has some.")
        for path in shards:
            open_shard(path)  # report a damaged header now, not after hours of training
        self.shards = tuple(shards)
        self.config = config
        self.bos = bos
        self.vocab_size = vocab_size
        self.seed = seed
        self.notice = notice
        self._packed = config.packing == "documents"
        self._discard = self._packed and config.tail == "discard"
        self._epoch, self._shard, self._position = 0, 0, 0
        self._documents = lru_cache(OPEN_SHARDS)(self._find_documents)
        self._line = lru_cache(1)(self._arrange)
        self._deal = lru_cache(1)(self._draw)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "shard": self._shard, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            epoch, shard, position = (int(state[name]) for name in ("epoch", "shard", "position"))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{state!r} is not the state of a loader.") from None
        if min(epoch, shard, position) < 0 or shard >= len(self.shards):
            raise UserError(f"The saved place {state!r} is not in these {len(self.shards)} shards; use the same data.")
        self._epoch, self._shard, self._position = epoch, shard, position

    def rows_in_epoch(self, seq_len: int) -> int:
        """How many rows of this length one pass over the shards gives. Reads all of them."""
        lines = ((self._line(0, shard), (0, shard)) for shard in range(len(self.shards)))
        return sum(len(self._walk(line, place, 0, sys.maxsize, seq_len)[0]) for line, place in lines)

    def next(self, batch_size: int, seq_len: int) -> Batch:
        """The next `batch_size` rows of `seq_len` tokens."""
        epoch, shard, position = self._epoch, self._shard, self._position
        parts: list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]] = []
        news: list[str] = []
        done, barren = 0, 0
        while True:
            line = self._line(epoch, shard)
            fresh = position == 0
            places, position = self._walk(line, (epoch, shard), position, batch_size - done, seq_len)
            if len(places):
                parts.append(self._rows(line, places, seq_len))
            done += len(places)
            if done == batch_size:
                break
            barren += fresh and not places
            shard, position = shard + 1, 0
            if shard == len(self.shards):
                if barren == len(self.shards):  # a whole epoch without a row: the next would be no better
                    raise self._too_short(seq_len)
                epoch, shard, barren = epoch + 1, 0, 0
                news.append(f"all training tokens were used; epoch {epoch} begins")
        self._epoch, self._shard, self._position = epoch, shard, position
        for line_of_news in news:
            self.notice(line_of_news)
        return self._batch(parts)

    # --- the walk ---

    def _walk(
        self, line: DocumentOrder, place: tuple[int, int], position: int, rows: int, seq_len: int
    ) -> tuple[Sequence[int], int]:
        """Where in the line of (epoch, shard) up to `rows` rows begin, and the position after them."""
        if self.config.shuffle == "sequences" and not self._discard:
            # The position counts tokens, so that it keeps its meaning when the length of the rows changes.
            done = -(-position // seq_len)
            chosen = self._deal(*place, (int(line.cu_seqlens[-1]) - 1) // seq_len, seq_len)[done : done + rows]
            return [int(row) * seq_len for row in chosen], (done + len(chosen)) * seq_len
        if not self._discard:
            count = max(0, min(rows, (int(line.cu_seqlens[-1]) - 1 - position) // seq_len))
            end = position + count * seq_len
            return range(position, end, seq_len), end
        places: list[int] = []
        cu_seqlens = line.cu_seqlens
        total = int(cu_seqlens[-1])
        while len(places) < rows and position < len(cu_seqlens):
            begin = int(cu_seqlens[position])
            if begin + seq_len + 1 > total:
                break
            places.append(begin)
            position = int(cu_seqlens.searchsorted(begin + seq_len + 1, side="left"))  # the cut document is left behind
        return places, position

    def _rows(
        self, line: DocumentOrder, places: Sequence[int], seq_len: int
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Inputs (R, T), targets (R, T) and starts of the rows that begin at these places of the line."""
        starts: list[np.ndarray] = []
        if self._discard:  # little is left out between two rows, so they are read in one go
            begin = places[0]
            stretch = line.read(begin, places[-1] + seq_len + 1)
            taken = np.stack([stretch[place - begin : place - begin + seq_len + 1] for place in places])  # (R, T + 1)
            first, last = line.between(np.array(places), seq_len)
            starts = [line.cu_seqlens[a - 1 : b] - line.cu_seqlens[a - 1] for a, b in zip(first, last, strict=True)]
        elif self.config.shuffle == "sequences":
            taken = np.stack([line.read(place, place + seq_len + 1) for place in places])  # (R, T + 1)
            if self._packed:
                inner = [line.inner(place, place + seq_len) for place in places]
                starts = [piece_starts(begins, 1, seq_len, self.config.max_doc_len)[0] for begins in inner]
        else:
            begin, end = places[0], places[-1] + seq_len  # the rows lie end to end
            taken = np.lib.stride_tricks.sliding_window_view(line.read(begin, end + 1), seq_len + 1)[::seq_len]
            if self._packed:
                starts = piece_starts(line.inner(begin, end), len(places), seq_len, self.config.max_doc_len)
        return taken[:, :-1].astype(np.int64), taken[:, 1:].astype(np.int64), starts

    def _batch(self, parts: list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]) -> Batch:
        inputs, targets = parts[0][:2]
        if len(parts) > 1:
            inputs, targets = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        starts = tuple(start for part in parts for start in part[2]) if self._packed else None
        longest = self.config.max_doc_len
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), starts, self.state_dict(), longest)

    # --- shards ---

    def _arrange(self, epoch: int, shard: int) -> DocumentOrder:
        """The line of (epoch, shard)."""
        index = int(self._draw(epoch, len(self.shards), len(self.shards))[shard])
        tokens, begins, lengths = self._documents(index)
        if self.config.shuffle is not None:
            order = self._draw(epoch, index, len(begins))
            begins, lengths = begins[order], lengths[order]
        if self._discard:
            lengths = np.minimum(lengths, self.config.max_doc_len)
        cu_seqlens = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        sequential = self.config.shuffle is None and not self._discard
        return DocumentOrder(tokens, begins, cu_seqlens, sequential)

    def _draw(self, epoch: int, what: int, count: int, seq_len: int | None = None) -> np.ndarray:
        """An order of `count` things: the documents of shard `what`, or the shards if it is their number, or
        (with `seq_len`) the rows of the shard at place `what`."""
        if self.config.shuffle is None:
            return np.arange(count)
        # Raw output of a bit generator is the one thing numpy promises not to change between versions.
        entropy = [self.seed, epoch, what] if seq_len is None else [self.seed, epoch, what, seq_len]
        raw = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count)
        return np.argsort(raw, kind="stable")

    def _find_documents(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a shard, and where its documents begin and how long they are."""
        tokens = open_shard(self.shards[index], self.vocab_size)
        begins = find_documents(tokens, self.bos, headless=not self._discard)
        return tokens, begins, np.diff(begins, append=len(tokens))

    def _too_short(self, seq_len: int) -> UserError:
        most = 0
        for index in range(len(self.shards)):
            lengths = self._documents(index)[2]
            most = max(most, int((np.minimum(lengths, self.config.max_doc_len) if self._discard else lengths).sum()))
        return UserError(
            f"No row of {seq_len} tokens can be made: it takes {seq_len + 1} tokens of one shard, and the largest "
            f"of {len(self.shards)} has {most}; choose shorter rows or more text."
        )


class Prefetcher:
    """Makes the batches of a plan ahead of time, in a thread, which alone may use the loader meanwhile.

    The loader runs ahead of what was consumed, so a checkpoint stores `batch.state` of the last consumed one.
    An error in the thread is raised by the `next()` that would have given the batch, and by all after it.
    """

    def __init__(self, loader: Loader, plan: Iterable[tuple[int, int]], *, depth: int = 2) -> None:
        """plan: (batch_size, seq_len) of each batch."""
        self._loader, self._plan = loader, iter(plan)
        self._pool = ThreadPoolExecutor(1, "speedrun-prefetch")
        self._ahead = deque(self._pool.submit(self._make) for _ in range(depth))

    def _make(self) -> Batch:
        shape = next(self._plan, None)
        if shape is None:
            raise RuntimeError("All batches of the plan were already given out")
        return self._loader.next(*shape)

    def next(self) -> Batch:
        self._ahead.append(self._pool.submit(self._make))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        return batch

    def close(self) -> None:
        """Stop the thread and wait for it. May be called twice."""
        self._pool.shutdown(cancel_futures=True)


def validation_batches(
    shards: Sequence[Path],
    *,
    batch_size: int,
    seq_len: int,
    bos: int,
    vocab_size: int,
    packing: Packing,
    max_doc_len: int | None,
    tokens: int | None = None,
) -> Iterator[Batch]:
    """Contiguous rows over a whole split, or over its first `tokens` predictions; all batches have one shape.

    Without `max_doc_len` a piece begins at a separator or with a row, and nowhere else.
    The shards are one stream, in which every token after the first is predicted exactly once. What is missing
    at the end of the last row and of the last batch is padded with separators whose targets do not count.
    """
    opened = [open_shard(path, vocab_size) for path in shards]
    edges = np.cumsum([0, *(len(shard) for shard in opened)])
    available = int(edges[-1]) - 1
    wanted = available if tokens is None else tokens
    if available < 1 or not 1 <= wanted <= available:
        raise UserError(
            f"Validation on {wanted} predicted tokens is not possible: the split has {max(available, 0)}; "
            "choose fewer, or more text."
        )
    size = batch_size * seq_len
    for begin in range(0, wanted, size):
        end = min(begin + size, wanted)  # predictions begin:end, from tokens begin:end + 1
        parts = [s[max(0, begin - e) : max(0, end + 1 - e)] for s, e in zip(opened, edges, strict=False)]
        taken, missing = np.concatenate(parts).astype(np.int64), (0, begin + size - end)
        inputs = np.pad(taken[:-1], missing, constant_values=bos)
        targets = np.pad(taken[1:], missing, constant_values=IGNORED)
        starts = None
        if packing == "documents":
            inner = np.flatnonzero(inputs[: end - begin] == bos)
            inner = np.append(inner, end - begin) if end - begin < size else inner  # padding is a piece of its own
            starts = tuple(piece_starts(inner, batch_size, seq_len, max_doc_len or seq_len))
        shape = batch_size, seq_len
        found = torch.from_numpy(inputs.reshape(shape)), torch.from_numpy(targets.reshape(shape))
        yield Batch(*found, starts, {}, max_doc_len)
