"""Buckets: parameters whose gradients and weights are communicated together, their memory, and their state.

A new way to divide a parameter between ranks is a subclass of `Bucket` here and a kind of plan in
speedrun.optim.sharded.plan.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from speedrun.optim.exact_bf16 import join
from speedrun.optim.protocol import Sharding
from speedrun.optim.sharded.comm import Comm
from speedrun.optim.sharded.order import Op
from speedrun.optim.sharded.plan import BucketPlan, Member, ParamRef, Slot
from speedrun.optim.state import States, clone
from speedrun.optim.work import Work


class Bucket:
    """The common part: memory that is laid out as the plan says, four operations, state."""

    def __init__(self, plan: BucketPlan, comm: Comm, divisor: int) -> None:
        self.plan, self.comm = plan, comm
        self.label, self.refs = plan.label, plan.refs
        self.divisor = divisor  # of the gradients' sum over the ranks
        self.views = self._flatten() if comm.size > 1 else []
        self.locals = [(slot, self._local(slot)) for slot in plan.slots[comm.rank]]  # what this rank trains
        self.pending: Any = None  # a collective that may not have arrived
        self.launched, self.arrived = False, 0  # whether the reduction has begun; gradients in this backward pass
        self.expected = len(self.refs)  # gradients in a backward pass: as many as there were in the last step
        self.begin(set(), set())

    def _local(self, slot: Slot) -> Tensor:
        return slot.ref.param

    # ------------------------------------------------------------------- memory

    @cached_property
    def full_grad(self) -> Tensor:
        """The gradients of this rank, of which each `.grad` becomes a view; the gaps are zero."""
        return self.refs[0].param.new_zeros(self.plan.numel, dtype=self.plan.dtype)

    @cached_property
    def local_grad(self) -> Tensor:
        """The sum over the ranks, of what this rank trains, once `reduce` has arrived; the gaps are zero."""
        return self.refs[0].param.new_zeros(self.plan.chunk, dtype=self.plan.dtype)

    @cached_property
    def _gradient_views(self) -> list[tuple[ParamRef, Tensor]]:
        return self._views(self.full_grad)

    def _views(self, flat: Tensor) -> list[tuple[ParamRef, Tensor]]:
        places = self.plan.offsets().items()
        return [(ref, view_like(flat[start : start + ref.param.numel()], ref.param)) for ref, start in places]

    def _flatten(self) -> list[tuple[ParamRef, Tensor]]:
        """Move the parameters into one flat buffer, where the weights of other ranks arrive; returns their places."""
        first = self.refs[0].param
        itself = self.plan.is_single and first.is_contiguous()
        self.weights = first.data.view(-1) if itself else first.new_zeros(self.plan.numel)
        views = self._views(self.weights)
        for ref, view in views:
            ref.param.data = view.copy_(ref.param.data)
        return views

    @torch.no_grad()
    def restore_views(self) -> None:
        """Move parameters back whose memory was replaced since, as by `p.data = x` or `model.to(...)`."""
        for ref, view in self.views:
            p = ref.param
            if memory_key(p) == memory_key(view):
                continue
            was, now = (f"{tuple(x.shape)} of {x.dtype} on {x.device}" for x in (view, p))
            if was != now:
                raise ValueError(
                    f"{ref.name} was {was} when Interleaved was made, and is {now} now. Change the model first, then "
                    "make its optimizers and Interleaved."
                )
            if not torch.equal(p, view):
                view.copy_(p)
                increment_version(p)  # a mantissa belongs to the value before
            p.data = view

    def pack(self) -> Tensor:
        """This rank's gradients in one piece. Those that are not in `full_grad` yet are copied there, all at once."""
        first = self.refs[0].param.grad
        if self.plan.is_single and first is not None and first.is_contiguous():
            return first.view(-1)
        found = [(ref.param, ref.param.grad, view) for ref, view in self._gradient_views]
        missing = [view for _, grad, view in found if grad is None]
        fresh = [(p, grad, view) for p, grad, view in found if grad is not None and grad is not view]
        if missing:
            torch._foreach_zero_(missing)
        if fresh:
            torch._foreach_copy_([view for _, _, view in fresh], [grad for _, grad, _ in fresh])
        for p, _, view in fresh:
            if (p.dtype, p.device) == (view.dtype, view.device):  # an optimizer of another package may mix them
                p.grad = view
        return self.full_grad

    # -------------------------------------------------------------- the four operations

    def begin(self, trained: set[Tensor], changing: set[Tensor]) -> None:
        """What all ranks agree on: which parameters have a gradient on any of them, and which will change."""
        self.trained = trained.intersection(ref.param for ref in self.refs)
        self.changes = not self.trained.isdisjoint(changing)

    def run(self, op: Op, finite: float | Tensor = 1.0) -> None:
        """An operation of a step. A bucket in which nothing is trained, or changes, sits it out."""
        if op == "reduce" and self.trained:
            self.launch()
        elif op == "update" and self.trained:
            self.wait(op)
            with record_function(f"compute: update {self.label}"):
                self.update(finite)
        elif op == "gather" and self.changes:
            with record_function(f"launch: gather {self.label}"):
                self.gather()
        elif op == "finish" and self.changes:
            self.wait(op)
            self.finish()

    @torch.no_grad()
    def launch(self) -> None:
        """Begin the reduction unless it has begun, also before it is known which ranks have gradients."""
        if not self.launched:
            with record_function(f"launch: reduce {self.label}"):
                self.reduce()
            self.launched = True

    def wait(self, op: str) -> None:
        if self.pending is not None:
            with record_function(f"wait: {op} {self.label}"):
                self.pending.wait()
            self.pending = None

    def reduce(self) -> None:
        """Launch the sum of the gradients over the ranks; each receives its part."""
        self.pending = self.comm.reduce_scatter(self.local_grad, self.pack())

    def update(self, finite: float | Tensor) -> None:
        """Train this rank's part of the parameters that have a gradient on any rank."""
        if self.divisor != 1:
            self.local_grad.div_(self.divisor)
        work: dict[Member, list[Work]] = defaultdict(list)
        for slot, local in self.locals:
            if slot.ref.param in self.trained:
                grad = view_like(slot.of(self.local_grad), local).to(local)
                work[slot.ref.member].append(slot.ref.work(local, grad))
        for member, of_member in work.items():
            member._update(of_member, finite)

    def gather(self) -> None:
        """Launch the all-gather of the updated weights, right into the parameters."""
        if self.views:
            mine = self.weights[self.comm.rank * self.plan.chunk :][: self.plan.chunk]
            self.pending = self.comm.all_gather(self.weights, mine)

    def finish(self) -> None:
        """Count the write of the weights that have arrived, which autograd has not seen."""
        increment_version([ref.param for ref, _ in self.views if self.local(ref) is None])

    def end(self) -> None:
        """Wait for what is under way, and forget the step."""
        self.wait("finish")
        self.launched, self.arrived = False, 0
        self.begin(set(), set())

    def summed(self) -> Tensor:
        """The summed gradients of this rank's part, once `reduce` has arrived."""
        return self.local_grad

    def square_sum(self) -> float:
        """This rank's contribution to the squared norm of the summed gradients."""
        return float(self.summed().float().square().sum())

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

    def checked_states(self, saved: States) -> States:
        """Copies of what this rank had saved, as it is kept here; ValueError if that does not fit."""
        kept = [(slot.ref, local, saved[slot.ref.name]) for slot, local in self.locals if saved[slot.ref.name]]
        return {
            ref.name: ref.member._state_from(state, ref.name, local, ref.group, rebased=True)
            for ref, local, state in kept
        }

    def load_state(self, states: States, *, full: bool) -> None:
        """Replace this rank's state by a copy: of its part of full states, or of what this rank had saved."""
        self.restore_views()
        for slot, local in self.locals:
            member, saved = slot.ref.member, states.get(slot.ref.name)
            member.state.pop(local, None)
            if saved:
                member.state[local] = clone(self.shard_state(slot, saved) if full else saved, local.device)
            member.rebase_mantissa(local)

    def master(self, ref: ParamRef) -> Tensor:
        """The exact value of a parameter on all ranks, which must all call this."""
        if not ref.exact:
            return ref.member.master(ref.param)
        parts = []
        for rank, slots in enumerate(self.plan.slots):
            for slot in slots:
                if slot.ref is ref:
                    part = torch.empty_like(self._local(slot), dtype=torch.float32)
                    if rank == self.comm.rank:
                        part = self._exact(ref)
                    parts.append(self.comm.broadcast(rank, part))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _exact(self, ref: ParamRef) -> Tensor:
        """Of what this rank trains."""
        return ref.member.master(ref.param)

    def set_master(self, ref: ParamRef, value: Tensor) -> None:
        ref.member.set_master(ref.param, value)
        if ref.exact and self.local(ref) is not ref.param:  # the mantissa is for those who train it
            whole = ref.member.state.pop(ref.param)
            for slot, local in self.locals:
                if slot.ref is ref:
                    ref.member.state[local] |= clone(self.shard_state(slot, whole), local.device)
                    ref.member.rebase_mantissa(local)


class OwnedBucket(Bucket):
    """Whole matrices, each trained by one rank."""

    def square_sum(self) -> float:
        """Without the gaps: how a sum is rounded depends on where its terms lie."""
        numels = [sum(slot.numel for slot in slots) for slots in self.plan.slots]
        rest = self.local_grad.new_zeros(max(numels) - numels[self.comm.rank])
        return float(torch.cat([*(slot.of(self.local_grad) for slot, _ in self.locals), rest]).float().square().sum())


class RowShardedBucket(Bucket):
    """One table, of which each rank trains some rows."""

    def _flatten(self) -> list[tuple[ParamRef, Tensor]]:
        self.refs[0].param.data = self.refs[0].param.data.contiguous()
        return super()._flatten()

    def _local(self, slot: Slot) -> Tensor:
        return slot.ref.param.detach()[slice(*slot.rows)]  # shares memory and version counter with the parameter

    def finish(self) -> None:
        increment_version([ref.param for ref, _ in self.views])
        for slot, local in self.locals:
            slot.ref.member.rebase_mantissa(local)  # other rows of the same memory were written, not these

    def summed(self) -> Tensor:
        return self.local_grad[: sum(slot.numel for slot, _ in self.locals)]

    def _holders(self, ranks: list[int]) -> list[int]:
        return ranks

    def shard_state(self, slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
        return {key: x[slice(*slot.rows)] if torch.is_tensor(x) and x.ndim else x for key, x in state.items()}

    def _exact(self, ref: ParamRef) -> Tensor:
        ((_, local),) = self.locals
        mantissa = ref.member.state.get(local, {}).get("mantissa")
        return local.float() if mantissa is None else join(local, mantissa)


class ReplicatedBucket(Bucket):
    """Small tensors, and those of other packages' optimizers, which every rank trains alike."""

    def _flatten(self) -> list[tuple[ParamRef, Tensor]]:
        return []

    def reduce(self) -> None:
        self.pending = self.comm.all_reduce(self.local_grad.copy_(self.pack()))

    def square_sum(self) -> float:
        return super().square_sum() if self.comm.rank == 0 else 0.0  # every rank has the same

    def master(self, ref: ParamRef) -> Tensor:
        return ref.member.master(ref.param)


BUCKETS: dict[Sharding, type[Bucket]] = {"owned": OwnedBucket, "rows": RowShardedBucket, "replicated": ReplicatedBucket}


def view_like(flat: Tensor, like: Tensor) -> Tensor:
    """A flat piece of memory in the shape of a tensor, with that one's order in memory if it is dense."""
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def memory_key(x: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same place in the same memory."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype
