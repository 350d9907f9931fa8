"""Which rank trains what: a function of the parameters and the number of ranks that needs no process group.

Matrices that must be whole on one rank are owned, each by one; large tables are cut by rows; small tensors are trained
on every rank.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from speedrun.optim.base import SpeedrunOptimizer, Work
from speedrun.optim.state import Group, named

Kind = Literal["owned", "rows", "replicated"]


@dataclass(frozen=True, eq=False)
class ParamRef:
    """A parameter, and its place in its optimizer."""

    name: str
    param: Tensor
    member: SpeedrunOptimizer
    group: Group
    index: int

    @property
    def exact(self) -> bool:
        """Whether its optimizer keeps a remainder for it."""
        return self.member.is_exact(self.param, self.group)

    def effort(self) -> float:
        return self.member.effort(self.param, self.group, self.index)

    def work(self, local: Tensor, grad: Tensor) -> Work:
        return Work(local, grad, self.member.state[local], self.group, self.index, self.name)


@dataclass(frozen=True)
class Slot:
    """A parameter, or some of its rows, in one rank's chunk of a flat buffer."""

    ref: ParamRef
    offset: int  # in elements
    numel: int
    rows: tuple[int, int] | None = None  # first and end; None: the whole parameter

    def of(self, chunk: Tensor) -> Tensor:
        return chunk[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class BucketPlan:
    """Parameters whose gradients are reduced together, and what each rank trains of them."""

    label: str
    kind: Kind
    slots: tuple[tuple[Slot, ...], ...]  # of each rank
    chunk: int  # elements of one rank's part of the flat buffer
    refs: tuple[ParamRef, ...]

    def traffic(self) -> tuple[float, float]:
        """Bytes that one rank sends for the reduction and for the all-gather, in a ring."""
        ranks, size = len(self.slots), self.chunk * self.refs[0].param.itemsize
        if self.kind == "replicated":
            return 2 * (ranks - 1) / ranks * size, 0.0
        return (ranks - 1) * size, (ranks - 1) * size


def param_refs(members: Sequence[SpeedrunOptimizer], names: Mapping[Any, str]) -> list[ParamRef]:
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
    """Tables first, each in a bucket of its own, then small tensors, then matrices in `num_buckets` for each dtype."""
    matrices: dict[Any, list[ParamRef]] = defaultdict(list)
    small: dict[Any, list[ParamRef]] = defaultdict(list)
    plans = []
    for ref in refs:
        kind = ref.param.dtype, ref.param.device
        if ref.member.whole_matrices:
            matrices[kind].append(ref)
        elif ref.param.numel() < replicate_below or ref.param.ndim == 0:
            small[kind].append(ref)
        else:
            plans.append(_row_sharded(ref, world_size))
    plans += [_replicated(f"small {k}", alike, world_size) for k, alike in enumerate(small.values())]
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
    slots, total = _consecutive(refs)
    return BucketPlan(label, "replicated", (slots,) * world_size, total, tuple(refs))


def _owned(label: str, refs: Sequence[ParamRef], load: list[float]) -> BucketPlan:
    """Shares with about equal numbers of weights: the largest matrix first, each to the smallest share.

    Then the share with the largest effort goes to the rank with the least so far, which is its `load`.
    """
    ranks = range(len(load))
    shares: list[list[ParamRef]] = [[] for _ in ranks]
    for ref in sorted(refs, key=lambda r: -r.param.numel()):
        min(shares, key=lambda share: sum(r.param.numel() for r in share)).append(ref)
    efforts = [sum(ref.effort() for ref in share) for share in shares]
    least_first = sorted(ranks, key=lambda rank: load[rank])
    most_first = sorted(ranks, key=lambda share: -efforts[share])
    share_of = dict(zip(least_first, most_first, strict=True))
    for rank in ranks:
        load[rank] += efforts[share_of[rank]]
    slots, sizes = zip(*(_consecutive(shares[share_of[rank]]) for rank in ranks), strict=True)
    place = {ref: k for k, ref in enumerate(refs)}
    in_order = tuple(tuple(sorted(mine, key=lambda slot: place[slot.ref])) for mine in slots)
    return BucketPlan(label, "owned", in_order, max(sizes), tuple(refs))


def _consecutive(refs: Sequence[ParamRef]) -> tuple[tuple[Slot, ...], int]:
    """Slots one after the other, and the sum of their sizes."""
    slots, total = [], 0
    for ref in refs:
        slots.append(Slot(ref, total, ref.param.numel()))
        total += ref.param.numel()
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
