"""Buckets: parameters whose gradients and weights are communicated together, and how their state is laid out.

A new way to divide a parameter between ranks is a subclass of `Bucket` here and a kind of plan in
speedrun.optim.sharded.plan.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from speedrun.optim.base import SpeedrunOptimizer, Work
from speedrun.optim.exact_bf16 import join
from speedrun.optim.sharded.comm import Comm
from speedrun.optim.sharded.plan import BucketPlan, Kind, ParamRef, Slot
from speedrun.optim.state import States, copied


class Bucket:
    """The common part. `part` is this rank's chunk of the flat buffer, `whole` has the chunks of all ranks."""

    def __init__(self, plan: BucketPlan, comm: Comm, divisor: int) -> None:
        self.plan, self.comm = plan, comm
        self.label, self.refs = plan.label, plan.refs
        self.divisor = divisor  # of the gradients' sum over the ranks
        self.locals = [(slot, self._local(slot)) for slot in plan.slots[comm.rank]]  # what this rank trains
        self.pending: Any = None  # a collective that may not have arrived
        self.launched = False

    def _local(self, slot: Slot) -> Tensor:
        return slot.ref.param

    @cached_property
    def part(self) -> Tensor:
        return self.refs[0].param.new_zeros(self.plan.chunk)

    @cached_property
    def whole(self) -> Tensor:
        return self.refs[0].param.new_zeros(self.comm.size * self.plan.chunk)

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    # -------------------------------------------------------------- the four operations

    def reduce(self) -> None:
        """Launch the sum of the gradients over the ranks; `summed` has it when it has arrived."""
        raise NotImplementedError

    def update(self, has_gradient: Collection[Tensor], finite: float | Tensor) -> None:
        """Train this rank's part of the parameters that have a gradient on any rank."""
        work: dict[SpeedrunOptimizer, list[Work]] = defaultdict(list)
        for slot, local in self.locals:
            if slot.ref.param in has_gradient:
                grad = slot.of(self.part).view(local.shape)
                if self.divisor != 1:
                    grad.div_(self.divisor)
                work[slot.ref.member].append(slot.ref.work(local, grad))
        for member, of_member in work.items():
            member._update(of_member, finite)

    def gather(self) -> None:
        """Launch the all-gather of the updated weights; replicated ones need none."""

    def finish(self) -> None:
        """Copy the gathered weights into the parameters."""

    def summed(self) -> Tensor:
        """The summed gradients of this rank's part, once `reduce` has arrived; padding is zero."""
        return self.part

    def square_sum(self) -> float:
        """This rank's contribution to the squared norm of the summed gradients."""
        return float(self.summed().float().square().sum())

    @staticmethod
    def _pack_gradients(chunk: Tensor, slots: Iterable[Slot]) -> None:
        for slot in slots:
            grad = slot.ref.param.grad
            slot.of(chunk).zero_() if grad is None else slot.of(chunk).copy_(grad.reshape(-1))

    # -------------------------------------------------------------------- state

    def local(self, ref: ParamRef) -> Tensor | None:
        """What this rank trains of a parameter, if anything."""
        return next((local for slot, local in self.locals if slot.ref is ref), None)

    def states(self) -> Iterator[tuple[ParamRef, dict[str, Any]]]:
        """This rank's state of each parameter."""
        for slot, local in self.locals:
            yield slot.ref, slot.ref.member.state.get(local, {})

    def state_layouts(self) -> dict[str, Any]:
        """This rank's state by name, with (shape, dtype) in place of tensors."""
        return {
            ref.name: {k: (tuple(v.shape), v.dtype) if torch.is_tensor(v) else v for k, v in state.items()}
            for ref, state in self.states()
        }

    def unshard_state(self, ref: ParamRef, layouts: list[Any]) -> dict[str, Any]:
        """The full state of one parameter on rank 0, from the `state_layouts` of all ranks; others get no tensors."""
        holders = self._holders([rank for rank, layout in enumerate(layouts) if layout])
        mine = next((state for r, state in self.states() if r is ref), {})
        state: dict[str, Any] = {}
        for key, first in layouts[holders[0]].items() if holders else ():
            if not isinstance(first, tuple):
                state[key] = first
                continue
            parts = []
            for rank in holders:
                shape, dtype = layouts[rank][key]
                part = torch.empty(shape, dtype=dtype, device=ref.param.device)
                if rank == self.comm.rank:
                    part = mine[key].to(ref.param.device)  # step counters are on the CPU, collectives here
                parts.append(self.comm.broadcast(rank, part))
            if self.comm.rank == 0:
                full = torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0].clone()
                state[key] = full.cpu() if key == "step" else full
        return state

    def _holders(self, ranks: list[int]) -> list[int]:
        """Of the ranks that have state of a parameter, those that are needed to have all of it."""
        return ranks[:1]

    def shard_state(self, slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a full state."""
        return state

    def load_state(self, states: States, *, full: bool) -> None:
        """Replace this rank's state by a copy: of its part of full states, or of what this rank had saved."""
        for slot, local in self.locals:
            member, saved = slot.ref.member, states.get(slot.ref.name)
            member.state.pop(local, None)
            if saved:
                member.state[local] = copied(self.shard_state(slot, saved) if full else saved, local.device)
            member.trust_remainder(local)

    def master(self, ref: ParamRef) -> Tensor:
        """The exact value of a parameter on all ranks, which must all call this."""
        return ref.member.master(ref.param)

    def set_master(self, ref: ParamRef, value: Tensor) -> None:
        ref.member.set_master(ref.param, value)


class OwnedBucket(Bucket):
    """Whole matrices, each trained by one rank."""

    def _chunk(self, rank: int) -> Tensor:
        return self.whole[rank * self.plan.chunk : (rank + 1) * self.plan.chunk]

    def reduce(self) -> None:
        for rank, slots in enumerate(self.plan.slots):
            self._pack_gradients(self._chunk(rank), slots)
        self.pending = self.comm.reduce_scatter(self.part, self.whole)

    def gather(self) -> None:
        if self.comm.size > 1:
            for slot, p in self.locals:
                slot.of(self.part).copy_(p.detach().reshape(-1))
            self.pending = self.comm.all_gather(self.whole, self.part)

    def finish(self) -> None:
        for rank, slots in enumerate(self.plan.slots):
            for slot in slots if rank != self.comm.rank else ():
                slot.ref.param.copy_(slot.of(self._chunk(rank)).view_as(slot.ref.param))

    def master(self, ref: ParamRef) -> Tensor:
        if not ref.exact:
            return super().master(ref)
        owner = next(rank for rank, slots in enumerate(self.plan.slots) if any(slot.ref is ref for slot in slots))
        mine = owner == self.comm.rank
        value = super().master(ref) if mine else torch.empty_like(ref.param, dtype=torch.float32)
        return self.comm.broadcast(owner, value.contiguous())

    def set_master(self, ref: ParamRef, value: Tensor) -> None:
        super().set_master(ref, value)
        if ref.exact and self.local(ref) is None:
            ref.member.state.pop(ref.param, None)  # only the owner keeps a remainder


class RowShardedBucket(Bucket):
    """One table, of which each rank trains some rows."""

    def __init__(self, plan: BucketPlan, comm: Comm, divisor: int) -> None:
        (self.ref,) = plan.refs
        super().__init__(plan, comm, divisor)
        self.even = comm.size * plan.chunk == self.ref.param.numel()

    def _local(self, slot: Slot) -> Tensor:
        assert slot.rows is not None
        return slot.ref.param.detach()[slice(*slot.rows)]  # shares memory and version counter with the parameter

    def reduce(self) -> None:
        p = self.ref.param
        if p.grad is not None and self.even and p.grad.is_contiguous() and p.grad.dtype == p.dtype:
            whole = p.grad.view(-1)
        else:
            whole = self.whole
            whole[: p.numel()].view(p.shape).copy_(p.grad) if p.grad is not None else whole.zero_()
        self.pending = self.comm.reduce_scatter(self.part, whole)

    def summed(self) -> Tensor:
        return self.part[: sum(slot.numel for slot, _ in self.locals)]

    @property
    def _in_place(self) -> bool:
        """Whether weights can be gathered right into the parameter."""
        return self.even and self.ref.param.is_contiguous()

    def gather(self) -> None:
        if self.comm.size > 1:
            for slot, local in self.locals:
                slot.of(self.part).view(local.shape).copy_(local)
            target = self.ref.param.detach().view(-1) if self._in_place else self.whole
            self.pending = self.comm.all_gather(target, self.part)

    def finish(self) -> None:
        if self.comm.size == 1:
            return
        if not self._in_place:
            p = self.ref.param.detach()
            start, end = next((slot.rows for slot, _ in self.locals), None) or (0, 0)
            gathered = self.whole[: p.numel()].view(p.shape)
            p[:start].copy_(gathered[:start])
            p[end:].copy_(gathered[end:])
        for _, local in self.locals:
            self.ref.member.trust_remainder(local)  # other rows of the same memory were written, not these

    def _holders(self, ranks: list[int]) -> list[int]:
        return ranks

    def shard_state(self, slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
        assert slot.rows is not None
        mine = slice(*slot.rows)
        return {key: value[mine] if torch.is_tensor(value) and value.ndim else value for key, value in state.items()}

    def master(self, ref: ParamRef) -> Tensor:
        if not ref.exact:
            return super().master(ref)
        parts = []
        for rank, slots in enumerate(self.plan.slots):
            for slot in slots:
                part = self._local(slot).float()
                remainder = ref.member.state.get(self.local(ref), {}).get("remainder")
                if rank == self.comm.rank and remainder is not None:
                    part = join(self._local(slot), remainder)
                parts.append(self.comm.broadcast(rank, part))
        return torch.cat(parts)

    def set_master(self, ref: ParamRef, value: Tensor) -> None:
        super().set_master(ref, value)
        if ref.exact:
            remainder = ref.member.state.pop(ref.param)["remainder"]
            for slot, local in self.locals:
                ref.member.state[local]["remainder"] = self.shard_state(slot, {"": remainder})[""].clone()
                ref.member.trust_remainder(local)


class ReplicatedBucket(Bucket):
    """Small tensors, which every rank trains alike."""

    def reduce(self) -> None:
        self._pack_gradients(self.part, self.plan.slots[self.comm.rank])
        self.pending = self.comm.all_reduce(self.part)

    def square_sum(self) -> float:
        return super().square_sum() if self.comm.rank == 0 else 0.0  # every rank has the same


BUCKETS: dict[Kind, type[Bucket]] = {"owned": OwnedBucket, "rows": RowShardedBucket, "replicated": ReplicatedBucket}
