"""Which rank trains what: a function of the parameters and the number of ranks that needs no process group.

Matrices that must be whole on one rank are owned, each by one; large tables are cut by rows; small tensors, and all
that an optimizer of another package trains, are trained on every rank.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedrun.optim.base import SpeedrunOptimizer
from speedrun.optim.protocol import Sharding
from speedrun.optim.sharded.foreign import ForeignMember
from speedrun.optim.spread import assign
from speedrun.optim.state import Group, named
from speedrun.optim.work import Work

Member = SpeedrunOptimizer | ForeignMember
ALIGNMENT = 64  # bytes, as torch's allocators give them: the speed and the last bits of a product can depend on it


@dataclass(frozen=True, eq=False)
class ParamRef:
    """A parameter, and its place in its optimizer."""

    name: str
    param: Tensor
    member: Member
    group: Group
    index: int

    @property
    def exact(self) -> bool:
        """Whether its optimizer keeps a mantissa for it."""
        return self.member.is_exact(self.param, self.group)

    def cost(self) -> float:
        return self.member.cost(self.param, self.group, self.index)

    def is_due(self, local: Tensor) -> bool:
        return self.member.is_due(self.member.state.get(local, {}), self.group)

    def work(self, local: Tensor, grad: Tensor) -> Work:
        return Work(local, grad, self.member.state[local], self.group, self.index, self.name)


@dataclass(frozen=True)
class Slot:
    """A parameter, or some of its rows, in one rank's chunk of the flat buffers."""

    ref: ParamRef
    offset: int  # in elements
    numel: int
    rows: tuple[int | None, int | None] = (None, None)  # first and end

    def of(self, chunk: Tensor) -> Tensor:
        return chunk[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class BucketPlan:
    """Parameters whose gradients are reduced together, and what each rank trains of them."""

    label: str
    kind: Sharding
    slots: tuple[tuple[Slot, ...], ...]  # of each rank
    chunk: int  # elements of what one rank trains, with the gaps between slots
    refs: tuple[ParamRef, ...]

    @property
    def numel(self) -> int:
        """Elements of a flat buffer of all parameters: the chunks of all ranks."""
        return self.chunk if self.kind == "replicated" else self.chunk * len(self.slots)

    @property
    def dtype(self) -> torch.dtype:
        """Of the flat buffers."""
        return functools.reduce(torch.promote_types, (ref.param.dtype for ref in self.refs))

    @property
    def is_single(self) -> bool:
        """Whether a single parameter fills the flat buffer, so that it can be the buffer itself."""
        return len(self.refs) == 1 and self.numel == self.refs[0].param.numel()

    def offsets(self) -> dict[ParamRef, int]:
        """Where each parameter begins in a flat buffer of all of them."""
        found: dict[ParamRef, int] = {}
        for rank, slots in enumerate(self.slots):
            for slot in slots:
                found.setdefault(slot.ref, rank * self.chunk + slot.offset)
        return found

    def buffer_bytes(self) -> int:
        """What transfers need on a rank: its gradients in one piece, the sum that it receives, gaps between weights."""
        gaps = self.numel - sum(ref.param.numel() for ref in self.refs)
        return (self.chunk + (0 if self.is_single else self.numel + gaps)) * self.dtype.itemsize


def param_refs(members: Sequence[Member], names: Mapping[Any, str]) -> list[ParamRef]:
    """The parameters of all optimizers, by the model's names; ValueError if one is in two groups."""
    refs: dict[Tensor, ParamRef] = {}
    for member in members:
        for number, group in enumerate(member.param_groups):
            for index, (name, p) in enumerate(named(group, number)):
                if p in refs:
                    raise ValueError(f"{refs[p].name} is in two groups; each parameter may have one.")
                refs[p] = ParamRef(names.get(p, name), p, member, group, index)
    return list(refs.values())


def plan_buckets(
    refs: Sequence[ParamRef], world_size: int, num_buckets: int = 2, replicate_below: int = 1024
) -> list[BucketPlan]:
    """Tables first, each in a bucket of its own, then small tensors, then matrices in `num_buckets` for each dtype.

    An optimizer of another package steps once, so all of its parameters are one bucket, after the small tensors.
    """
    matrices: dict[Any, list[ParamRef]] = defaultdict(list)
    small: dict[Any, list[ParamRef]] = defaultdict(list)
    foreign: dict[Any, list[ParamRef]] = defaultdict(list)
    plans = []
    for ref in refs:
        kind = ref.param.dtype, ref.param.device
        if ref.member.sharding == "replicated":
            foreign[ref.member].append(ref)
        elif ref.member.sharding == "owned":
            matrices[kind].append(ref)
        elif ref.param.numel() < max(1, replicate_below) or ref.param.ndim == 0:
            small[kind].append(ref)
        else:
            plans.append(_row_sharded(ref, world_size))
    plans += [_replicated(f"small {k}", alike, world_size) for k, alike in enumerate(small.values())]
    for k, (member, theirs) in enumerate(foreign.items()):
        plans.append(_replicated(f"{type(member.optimizer).__name__} {k}", theirs, world_size))
    load = [0.0] * world_size
    parts = [part for alike in matrices.values() for part in split_evenly(alike, num_buckets)]
    return plans + [_owned(f"matrices {k}", part, load) for k, part in enumerate(parts)]


def state_bytes(plans: Sequence[BucketPlan], rank: int) -> dict[Tensor, int]:
    """How many bytes of state a rank keeps for each parameter, at most."""
    members = dict.fromkeys(ref.member for plan in plans for ref in plan.refs)
    sizes = {p: size for member in members for p, size in member.state_bytes().items()}
    here = {ref.param: 0 for plan in plans for ref in plan.refs}
    for plan in plans:
        for slot in plan.slots[rank]:
            p = slot.ref.param
            here[p] = round(sizes[p] * (slot.numel / max(1, p.numel())))
    return here


def _row_sharded(ref: ParamRef, world_size: int) -> BucketPlan:
    """The last ranks get fewer rows, or none, where the number of rows is not divisible."""
    rows, width = len(ref.param), math.prod(ref.param.shape[1:])
    per = math.ceil(rows / world_size)
    bounds = [(min(rank * per, rows), min((rank + 1) * per, rows)) for rank in range(world_size)]
    slots = [(Slot(ref, 0, (end - start) * width, (start, end)),) if end > start else () for start, end in bounds]
    return BucketPlan(ref.name, "rows", tuple(slots), per * width, (ref,))


def _replicated(label: str, refs: Sequence[ParamRef], world_size: int) -> BucketPlan:
    """Without gaps: parameters stay where they are, and most are tiny."""
    slots, total = _consecutive(refs, 1)
    return BucketPlan(label, "replicated", (slots,) * world_size, total, tuple(refs))


def _owned(label: str, refs: Sequence[ParamRef], load: list[float]) -> BucketPlan:
    """Shares with about equal numbers of weights: the largest matrix first, each to the smallest share.

    Then the share with the largest effort goes to the rank with the least so far, which is its `load`.
    """
    ranks = range(len(load))
    placed = list(zip(refs, assign([ref.param.numel() for ref in refs], len(load)), strict=True))
    shares = [[ref for ref, place in placed if place == share] for share in ranks]
    costs = [sum(ref.cost() for ref in share) for share in shares]
    least_first = sorted(ranks, key=lambda rank: load[rank])
    most_first = sorted(ranks, key=lambda share: -costs[share])
    share_of = dict(zip(least_first, most_first, strict=True))
    for rank in ranks:
        load[rank] += costs[share_of[rank]]
    step = ALIGNMENT // refs[0].param.itemsize
    slots, sizes = zip(*(_consecutive(shares[share_of[rank]], step) for rank in ranks), strict=True)
    return BucketPlan(label, "owned", slots, max(sizes), tuple(refs))


def _consecutive(refs: Sequence[ParamRef], step: int) -> tuple[tuple[Slot, ...], int]:
    """Slots one after the other, each at a multiple of `step`, and where the next one would begin."""
    slots, total = [], 0
    for ref in refs:
        slots.append(Slot(ref, total, ref.param.numel()))
        total += math.ceil(ref.param.numel() / step) * step
    return tuple(slots), total


def split_evenly(refs: Sequence[ParamRef], parts: int) -> list[list[ParamRef]]:
    """At most `parts` runs of neighbours with about the same number of weights each."""
    total, done = sum(ref.param.numel() for ref in refs), 0
    found: list[list[ParamRef]] = [[] for _ in range(parts)]
    for ref in refs:
        middle = done + ref.param.numel() / 2
        found[min(parts - 1, int(parts * middle / total))].append(ref)
        done += ref.param.numel()
    return [part for part in found if part]
