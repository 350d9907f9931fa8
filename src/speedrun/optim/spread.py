"""Matrices that are DTensors, spread whole over the ranks of their mesh, so that each is orthogonalised once.

Under FSDP2 each rank has some rows of every matrix, and an orthogonal update needs the whole matrix. So each matrix
gets an owner: the heaviest first, each for the rank with the least to do. All ranks send their rows of it there, the
owner orthogonalises it, and sends each rank its rows of the result.

    spread = Spread(work, efforts)
    owned = spread.to_owners(parts)         # whole matrices, for this rank to orthogonalise
    updates = spread.to_all(states)         # this rank's part of each result

That is one all-to-all each way along every dimension of the mesh, for all matrices together, as Dion does it
(https://github.com/microsoft/dion). With HSDP the replicas own different matrices: an owner receives parts from
its own replica alone, and its result goes to all. What a rank sends follows from shapes, so nothing waits for a GPU.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedrun.optim.dtensor import gather_full, local_part
from speedrun.optim.work import Work

Shape = tuple[int, ...]
Axes = tuple[int | None, ...]


class OwnedMatrix(Work):
    """A whole matrix on its owner. `grad` is what is orthogonalised, and the result takes its place."""


def group_by_mesh(work: Iterable[Work]) -> list[list[Work]]:
    """What the ranks of a mesh do together, apart by the dtype in which they do it; nothing for those outside of it."""
    found: dict[Any, list[Work]] = defaultdict(list)
    for w in work:
        if w.sharded is not None and w.sharded.device_mesh.get_coordinate() is not None:
            found[w.sharded.device_mesh, w.param.dtype == torch.float64].append(w)
    return list(found.values())


def assign(costs: Sequence[float], shares: int) -> list[int]:
    """The share that gets each of `costs`: the largest first, each to the smallest share."""
    load, found = [0.0] * shares, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[index] = min(range(shares), key=load.__getitem__)
        load[found[index]] += costs[index]
    return found


@functools.cache
def chunk_sizes(size: int, parts: int) -> list[int]:
    """As torch.chunk cuts, with zeros for the last parts where it has none."""
    per = math.ceil(size / parts)
    return [max(0, min(per, size - i * per)) for i in range(parts)]


def sharded_axes(p: Any) -> Axes | None:
    """For each dimension of its mesh the axis of `p` that it cuts, or None where all have the same.

    None for FSDP2 and tensor parallelism on the same axis: there the last dimension of the mesh cuts first.
    """
    from torch.distributed.tensor import Replicate, Shard

    if not all(isinstance(placement, Replicate | Shard) for placement in p.placements):
        return None
    return tuple(placement.dim if isinstance(placement, Shard) else None for placement in p.placements)


@dataclass(frozen=True)
class MeshLayout:
    """Where a tensor is on a mesh: whole on its owner, cut on all ranks."""

    owner: Shape  # its coordinates
    shape: Shape
    axes_cut: Axes

    def part(self, at: Shape, mesh: Shape) -> Shape:
        """The shape on the rank at the coordinates `at`, when the first `len(at)` dimensions of the mesh have cut."""
        shape = list(self.shape)
        for axis, index, parts in zip(self.axes_cut, at, mesh, strict=False):
            if axis is not None:
                shape[axis] = chunk_sizes(shape[axis], parts)[index]
        return tuple(shape)


class Spread:
    """The parameters of one mesh in one step. All ranks of the mesh must make it alike, and call the same methods."""

    def __init__(self, work: Sequence[Work], costs: Sequence[float]) -> None:
        self.work, self.mesh = work, work[0].sharded.device_mesh
        self.sizes, self.at = tuple(self.mesh.shape), tuple(self.mesh.get_coordinate())
        self.replicated: Axes = (None,) * len(self.sizes)
        coordinates = list(itertools.product(*map(range, self.sizes)))
        owners = [coordinates[share] for share in assign(costs, len(coordinates))]
        axes_cut = [sharded_axes(w.sharded) for w in work]
        self.gathered = [c is None for c in axes_cut]  # gathered by DTensor itself, on all ranks
        triples = zip(owners, work, axes_cut, strict=True)
        self.layouts = [MeshLayout(owner, w.shape, axes or self.replicated) for owner, w, axes in triples]
        self.owned: dict[int, OwnedMatrix] = {}

    def to_owners(self, parts: Sequence[Tensor]) -> list[Work]:
        """The matrices that this rank owns, put together from all ranks' parts."""
        triples = enumerate(zip(self.work, parts, self.gathered, strict=True))
        held = {i: gather_full(part, w.sharded) if full else part for i, (w, part, full) in triples}
        self.empty = parts[0].new_empty(0)
        for k in reversed(range(len(self.sizes))):  # backwards, as the first dimension of the mesh cut first
            held = self._gather_parts(k, held)
        for i, whole in held.items():
            w = self.work[i]
            self.owned[i] = OwnedMatrix(whole, whole, w.state, w.group, w.index, w.name)
        return list(self.owned.values())

    def to_all(self, states: Sequence[dict[str, Shape]]) -> list[Tensor]:
        """This rank's part of each result. What owners know under the keys of `states` all ranks know afterwards."""
        layouts, held = list(self.layouts), {i: w.grad for i, w in self.owned.items()}
        for i, shapes in enumerate(states):
            for key, shape in shapes.items():
                if i in self.owned:
                    held[len(layouts)] = self.work[i].state[key]
                layouts.append(MeshLayout(self.layouts[i].owner, shape, self.replicated))
        for k in range(len(self.sizes)):
            held = self._scatter_parts(k, layouts, held)
        news = itertools.count(len(self.work))
        for w, shapes in zip(self.work, states, strict=True):
            for key in shapes:
                w.state[key] = held[next(news)].clone()  # not a view of everything that has arrived
        made_full = zip(self.work, self.gathered, strict=True)
        return [local_part(held[i], w.sharded) if full else held[i] for i, (w, full) in enumerate(made_full)]

    def _gather_parts(self, k: int, held: dict[int, Tensor]) -> dict[int, Tensor]:
        """Along dimension `k` of the mesh, the parts of what is owned there by ranks with this rank's coordinate."""
        axes = {i: axis for i, layout in enumerate(self.layouts) if (axis := layout.axes_cut[k]) is not None}
        mine, at = [i for i in held if self.layouts[i].owner[k] == self.at[k]], self.at[:k]
        if axes:  # without any, ranks have the same, and each keeps what it owns
            sent: list[list[Tensor]] = [[] for _ in range(self.sizes[k])]
            for i in sorted(held.keys() & axes):
                sent[self.layouts[i].owner[k]].append(held[i])
            cut = [i for i in mine if i in axes]
            shapes = [[self.layouts[i].part((*at, sender), self.sizes) for i in cut] for sender in range(self.sizes[k])]
            pieces = zip(*self._exchange(k, sent, shapes), strict=True)
            held |= {i: torch.cat(of_one, axes[i]) for i, of_one in zip(cut, pieces, strict=True)}
        return {i: held[i] for i in mine}

    def _scatter_parts(self, k: int, layouts: Sequence[MeshLayout], held: dict[int, Tensor]) -> dict[int, Tensor]:
        """The reverse: along dimension `k` each rank gets its parts of what the others hold, or a copy."""
        sent: list[list[Tensor]] = [[] for _ in range(self.sizes[k])]
        for i, whole in sorted(held.items()):
            axis = layouts[i].axes_cut[k]
            parts = whole.split(chunk_sizes(whole.shape[axis], self.sizes[k]), axis) if axis is not None else None
            for to in range(self.sizes[k]):
                sent[to].append(whole if parts is None else parts[to])
        received: list[list[int]] = [[] for _ in range(self.sizes[k])]
        for i, layout in enumerate(layouts):
            if layout.owner[k + 1 :] == self.at[k + 1 :]:
                received[layout.owner[k]].append(i)
        shapes = [[layouts[i].part(self.at[: k + 1], self.sizes) for i in those] for those in received]
        got = self._exchange(k, sent, shapes)
        return {i: x for those, xs in zip(received, got, strict=True) for i, x in zip(those, xs, strict=True)}

    def _exchange(self, k: int, sent: list[list[Tensor]], shapes: list[list[Shape]]) -> list[list[Tensor]]:
        """Along dimension `k` of the mesh, `sent[j]` to its rank j; tensors of `shapes[j]` come from there."""
        if self.sizes[k] == 1:
            return sent
        device = self.mesh.device_type  # for which it has a backend: weights that FSDP keeps on the CPU are elsewhere
        flat = torch.cat([self.empty, *(x.reshape(-1) for xs in sent for x in xs)]).to(device)
        sizes = [[math.prod(shape) for shape in of_one] for of_one in shapes]
        counts = list(map(sum, sizes))
        arrived = flat.new_empty(sum(counts))
        torch.distributed.all_to_all_single(
            arrived, flat, counts, [sum(x.numel() for x in xs) for xs in sent], group=self.mesh.get_group(k)
        )
        return [
            [x.view(shape) for x, shape in zip(part.split(of_one), those, strict=True)]
            for part, of_one, those in zip(arrived.to(self.empty.device).split(counts), sizes, shapes, strict=True)
        ]
