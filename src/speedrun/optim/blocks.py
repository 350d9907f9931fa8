"""The blocks of a parameter: what Muon orthogonalises apart.

A parameter is one matrix, or a bank of them; the groups' `matrix`, `transposed` and `blocks` divide a matrix into
blocks. All other code works on stacks of equal blocks, wherever they lie in the parameter.

Letters: L matrices of height H and width W; N blocks of r rows and c columns.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from speedrun.optim.arguments import require_choice
from speedrun.optim.state import Group, require, value_at

Matrix = Literal["flatten", "batch"]
Blocks = int | tuple[int, int] | list[int]
"""Equal ones in the rows; in rows and columns; or the height of each."""


class MatrixLayout:
    """How a parameter is read as matrices: outputs are rows, also where they are stored as columns."""

    def __init__(self, shape: Sequence[int], group: Group, index: int, name: str) -> None:
        matrix, self.transposed = value_at(group["matrix"], index), value_at(group["transposed"], index)
        require_choice("matrix", matrix, Matrix)
        require(isinstance(self.transposed, bool), "transposed", self.transposed, "True or False")
        if len(shape) < 2:
            raise ValueError(
                f"Muon cannot train {name}: it has {len(shape)} dimension{'s' * (len(shape) != 1)}, "
                "and needs at least 2. Give vectors and scalars to Adam; speedrun.optim.route(model) does that."
            )
        if not math.prod(shape):
            raise ValueError(f"Muon cannot train {name}: its shape {tuple(shape)} has no weights; leave it out.")
        self.shape_as_read, (i, k) = list(shape), ((0, 1) if matrix == "flatten" else (-2, -1))
        self.swapped = i, k
        if self.transposed:
            self.shape_as_read[i], self.shape_as_read[k] = self.shape_as_read[k], self.shape_as_read[i]
        before = 0 if matrix == "flatten" else len(shape) - 2
        self.lead, self.height = math.prod(self.shape_as_read[:before]), self.shape_as_read[before]
        self.width = math.prod(self.shape_as_read[before + 1 :])
        self.momentum_advanced = False  # whether this step has advanced the parameter's momentum
        self.updates: dict[int, Tensor] = {}  # updates, by their first row, while those of other grids are to come

    def matrices(self, x: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (L, H, W); a view where that is possible."""
        x = x.transpose(*self.swapped) if self.transposed else x
        return x.reshape(self.lead, self.height, self.width)

    def restore(self, x_LHW: Tensor) -> Tensor:
        """Back to the parameter's shape."""
        x = x_LHW.reshape(self.shape_as_read)
        return x.transpose(*self.swapped) if self.transposed else x


class BlockLayout:
    """Equal blocks: the rows from `start` on of each matrix of a parameter, cut into a x b blocks of (rows, cols)."""

    def __init__(self, matrix: MatrixLayout, start: int, rows: int, a: int, b: int) -> None:
        self.matrix, self.start, self.rows, self.a, self.b = matrix, start, rows, a, b
        self.cols = matrix.width // b
        self.count = matrix.lead * a * b

    @property
    def alone(self) -> bool:
        """Whether all blocks of the parameter are here."""
        return self.a * self.rows == self.matrix.height

    def cut(self, x: Tensor) -> Tensor:
        """These blocks of a tensor of the parameter's shape, as (L, a, b, r, c)."""
        x_LHW = self.matrix.matrices(x)[:, self.start : self.start + self.a * self.rows]
        return x_LHW.reshape(self.matrix.lead, self.a, self.rows, self.b, self.cols).transpose(2, 3)

    def stack_view(self, x_Nrc: Tensor) -> Tensor:
        """This grid's part of a stack in the layout of `cut`."""
        return x_Nrc.view(self.matrix.lead, self.a, self.b, self.rows, self.cols)

    def collect(self, x_Nrc: Tensor) -> Tensor | None:
        """The update of the parameter if those of all its blocks are there; None as long as other grids are missing."""
        update_LHW, updates = self.join(x_Nrc), self.matrix.updates
        if not self.alone:
            updates[self.start] = update_LHW.clone()  # the next stack takes its memory
            if sum(x.shape[-2] for x in updates.values()) < self.matrix.height:
                return None
            update_LHW = torch.cat([x for _, x in sorted(updates.items())], dim=-2)
        return self.matrix.restore(update_LHW)

    def join(self, x_Nrc: Tensor) -> Tensor:
        """As rows of the matrices, (L, a * r, W); a view unless blocks lie side by side in the columns."""
        return self.stack_view(x_Nrc).transpose(2, 3).reshape(self.matrix.lead, -1, self.matrix.width)


def block_layouts(shape: Sequence[int], group: Group, index: int, name: str = "") -> list[BlockLayout]:
    """The blocks of a parameter, from top to bottom: one grid, or several if blocks differ in height."""
    matrix, blocks = MatrixLayout(shape, group, index, name), value_at(group["blocks"], index)
    pair = blocks if isinstance(blocks, tuple) else (blocks, 1)
    numbers = blocks if isinstance(blocks, list) else pair
    good = all(type(n) is int and n > 0 for n in numbers)
    if isinstance(blocks, list):
        good = good and sum(blocks) == matrix.height
        runs = [(rows, len(list(alike)), 1) for rows, alike in itertools.groupby(blocks)]
    else:
        good = good and len(pair) == 2 and not (matrix.height % pair[0] or matrix.width % pair[1])
        runs = [(matrix.height // pair[0], *pair)] if good else []
    if not good:
        raise ValueError(
            f"blocks is {blocks!r}, which does not divide the {matrix.height} x {matrix.width} matrix of {name}; give "
            f"the number of blocks in its rows, (in rows, in columns), or heights that add up to {matrix.height} as a "
            "list. (In a list as long as the group, each value is for one parameter.)"
        )
    ends = itertools.accumulate(rows * a for rows, a, _ in runs)
    return [BlockLayout(matrix, end - run[0] * run[1], *run) for end, run in zip(ends, runs, strict=True)]


def list_blocks(group: Group) -> None:
    """Where a group's `blocks` are heights for every parameter, give each parameter its own list of them."""
    blocks, count = group["blocks"], len(group["params"])
    if not isinstance(blocks, list) or not all(type(n) is int for n in blocks):
        return
    if len(blocks) != count:
        group["blocks"] = [list(blocks) for _ in range(count)]
    elif len(set(blocks)) > 1:
        heights = {MatrixLayout(p.shape, group, index, "").height for index, p in enumerate(group["params"])}
        if heights == {sum(blocks)}:
            raise ValueError(
                f"blocks is {blocks}: for {count} parameters of {sum(blocks)} rows these may be the heights of blocks, "
                f"or how many blocks each parameter has. Give [{blocks}] * {count} for heights, or "
                f"{[(n, 1) for n in blocks]} for numbers."
            )
