"""Collectives between the ranks that train together."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its default arguments would keep that alive
from torch import Tensor


class CompletedWork:
    """A collective of one rank, which sends nothing."""

    def wait(self) -> None:
        """At once."""


@dataclass
class Comm:
    """A process group. Collectives are launched; `wait()` of what they return is until they have arrived."""

    group: Any = None
    rank: int = 0
    size: int = 1
    small_group: Any = None
    """A weak reference to a second group, for small messages, which must not queue behind large ones.

    What keeps a group alive beyond `destroy_process_group` keeps its threads, too. One that lets go of a tensor while
    the interpreter shuts down ends the process with "terminate called".
    """

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
            return CompletedWork()
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out, whole, group=self.group, async_op=True)

    def all_gather(self, whole: Tensor, part: Tensor) -> Any:
        """`whole` becomes the parts of all ranks; `part` may be its place in there."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(whole, part, group=self.group, async_op=True)

    def all_reduce(self, x: Tensor) -> Any:
        return CompletedWork() if self.size == 1 else dist.all_reduce(x, group=self.group, async_op=True)

    def all_reduce_small(self, x: Tensor) -> Any:
        """The sum of a small CPU tensor, on a group that no large transfer occupies."""
        if self.size == 1:
            return CompletedWork()
        group = self.small_group() if self.small_group else None
        if group is None:
            members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            self.small_group = weakref.ref(group)
        return dist.all_reduce(x, group=group, async_op=True)

    def broadcast(self, rank: int, x: Tensor) -> Tensor:
        """`x` of one rank, on all of them. As bytes: not every backend supports every integer dtype."""
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
