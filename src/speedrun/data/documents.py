"""Where documents lie: in a shard, in the order of an epoch, and in the rows of a batch.

No function here touches tokens one by one in Python; that is what lets a loader keep up with a fast machine.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from speedrun.data.shards import CHUNK


@dataclass(frozen=True)
class Line:
    """The documents of one shard, each cut to what is used of it, laid end to end in the order of one epoch.

    Document i is `tokens[begins[i]:]`, as long as `edges[i + 1] - edges[i]`; in the line it occupies
    `edges[i]:edges[i + 1]`. `plain` says that the line is the shard itself, so that rows are mere slices.
    """

    tokens: np.ndarray  # (N,) uint16
    begins: np.ndarray  # (D,) int64
    edges: np.ndarray  # (D + 1,) int64
    plain: bool

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens begin:end of the line, (end - begin,) uint16."""
        if self.plain:
            return self.tokens[begin:end]
        first = int(self.edges.searchsorted(begin, side="right")) - 1
        last = int(self.edges.searchsorted(end, side="left"))
        edges = self.edges[first : last + 1].copy()
        shift = self.begins[first:last] - edges[:-1]  # from a place in the line to a place in the shard
        edges[0], edges[-1] = begin, end
        places = np.repeat(shift, np.diff(edges))
        places += np.arange(begin, end)
        return self.tokens.take(places)

    def between(self, begins: np.ndarray | int, length: int) -> tuple[Any, Any]:
        """`edges[first:last]` are the documents that begin strictly inside each begin:begin + length."""
        return self.edges.searchsorted(begins, side="right"), self.edges.searchsorted(begins + length, side="left")

    def inner(self, begin: int, end: int) -> np.ndarray:
        """Where documents begin strictly inside begin:end of the line, counted from `begin`."""
        first, last = self.between(begin, end - begin)
        return self.edges[first:last] - begin


def find_documents(tokens: np.ndarray, bos: int, *, headless: bool) -> np.ndarray:
    """Where documents begin in tokens (N,), as int64. `headless`: tokens before the first separator are one."""
    found = [np.flatnonzero(tokens[begin : begin + CHUNK] == bos) + begin for begin in range(0, len(tokens), CHUNK)]
    begins = np.concatenate([np.empty(0, dtype=np.int64), *found])
    if headless and len(tokens) and tokens[0] != bos:
        begins = np.concatenate((np.zeros(1, dtype=np.int64), begins))
    return begins


def piece_starts(inner: np.ndarray, rows: int, length: int, max_document: int) -> list[np.ndarray]:
    """Per row the offsets where pieces begin, for rows that lie end to end.

    A piece begins with its row, with a document (`inner`: their places, counted from the first row's start),
    and after every `max_document` tokens of the same document.
    """
    row_begins = np.arange(rows + 1) * length
    marks = np.union1d(row_begins[:-1], inner)
    lengths = np.diff(marks, append=rows * length)
    pieces = -(-lengths // max_document)
    starts = marks
    if len(pieces) and pieces.max() > 1:
        before = np.cumsum(pieces) - pieces
        within = np.arange(pieces.sum()) - np.repeat(before, pieces)
        starts = np.repeat(marks, pieces) + within * max_document
    cuts = starts.searchsorted(row_begins)
    return [starts[cuts[row] : cuts[row + 1]] - row_begins[row] for row in range(rows)]
