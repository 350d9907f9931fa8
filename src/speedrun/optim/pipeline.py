"""What the sharded step is made of: the ranks, the items that travel between them, and orders of operations as tables.

`speedrun.optim.interleave` has the optimizer that carries an order out. A new way to deal a parameter out is an `Item`
here; a new order is a function from items to a list.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from speedrun.optim.base import SpeedrunOptimizer, Work
from speedrun.optim.state import Group

Op = Literal["reduce", "update", "gather", "finish"]
OPS: tuple[Op, ...] = ("reduce", "update", "gather", "finish")
Order = list[tuple[Op, str]]


@dataclass(frozen=True)
class Ref:
    """A parameter, with where it stands in which optimizer."""

    name: str
    param: Tensor
    member: SpeedrunOptimizer
    group: Group
    index: int

    def work(self, local: Tensor, grad: Tensor) -> Work:
        return Work(local, grad, self.member.state[local], self.group, self.index, self.name)


@dataclass
class Comm:
    """The ranks that train together; alone, every collective is already done."""

    group: Any = None
    rank: int = 0
    size: int = 1
    aside: Any = None  # a group of its own for small messages, which must not queue behind large ones

    @classmethod
    def of(cls, group: Any) -> "Comm":
        """The ranks of a process group, of the default one for None; a Comm is taken as it is."""
        if isinstance(group, Comm):
            return group
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Any:
        """`out` becomes this rank's part of the sum of `whole` over the ranks."""
        if self.size == 1:
            out.copy_(whole)
            return None
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out, whole, group=self.group, async_op=True)

    def all_gather(self, whole: Tensor, part: Tensor) -> Any:
        if self.size == 1:
            whole.copy_(part)
            return None
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(whole, part, group=self.group, async_op=True)

    def all_reduce(self, x: Tensor) -> Any:
        return None if self.size == 1 else dist.all_reduce(x, group=self.group, async_op=True)

    def all_reduce_small(self, x: Tensor) -> Any:
        """The sum of a small CPU tensor, past everything large that is under way."""
        if self.size == 1:
            return None
        if self.aside is None:
            members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            self.aside = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return dist.all_reduce(x, group=self.aside, async_op=True)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def broadcast(self, rank: int, x: Tensor) -> Tensor:
        """`x` of one rank, on all of them. As bytes: not every backend knows every integer."""
        if self.size > 1 and x.numel():
            source = rank if self.group is None else dist.get_global_rank(self.group, rank)
            flat = x.contiguous()
            dist.broadcast(flat.view(-1).view(torch.uint8), source, group=self.group)
            if flat is not x:
                x.copy_(flat)
        return x

    def all_gather_object(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


# -------------------------------------------------------------------------------------------------- items


@dataclass
class Item:
    """Parameters that travel together. Subclasses say how."""

    label: str
    refs: list[Ref]
    comm: Comm
    divisor: int
    """What the sum over the ranks is divided by."""
    pending: Any = field(default=None, init=False)
    launched: bool = field(default=False, init=False)

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def gradient(self, flat: Tensor, like: Tensor) -> Tensor:
        g = flat.view(like.shape)
        return g if self.divisor == 1 else g.div_(self.divisor)

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        """What this rank trains: a parameter, or a part of one."""
        raise NotImplementedError

    def reduce(self) -> None:
        raise NotImplementedError

    def summed(self) -> Tensor:
        """Where the summed gradients of this rank's part stand, once `reduce` has arrived; what fills it up is zero."""
        raise NotImplementedError

    def gradients(self) -> Iterator[tuple[Ref, Tensor, Tensor]]:
        """(parameter, this rank's part of it, the summed gradient of that part), once `reduce` has arrived."""
        raise NotImplementedError

    def gather(self) -> None:
        """Launch it; small tensors need none."""

    def finish(self) -> None:
        """Put into place what has arrived."""


class Matrices(Item):
    """Whole matrices, each owned by one rank.

    They are divided into shares of about as many weights, the largest matrix first, each to the smallest share. Then
    the share with the most to compute goes to the rank that has the least so far: `load`, by `effort`.
    """

    def __init__(
        self, label: str, refs: list[Ref], comm: Comm, divisor: int, load: list[float], effort: Callable[[Ref], float]
    ) -> None:
        super().__init__(label, refs, comm, divisor)
        shares: list[list[Ref]] = [[] for _ in range(comm.size)]
        for ref in sorted(refs, key=lambda r: -r.param.numel()):
            min(shares, key=lambda share: sum(r.param.numel() for r in share)).append(ref)
        self.owner: dict[Tensor, int] = {}
        self.offset: dict[Tensor, int] = {}
        here = [0] * comm.size
        least_first = sorted(range(comm.size), key=lambda rank: load[rank])
        most_first = sorted(shares, key=lambda share: -sum(map(effort, share)))
        for rank, share in zip(least_first, most_first, strict=True):
            load[rank] += sum(map(effort, share))
            for ref in share:
                self.owner[ref.param], self.offset[ref.param] = rank, here[rank]
                here[rank] += ref.param.numel()
        self.chunk = max(here)
        self.whole: Tensor | None = None
        self.part: Tensor | None = None

    def place(self, buffer: Tensor, p: Tensor) -> Tensor:
        start = self.owner[p] * self.chunk + self.offset[p]
        return buffer[start : start + p.numel()]

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        for ref in self.refs:
            if self.owner[ref.param] == self.comm.rank:
                yield ref, ref.param

    def reduce(self) -> None:
        first = self.refs[0].param
        if self.whole is None or self.part is None:
            self.whole, self.part = first.new_zeros(self.comm.size * self.chunk), first.new_zeros(self.chunk)
        for ref in self.refs:
            there = self.place(self.whole, ref.param)
            if ref.param.grad is None:
                there.zero_()
            else:
                there.copy_(ref.param.grad.reshape(-1))
        self.pending = self.comm.reduce_scatter(self.part, self.whole)

    def summed(self) -> Tensor:
        assert self.part is not None
        return self.part

    def gradients(self) -> Iterator[tuple[Ref, Tensor, Tensor]]:
        assert self.part is not None
        for ref, p in self.locals():
            start = self.offset[p]
            yield ref, p, self.gradient(self.part[start : start + p.numel()], p)

    def gather(self) -> None:
        assert self.whole is not None
        assert self.part is not None
        for _, p in self.locals():
            start = self.offset[p]
            self.part[start : start + p.numel()].copy_(p.detach().reshape(-1))
        self.pending = self.comm.all_gather(self.whole, self.part)

    def finish(self) -> None:
        assert self.whole is not None
        for ref in self.refs:
            if self.owner[ref.param] != self.comm.rank:
                ref.param.copy_(self.place(self.whole, ref.param).view_as(ref.param))


class Rows(Item):
    """A table cut by rows; the last ranks get fewer, or none, where it does not divide."""

    def __init__(self, label: str, refs: list[Ref], comm: Comm, divisor: int) -> None:
        super().__init__(label, refs, comm, divisor)
        (self.ref,) = refs
        p = self.ref.param
        self.per = math.ceil(p.shape[0] / comm.size)
        self.bounds = [(min(r * self.per, len(p)), min((r + 1) * self.per, len(p))) for r in range(comm.size)]
        start, end = self.bounds[comm.rank]
        self.local = p.detach()[start:end]  # shares memory and version counter with the parameter
        self.even = comm.size * self.per == len(p)
        self.whole: Tensor | None = None
        self.part: Tensor | None = None

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        if len(self.local):
            yield self.ref, self.local

    def filled_up(self) -> Tensor:
        p = self.ref.param
        if self.whole is None:
            self.whole = p.new_zeros(self.comm.size * self.per, *p.shape[1:])
        return self.whole

    def reduce(self) -> None:
        p = self.ref.param
        if self.part is None:
            self.part = p.new_zeros(self.per, *p.shape[1:])
        if p.grad is not None and self.even and p.grad.is_contiguous() and p.grad.dtype == p.dtype:
            whole = p.grad
        else:
            whole = self.filled_up()
            whole[: len(p)].copy_(p.grad) if p.grad is not None else whole.zero_()
        self.pending = self.comm.reduce_scatter(self.part, whole)

    def summed(self) -> Tensor:
        assert self.part is not None
        return self.part[: len(self.local)]

    def gradients(self) -> Iterator[tuple[Ref, Tensor, Tensor]]:
        assert self.part is not None
        for ref, local in self.locals():
            yield ref, local, self.gradient(self.part[: len(local)], local)

    def gather(self) -> None:
        if self.comm.size == 1:
            return
        assert self.part is not None
        self.part[: len(self.local)].copy_(self.local)
        target = self.ref.param.detach() if self.even and self.ref.param.is_contiguous() else self.filled_up()
        self.pending = self.comm.all_gather(target, self.part)

    def finish(self) -> None:
        if self.comm.size == 1:
            return
        if not (self.even and self.ref.param.is_contiguous()):
            assert self.whole is not None
            start, end = self.bounds[self.comm.rank]
            p = self.ref.param.detach()
            p[:start].copy_(self.whole[:start])
            p[end:].copy_(self.whole[end : len(p)])
        self.ref.member.trust_remainder(self.local)  # the other rows of its memory were written, not these


class Small(Item):
    """Small tensors, averaged together and trained by every rank alike."""

    flat: Tensor | None = None

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        for ref in self.refs:
            yield ref, ref.param

    def reduce(self) -> None:
        if self.flat is None:
            self.flat = self.refs[0].param.new_zeros(sum(ref.param.numel() for ref in self.refs))
        for ref, there in zip(self.refs, self.parts(), strict=True):
            there.copy_(ref.param.grad.reshape(-1)) if ref.param.grad is not None else there.zero_()
        self.pending = self.comm.all_reduce(self.flat)

    def parts(self) -> Sequence[Tensor]:
        assert self.flat is not None
        return self.flat.split([ref.param.numel() for ref in self.refs])

    def summed(self) -> Tensor:
        assert self.flat is not None
        return self.flat

    def gradients(self) -> Iterator[tuple[Ref, Tensor, Tensor]]:
        for ref, part in zip(self.refs, self.parts(), strict=True):
            yield ref, ref.param, self.gradient(part, ref.param)


# ------------------------------------------------------------------------------------------------- orders


def plain(items: Sequence[Item]) -> Order:
    """One operation after the other, each for all items: everything is waited for at once."""
    return [(op, item.label) for op in OPS for item in items]


def interleaved(items: Sequence[Item]) -> Order:
    """The matrices' gradients travel while Adam computes, Adam's weights travel while the matrices are trained.

    1. the reductions of the matrices are launched (those of tables began during the backward pass);
    2. each table is trained as its gradient arrives, and sets out at once, all but the last one;
    3. each bucket of matrices is trained, and sets out; all but the last one are put into place;
    4. the tables of 2 are put into place;  5. the last table sets out;  6. the last bucket;  7. the last table.
    """
    matrices = [item.label for item in items if isinstance(item, Matrices)]
    others = [item.label for item in items if not isinstance(item, Matrices)]
    small = [item.label for item in items if isinstance(item, Small)]
    tables = [label for label in others if label not in small]
    order: Order = [("reduce", label) for label in others + matrices]
    for label in small + tables:
        order.append(("update", label))
        if label not in tables[-1:]:
            order.append(("gather", label))
    for label in matrices:
        order += [("update", label), ("gather", label)]
    order += [("finish", label) for label in matrices[:-1] + small + tables[:-1]]
    order += [("gather", label) for label in tables[-1:]]
    return order + [("finish", label) for label in matrices[-1:] + tables[-1:]]


def eager(items: Sequence[Item]) -> Order:
    """Nothing is held back: for links that carry one thing after the other, and with `early="all"`.

    Gradients come in the reverse of the items' order, the head's first and the embedding's last. Half of the matrices
    are trained while the last tables still arrive, the other half while the tables set out again; what is trained last
    is a bucket of matrices: with several buckets that is the least to wait for at the end.
    """
    coming = list(reversed(items))
    matrices = [item.label for item in coming if isinstance(item, Matrices)]
    others = [item.label for item in coming if not isinstance(item, Matrices)]
    before = [item.label for item in itertools.takewhile(lambda item: not isinstance(item, Matrices), coming)]
    half = (len(matrices) + 1) // 2
    turn = before + matrices[:half] + [label for label in others if label not in before] + matrices[half:]
    order: Order = [("reduce", item.label) for item in coming]
    for label in turn:
        order += [("update", label), ("gather", label)]
    return order + [("finish", label) for label in turn]


ORDERS: dict[str, Callable[[Sequence[Item]], Order]] = {"plain": plain, "interleaved": interleaved, "eager": eager}


def check_order(order: Order, items: Sequence[Item]) -> None:
    """Every item goes once through every operation, in their order."""
    for item in items:
        found = [op for op, label in order if label == item.label]
        if found != list(OPS):
            raise ValueError(f"The order has {found} for {item.label!r}; it must have {list(OPS)}, each once.")
    unknown = {label for _, label in order} - {item.label for item in items}
    if unknown:
        raise ValueError(f"The order names {sorted(unknown)[0]!r}; the items are: {', '.join(i.label for i in items)}.")
