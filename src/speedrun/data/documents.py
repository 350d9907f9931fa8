"""Positions of documents: in a shard, in the order of an epoch, and in the sequences of a batch.

Everything is vectorised with NumPy: a loop over tokens in Python would be slower than a fast machine trains.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from speedrun.data.shards import CHUNK


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of one shard, each cut to the part in use, concatenated in the order of one epoch.

    Document i is `tokens[doc_starts[i]:]`, of length `cu_seqlens[i + 1] - cu_seqlens[i]`; its position in the
    concatenation is `cu_seqlens[i]:cu_seqlens[i + 1]`. `sequential`: the concatenation is the shard itself, and reading
    is slicing.
    """

    tokens: np.ndarray  # (N,) uint16
    doc_starts: np.ndarray  # (D,) int64
    cu_seqlens: np.ndarray  # (D + 1,) int64
    sequential: bool

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens begin:end of the concatenation, (end - begin,) uint16."""
        if self.sequential:
            return self.tokens[begin:end]
        first = int(self.cu_seqlens.searchsorted(begin, side="right")) - 1
        last = int(self.cu_seqlens.searchsorted(end, side="left"))
        cu_seqlens = self.cu_seqlens[first : last + 1].copy()
        shift = self.doc_starts[first:last] - cu_seqlens[:-1]  # from the concatenation to the shard
        cu_seqlens[0], cu_seqlens[-1] = begin, end
        places = np.repeat(shift, np.diff(cu_seqlens))
        places += np.arange(begin, end)
        return self.tokens.take(places)

    def between(self, begins: np.ndarray | int, seq_len: int) -> tuple[Any, Any]:
        """(first, last): `cu_seqlens[first:last]` lie strictly inside begin:begin + seq_len, for each begin."""
        ends = begins + seq_len
        return self.cu_seqlens.searchsorted(begins, side="right"), self.cu_seqlens.searchsorted(ends, side="left")

    def inner(self, begin: int, end: int) -> np.ndarray:
        """Where documents begin strictly inside begin:end of the concatenation, relative to `begin`."""
        first, last = self.between(begin, end - begin)
        return self.cu_seqlens[first:last] - begin


def find_documents(tokens: np.ndarray, bos: int, *, headless: bool) -> np.ndarray:
    """Where documents begin in tokens (N,), as int64. `headless`: tokens before the first separator are one."""
    found = [np.flatnonzero(tokens[begin : begin + CHUNK] == bos) + begin for begin in range(0, len(tokens), CHUNK)]
    first = [0] if headless and len(tokens) and tokens[0] != bos else []
    return np.concatenate([np.array(first, dtype=np.int64), *found])


def piece_starts(inner: np.ndarray, rows: int, seq_len: int, max_doc_len: int) -> list[np.ndarray]:
    """Per row the offsets where pieces begin, for rows that lie end to end.

    A piece begins with its row, with a document (`inner`: their positions from the first row's start),
    and after every `max_doc_len` tokens of the same document.
    """
    row_begins = np.arange(rows + 1) * seq_len
    marks = np.union1d(row_begins[:-1], inner)
    lengths = np.diff(marks, append=rows * seq_len)
    pieces = -(-lengths // max_doc_len)
    starts = marks
    if len(pieces) and pieces.max() > 1:
        before = np.cumsum(pieces) - pieces
        within = np.arange(pieces.sum()) - np.repeat(before, pieces)
        starts = np.repeat(marks, pieces) + within * max_doc_len
    cuts = starts.searchsorted(row_begins)
    return [starts[cuts[row] : cuts[row + 1]] - row_begins[row] for row in range(rows)]
