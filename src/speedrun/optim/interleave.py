"""The sharded step: every process trains its share, and communication hides behind computation.

    optimizer = Interleaved(model, [NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001)])    # takes DDP's place
    for part in parts[:-1]:
        with optimizer.no_sync():
            loss(part).backward()
    loss(parts[-1]).backward()          # reductions of tables start while this still runs
    optimizer.step()

The step works on *items*. Matrices of the Muon family are owned whole, each by one rank, and travel in buckets; large
tables are cut by rows; small tensors are trained by everybody. Every item goes through four operations:

    reduce   gradients of all ranks become one sum, of which each rank receives its share
    update   the rank's share of the weights is trained
    gather   new weights set out to all ranks
    finish   they have arrived and are in place

In which order is a table, not code: see `plain` and `interleaved`, or pass your own. Optimizer state exists once over
all ranks. Any number of ranks will do, also one that gets no matrix or no row. Without a process group it is one rank.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from speedrun.optim.base import Group, NonFiniteGradient, SpeedrunOptimizer, Work, all_finite, named
from speedrun.optim.exact_bf16 import join
from speedrun.optim.muon import Muon

Loss = TypeVar("Loss")
Op = Literal["reduce", "update", "gather", "finish"]
OPS: tuple[Op, ...] = ("reduce", "update", "gather", "finish")
Order = list[tuple[Op, str]]


class Span(NamedTuple):
    """Something the step did, for a trace. Times are of `time.perf_counter`."""

    kind: Literal["launch", "wait", "compute", "copy"]
    item: str
    op: str
    start: float
    end: float


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
class Team:
    """The ranks that train together; alone, every collective is already done."""

    group: Any = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> "Team":
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def scatter_sum(self, out: Tensor, whole: Tensor) -> Any:
        """`out` becomes this rank's part of the sum of `whole` over the ranks."""
        if self.size == 1:
            out.copy_(whole)
            return None
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out, whole, group=self.group, async_op=True)

    def gather(self, whole: Tensor, part: Tensor) -> Any:
        if self.size == 1:
            whole.copy_(part)
            return None
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(whole, part, group=self.group, async_op=True)

    def sum(self, x: Tensor) -> Any:
        return None if self.size == 1 else dist.all_reduce(x, group=self.group, async_op=True)

    def largest(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def send_from(self, rank: int, x: Tensor) -> Tensor:
        """`x` of one rank, on all of them. As bytes: not every backend knows every integer."""
        if self.size > 1 and x.numel():
            source = rank if self.group is None else dist.get_global_rank(self.group, rank)
            flat = x.contiguous()
            dist.broadcast(flat.view(-1).view(torch.uint8), source, group=self.group)
            if flat is not x:
                x.copy_(flat)
        return x

    def everybodys(self, value: Any) -> list[Any]:
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
    team: Team
    mean: bool
    pending: Any = field(default=None, init=False)
    launched: bool = field(default=False, init=False)

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def gradient(self, flat: Tensor, like: Tensor) -> Tensor:
        g = flat.view(like.shape)
        return g.div_(self.team.size) if self.mean and self.team.size > 1 else g

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        """What this rank trains: a parameter, or a part of one."""
        raise NotImplementedError

    def reduce(self) -> None:
        raise NotImplementedError

    def gradients(self) -> Iterator[tuple[Ref, Tensor, Tensor]]:
        """(parameter, this rank's part of it, the summed gradient of that part), once `reduce` has arrived."""
        raise NotImplementedError

    def gather(self) -> None:
        """Launch it; small tensors need none."""

    def finish(self) -> None:
        """Put into place what has arrived."""


class Matrices(Item):
    """Whole matrices, dealt out so that every rank has about the same number of weights."""

    def __init__(self, label: str, refs: list[Ref], team: Team, mean: bool, load: list[int]) -> None:
        super().__init__(label, refs, team, mean)
        self.owner: dict[Tensor, int] = {}
        self.offset: dict[Tensor, int] = {}
        here = [0] * team.size
        for ref in sorted(refs, key=lambda r: -r.param.numel()):  # the largest first, each to who has least
            rank = min(range(team.size), key=lambda r: (here[r], load[r], r))
            self.owner[ref.param], self.offset[ref.param] = rank, here[rank]
            here[rank] += ref.param.numel()
            load[rank] += ref.param.numel()
        self.chunk = max(here)
        self.whole: Tensor | None = None
        self.part: Tensor | None = None

    def place(self, buffer: Tensor, p: Tensor) -> Tensor:
        start = self.owner[p] * self.chunk + self.offset[p]
        return buffer[start : start + p.numel()]

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        for ref in self.refs:
            if self.owner[ref.param] == self.team.rank:
                yield ref, ref.param

    def reduce(self) -> None:
        first = self.refs[0].param
        if self.whole is None or self.part is None:
            self.whole, self.part = first.new_zeros(self.team.size * self.chunk), first.new_zeros(self.chunk)
        for ref in self.refs:
            there = self.place(self.whole, ref.param)
            if ref.param.grad is None:
                there.zero_()
            else:
                there.copy_(ref.param.grad.reshape(-1))
        self.pending = self.team.scatter_sum(self.part, self.whole)

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
        self.pending = self.team.gather(self.whole, self.part)

    def finish(self) -> None:
        assert self.whole is not None
        for ref in self.refs:
            if self.owner[ref.param] != self.team.rank:
                ref.param.copy_(self.place(self.whole, ref.param).view_as(ref.param))


class Rows(Item):
    """A table cut by rows; the last ranks get fewer, or none, where it does not divide."""

    def __init__(self, label: str, refs: list[Ref], team: Team, mean: bool) -> None:
        super().__init__(label, refs, team, mean)
        (self.ref,) = refs
        p = self.ref.param
        self.per = math.ceil(p.shape[0] / team.size)
        self.bounds = [(min(r * self.per, len(p)), min((r + 1) * self.per, len(p))) for r in range(team.size)]
        start, end = self.bounds[team.rank]
        self.local = p.detach()[start:end]  # shares memory and version counter with the parameter
        self.even = team.size * self.per == len(p)
        self.whole: Tensor | None = None
        self.part: Tensor | None = None

    def locals(self) -> Iterator[tuple[Ref, Tensor]]:
        if len(self.local):
            yield self.ref, self.local

    def filled_up(self) -> Tensor:
        p = self.ref.param
        if self.whole is None:
            self.whole = p.new_zeros(self.team.size * self.per, *p.shape[1:])
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
        self.pending = self.team.scatter_sum(self.part, whole)

    def gradients(self) -> Iterator[tuple[Ref, Tensor, Tensor]]:
        assert self.part is not None
        for ref, local in self.locals():
            yield ref, local, self.gradient(self.part[: len(local)], local)

    def gather(self) -> None:
        if self.team.size == 1:
            return
        assert self.part is not None
        self.part[: len(self.local)].copy_(self.local)
        target = self.ref.param.detach() if self.even and self.ref.param.is_contiguous() else self.filled_up()
        self.pending = self.team.gather(target, self.part)

    def finish(self) -> None:
        if self.team.size == 1:
            return
        if not (self.even and self.ref.param.is_contiguous()):
            assert self.whole is not None
            start, end = self.bounds[self.team.rank]
            p = self.ref.param.detach()
            p[:start].copy_(self.whole[:start])
            p[end:].copy_(self.whole[end : len(p)])
        self.ref.member.vouch(self.local)  # the other rows of its memory were written, not these


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
        self.pending = self.team.sum(self.flat)

    def parts(self) -> Sequence[Tensor]:
        assert self.flat is not None
        return self.flat.split([ref.param.numel() for ref in self.refs])

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


ORDERS: dict[str, Callable[[Sequence[Item]], Order]] = {"plain": plain, "interleaved": interleaved}


def check_order(order: Order, items: Sequence[Item]) -> None:
    """Every item goes once through every operation, in their order."""
    for item in items:
        found = [op for op, label in order if label == item.label]
        if found != list(OPS):
            raise ValueError(f"The order has {found} for {item.label!r}; it must have {list(OPS)}, each once.")
    unknown = {label for _, label in order} - {item.label for item in items}
    if unknown:
        raise ValueError(f"The order names {sorted(unknown)[0]!r}; the items are: {', '.join(i.label for i in items)}.")


# ---------------------------------------------------------------------------------------------- optimizer


class Interleaved(Optimizer):
    """Several of this package's optimizers as one, over all ranks of a process group.

    Arguments:
        model: its parameters are made equal to rank 0's at the start.
        optimizers: Muon, NorMuon and Adam, each with its own parameters. Groups are shared with them, so schedulers
            and a person's own changes take effect.
        order: `interleaved`, `plain`, or a list of (operation, item) of your own; `items` has the items.
        average: `mean` divides the summed gradients by the number of ranks, as DDP does; `sum` does not, for losses
            that were divided by the tokens of all ranks.
        buckets: in how many parts the matrices of one dtype travel.
        replicate_below: tensors with fewer weights are trained by every rank.
        process_group: None takes the default one; without any, this is one rank. GPUs need a backend for small CPU
            tensors beside NCCL: init_process_group("cpu:gloo,cuda:nccl").
        trace: a list that receives a `Span` for everything a step does.

    All ranks must step together. A parameter that has a gradient on some ranks only is trained with what they have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[SpeedrunOptimizer],
        *,
        order: Literal["interleaved", "plain"] | Order = "interleaved",
        average: Literal["mean", "sum"] = "mean",
        buckets: int = 2,
        replicate_below: int = 1024,
        process_group: Any = None,
        trace: list[Span] | None = None,
    ) -> None:
        if not optimizers:
            raise ValueError("Interleaved got no optimizers; pass at least one.")
        for optimizer in optimizers:
            if not isinstance(optimizer, SpeedrunOptimizer):
                raise ValueError(f"Interleaved cannot shard {type(optimizer).__name__}; pass Muon, NorMuon or Adam.")
        if average not in ("mean", "sum"):
            raise ValueError(f"average is {average!r}; it must be one of: mean, sum.")
        if buckets < 1:
            raise ValueError(f"buckets is {buckets}; it must be at least 1.")
        self.optimizers = list(optimizers)
        self.team = Team.of(process_group)
        self.trace = trace
        names = {p: name for name, p in model.named_parameters()}
        self.refs = [
            Ref(names.get(p, name), p, member, group, index)  # type: ignore[call-overload]
            for member in self.optimizers
            for number, group in enumerate(member.param_groups)
            for index, (name, p) in enumerate(named(group, number))
        ]
        counts: dict[Tensor, int] = defaultdict(int)
        for ref in self.refs:
            counts[ref.param] += 1
            if counts[ref.param] > 1:
                raise ValueError(f"{ref.name} is in two groups; each parameter may have one.")
        missing = [name for p, name in names.items() if p.requires_grad and p not in counts]
        if missing:
            raise ValueError(f"No optimizer has {missing[0]}; its gradient would never be shared between ranks.")
        super().__init__([{"params": [ref.param for ref in self.refs]}], {})
        self.param_groups = [group for member in self.optimizers for group in member.param_groups]
        self.mean = average == "mean"
        self.items = self._build(buckets, replicate_below)
        self.item = {item.label: item for item in self.items}
        if isinstance(order, str):
            if order not in ORDERS:
                raise ValueError(f"order is {order!r}; it must be one of: {', '.join(ORDERS)}, or a list.")
            order = ORDERS[order](self.items)
        check_order(order, self.items)
        self.order = order
        # Collectives must be launched in one order on all ranks, whichever gradient happens to be ready first.
        self.early = [item for item in reversed(self.items) if not isinstance(item, Matrices)]
        self._next_early = 0
        self._ready: dict[str, int] = defaultdict(int)
        self._syncing = True
        self._hooks = [
            ref.param.register_post_accumulate_grad_hook(self._hook(item))
            for item in self.early
            for ref in item.refs
            if self.team.size > 1
        ]
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.team.send_from(0, tensor.data)

    def _build(self, buckets: int, replicate_below: int) -> list[Item]:
        matrices: dict[Any, list[Ref]] = defaultdict(list)
        small: dict[Any, list[Ref]] = defaultdict(list)
        items: list[Item] = []
        for ref in self.refs:
            kind = ref.param.dtype, ref.param.device
            if isinstance(ref.member, Muon):
                matrices[kind].append(ref)
            elif ref.param.numel() < replicate_below or ref.param.ndim == 0:
                small[kind].append(ref)
            else:
                items.append(Rows(ref.name, [ref], self.team, self.mean))
        items += [Small(f"small {k}", refs, self.team, self.mean) for k, refs in enumerate(small.values())]
        load = [0] * self.team.size
        for refs in matrices.values():
            for part in halves(refs, buckets):
                label = f"matrices {sum(isinstance(item, Matrices) for item in items)}"
                items.append(Matrices(label, part, self.team, self.mean, load))
        return items

    # ---------------------------------------------------------------- backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate: for all micro-batches but the last."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _hook(self, item: Item) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if not self._syncing:
                return
            if item.launched:
                raise RuntimeError(
                    f"A gradient of {item.label} came after its reduction had begun. Wrap all backward passes of a "
                    "step but the last one in `with optimizer.no_sync():`."
                )
            self._ready[item.label] += 1
            while self._next_early < len(self.early):
                following = self.early[self._next_early]
                if self._ready[following.label] < len(following.refs):
                    return
                self._launch(following)
                self._next_early += 1

        return arrived

    def launch(self) -> None:
        """Begin the reductions that the backward pass did not begin, as on a rank that had nothing to train on.

        `step` does so itself. Call it before collectives of your own between the backward pass and `step`: they must
        come in the same order on all ranks.
        """
        for item in self.early:
            self._launch(item)

    @torch.no_grad()
    def _launch(self, item: Item) -> None:
        if not item.launched:
            with self._span("launch", item.label, "reduce"):
                item.reduce()
            item.launched = True

    # -------------------------------------------------------------------- step

    @torch.compiler.disable
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """One update of every parameter that has a gradient on any rank. Gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        finally:
            self._forget()
        return loss

    def _forget(self) -> None:
        """Nothing of this step is under way any more; also after an error, for those who catch it."""
        for item in self.items:
            item.wait()
            item.launched = False
        self._next_early = 0
        self._ready.clear()

    @torch.no_grad()
    def _step(self) -> None:
        self.launch()
        has_gradient, finite = self._agree()
        for op, label in self.order:
            item = self.item[label]
            if op == "reduce":
                self._launch(item)
            elif op == "update":
                with self._span("wait", label, op):
                    item.wait()
                with self._span("compute", label, op):
                    self._update(item, has_gradient, finite)
            elif op == "gather":
                with self._span("launch", label, op):
                    item.gather()
            else:
                with self._span("wait", label, op):
                    item.wait()
                with self._span("copy", label, op):
                    item.finish()

    def _update(self, item: Item, has_gradient: set[Tensor], finite: float | Tensor) -> None:
        work: dict[SpeedrunOptimizer, list[Work]] = defaultdict(list)
        for ref, local, grad in item.gradients():
            if ref.param in has_gradient:
                work[ref.member].append(ref.work(local, grad))
        for member, members_work in work.items():
            member._update(members_work, finite)

    def _agree(self) -> tuple[set[Tensor], float | Tensor]:
        """Which parameters have a gradient anywhere, and whether all gradients everywhere are finite.

        The second answer is waited for on a CPU, before any weight changes; on a GPU the update is masked with it and
        the error comes with the next step, as in a single process.
        """
        self.optimizers[0]._raise_last()
        on_cpu = self.refs[0].param.device.type == "cpu"
        flags = torch.zeros(len(self.refs) + 1, dtype=torch.int32)
        for k, ref in enumerate(self.refs):
            g = ref.param.grad
            flags[k] = g is not None
            if g is not None and g.is_sparse:
                raise ValueError(f"The gradient of {ref.name} is sparse; create the embedding with sparse=False.")
            if on_cpu and g is not None and not flags[-1] and not all_finite(g):
                flags[-1] = 1 + k + len(self.refs) * self.team.rank
        self.team.largest(flags)
        if flags[-1]:
            rank, k = divmod(int(flags[-1]) - 1, len(self.refs))
            where = f" on rank {rank}" if self.team.size > 1 else ""
            raise NonFiniteGradient(
                f"The gradient of {self.refs[k].name} is not finite (NaN or infinite){where}; no weight was changed. "
                "Skip this step, lower the learning rate, or clip the gradients."
            )
        has_gradient = {ref.param for k, ref in enumerate(self.refs) if flags[k]}
        if on_cpu:
            return has_gradient, 1.0
        bad = torch.zeros((), dtype=torch.int32, device=self.refs[0].param.device)
        for ref in self.refs:
            if ref.param.grad is not None:
                bad |= ~ref.param.grad.sum().isfinite()
        finite = self.team.largest(bad) == 0
        self.optimizers[0]._ask_later(finite)
        return has_gradient, finite.float()

    @contextmanager
    def _span(self, kind: Any, item: str, op: str) -> Iterator[None]:
        if self.trace is None:
            yield
            return
        start = time.perf_counter()
        yield
        self.trace.append(Span(kind, item, op, start, time.perf_counter()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; reductions of a step that is not made after all are waited for and forgotten."""
        self._forget()
        for member in self.optimizers:
            member.zero_grad(set_to_none)

    # ------------------------------------------------------------------- state

    def _home(self, p: Tensor) -> tuple[Item, Ref]:
        for item in self.items:
            for ref in item.refs:
                if ref.param is p:
                    return item, ref
        raise ValueError(f"Interleaved does not train this parameter of shape {tuple(p.shape)}.")

    def _local(self, p: Tensor) -> tuple[Ref, Tensor] | None:
        """What this rank trains of a parameter, if anything."""
        item, ref = self._home(p)
        return next(((r, local) for r, local in item.locals() if r is ref), None)

    @torch.no_grad()
    def gathered(self) -> "Whole":
        """The state as a single process would have it. All ranks must call this; rank 0 keeps what arrives.

        The others get the same object without its tensors, so a checkpoint is rank 0's to write.
        """
        mine: dict[str, dict[str, Any]] = {}
        for item in self.items:
            for ref, local in item.locals():
                state = ref.member.state.get(local, {})
                mine[ref.name] = {
                    key: (tuple(value.shape), value.dtype) if torch.is_tensor(value) else value
                    for key, value in state.items()
                }
        theirs = self.team.everybodys(mine)
        whole = Whole(self.param_groups)
        for item in self.items:
            for ref in item.refs:
                state = self._gather_state(item, ref, [layout.get(ref.name) for layout in theirs])
                if state:
                    whole.state[ref.param] = state
        return whole

    def _gather_state(self, item: Item, ref: Ref, layouts: list[Any]) -> dict[str, Any]:
        """The state of one parameter, from the ranks that have a part of it."""
        holders = [rank for rank, layout in enumerate(layouts) if layout]
        if isinstance(item, Small):
            holders = holders[:1]
        if not holders:
            return {}
        local = self._local(ref.param)
        mine = {} if local is None else ref.member.state.get(local[1], {})
        state: dict[str, Any] = {}
        for key, first in layouts[holders[0]].items():
            if not isinstance(first, tuple):
                state[key] = first
                continue
            parts = []
            for rank in holders:
                shape, dtype = layouts[rank][key]
                device = "cpu" if key == "step" else ref.param.device
                part = mine[key] if rank == self.team.rank else torch.empty(shape, dtype=dtype, device=device)
                parts.append(self._passed_on(rank, part))
            if self.team.rank == 0:
                state[key] = torch.cat(parts) if isinstance(item, Rows) and parts[0].ndim else parts[0].clone()
        return state

    def _passed_on(self, rank: int, part: Tensor) -> Tensor:
        """`part` of one rank on all of them; step counters live on the CPU and travel by way of the device."""
        return self.team.send_from(rank, part.to(self.refs[0].param.device)).to(part.device)

    @torch.no_grad()
    def scatter(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Take this rank's part of a state as `gathered` gives it, whatever number of ranks gathered it."""
        for item in self.items:
            for ref, local in item.locals():
                ref.member.state.pop(local, None)
                state = states.get(ref.param)
                if not state:
                    continue
                start, end = item.bounds[self.team.rank] if isinstance(item, Rows) else (0, 0)
                ref.member.state[local] = {
                    key: (value[start:end] if isinstance(item, Rows) and value.ndim else value).clone()
                    if torch.is_tensor(value)
                    else value
                    for key, value in state.items()
                }
                ref.member.vouch(local)

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """What has been learned about one parameter becomes what is known about another of the same shape."""
        here, there = self._local(source), self._local(target)
        if here is not None and there is not None:
            state = here[0].member.state.get(here[1], {})
            there[0].member.state[there[1]] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}

    @torch.no_grad()
    def master(self, p: Tensor) -> Tensor:
        """The exact value of a parameter on all ranks, which must all ask for it."""
        item, ref = self._home(p)
        if not ref.member._is_exact(p, ref.group) or isinstance(item, Small):
            return ref.member.master(p)
        if isinstance(item, Matrices):
            owner = item.owner[p]
            value = ref.member.master(p) if owner == self.team.rank else torch.empty_like(p, dtype=torch.float32)
            return self.team.send_from(owner, value.contiguous())
        assert isinstance(item, Rows)
        parts = []
        for rank, (start, end) in enumerate(item.bounds):
            part = torch.empty(end - start, *p.shape[1:], dtype=torch.float32, device=p.device)
            if rank == self.team.rank and end > start:
                remainder = ref.member.state.get(item.local, {}).get("remainder")
                part = item.local.float() if remainder is None else join(item.local, remainder)
            parts.append(self.team.send_from(rank, part) if end > start else part)
        return torch.cat(parts)

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Write a parameter on all ranks so that `master(p)` gives back `value` exactly, where its dtype allows."""
        item, ref = self._home(p)
        exact = ref.member._is_exact(p, ref.group)
        if isinstance(item, Rows) and exact:
            start, end = item.bounds[self.team.rank]
            ref.member.set_master(p, value)
            remainder = ref.member.state.pop(p)["remainder"]
            ref.member.state[item.local]["remainder"] = remainder[start:end].clone()
            ref.member.vouch(item.local)
            return
        ref.member.set_master(p, value)
        if isinstance(item, Matrices) and exact and item.owner[p] != self.team.rank:
            ref.member.state.pop(p, None)  # a remainder is its owner's

    def reset(self) -> None:
        """Forget everything learned about the gradients, remainders included, as if no step had been made."""
        for member in self.optimizers:
            member.reset()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes of state this rank keeps for each parameter, at most. Meta tensors will do."""
        sizes: dict[Tensor, int] = {}
        for member in self.optimizers:
            sizes |= member.state_bytes()
        here: dict[Tensor, int] = {ref.param: 0 for ref in self.refs}
        for item in self.items:
            for ref, local in item.locals():
                share = len(local) / len(ref.param) if isinstance(item, Rows) else 1
                here[ref.param] = round(sizes[ref.param] * share)
        return here

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for the same number of ranks. `gathered` and `scatter` serve any number."""
        parts: dict[str, Any] = {}
        for item in self.items:
            for ref, local in item.locals():
                if ref.member.state.get(local):
                    parts[ref.name] = dict(ref.member.state[local])
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": parts, "param_groups": groups, "rank": self.team.rank, "ranks": self.team.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks = state_dict.get("ranks"), state_dict.get("rank")
        if ranks != (self.team.size, self.team.rank):
            raise ValueError(
                f"This state_dict is of rank {ranks[1]} of {ranks[0]}, this is rank {self.team.rank} of "
                f"{self.team.size}. Save what gathered() gives and load it with scatter(), for any number of ranks."
            )
        for item in self.items:
            for ref, local in item.locals():
                ref.member.state.pop(local, None)
                saved = state_dict["state"].get(ref.name)
                if saved:
                    ref.member.state[local] = {k: v.clone() if torch.is_tensor(v) else v for k, v in saved.items()}
                ref.member.vouch(local)
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved_group)


@dataclass
class Whole:
    """Groups, and the state of every parameter in one place: what a checkpoint is made of."""

    param_groups: list[Group]
    state: dict[Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))


def halves(refs: list[Ref], parts: int) -> list[list[Ref]]:
    """At most `parts` runs of neighbours with about the same number of weights each."""
    total, done = sum(ref.param.numel() for ref in refs), 0
    found: list[list[Ref]] = [[] for _ in range(parts)]
    for ref in refs:
        middle = done + ref.param.numel() / 2
        found[min(parts - 1, int(parts * middle / total))].append(ref)
        done += ref.param.numel()
    return [part for part in found if part]
