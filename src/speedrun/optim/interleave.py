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

In which order is a table, not code: see speedrun.optim.pipeline, or pass your own. Optimizer state exists once over
all ranks. Any number of ranks will do, also one that gets no matrix or no row. Without a process group it is one rank.

torch.profiler sees what a step does as ranges: `launch: reduce embed` (a transfer is prepared and sent off),
`wait: update embed` (there is nothing to do until it arrives), `compute: update embed`, `copy: finish embed` (it is put
into place).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.profiler import record_function

from speedrun.optim.base import NonFiniteGradient, SpeedrunOptimizer, Work, all_finite
from speedrun.optim.exact_bf16 import join
from speedrun.optim.muon import Grid, Muon
from speedrun.optim.orthogonalize import fast_dtype
from speedrun.optim.pipeline import ORDERS, Comm, Item, Matrices, Order, Ref, Rows, Small, check_order
from speedrun.optim.polynomial import multiplications
from speedrun.optim.state import States, copied, named, value_at

Loss = TypeVar("Loss")


class Interleaved(Optimizer):
    """Several of this package's optimizers as one, over all ranks of a process group.

    Arguments:
        model: its parameters are made equal to rank 0's at the start.
        optimizers: Muon, NorMuon and Adam, each with its own parameters. Groups are shared with them, so schedulers
            and a person's own changes take effect.
        order: `eager`, `interleaved`, `plain`, or a list of (operation, item) of your own; `items` has the items.
        early: whose reductions begin during the backward pass: `tables` (and small tensors), or `all`. None takes
            `all` for `eager`, `tables` otherwise.
        average: `mean` divides the summed gradients by the number of ranks, as DDP does; `sum` does not, for losses
            that were divided by the tokens of all ranks; a number divides them by that.
        buckets: in how many parts the matrices of one dtype travel.
        replicate_below: tensors with fewer weights are trained by every rank.
        process_group: None takes the default one; without any, this is one rank. GPUs need a backend for small CPU
            tensors beside NCCL: init_process_group("cpu:gloo,cuda:nccl"). A `Comm` whose methods are your own will do.

    All ranks must step together. A parameter that has a gradient on some ranks only is trained with what they have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[SpeedrunOptimizer],
        *,
        order: str | Order = "eager",
        early: Literal["tables", "all"] | None = None,
        average: Literal["mean", "sum"] | int = "mean",
        buckets: int = 2,
        replicate_below: int = 1024,
        process_group: Any = None,
    ) -> None:
        if not optimizers:
            raise ValueError("Interleaved got no optimizers; pass at least one.")
        for optimizer in optimizers:
            if not isinstance(optimizer, SpeedrunOptimizer):
                raise ValueError(f"Interleaved cannot shard {type(optimizer).__name__}; pass Muon, NorMuon or Adam.")
        if average not in ("mean", "sum") and not (type(average) is int and average >= 1):
            raise ValueError(f"average is {average!r}; it must be one of: mean, sum, a whole number from 1 on.")
        if buckets < 1:
            raise ValueError(f"buckets is {buckets}; it must be at least 1.")
        self.optimizers = list(optimizers)
        self.comm = Comm.of(process_group)
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
        self.divisor = average if isinstance(average, int) else self.comm.size if average == "mean" else 1
        self.items = self._build(buckets, replicate_below)
        self.item = {item.label: item for item in self.items}
        early = early or ("all" if order == "eager" else "tables")
        named_order = order if isinstance(order, str) else None
        if early not in ("tables", "all"):
            raise ValueError(f"early is {early!r}; it must be one of: tables, all.")
        if isinstance(order, str):
            if order not in ORDERS:
                raise ValueError(f"order is {order!r}; it must be one of: {', '.join(ORDERS)}, or a list.")
            order = ORDERS[order](self.items)
        check_order(order, self.items)
        self.order = order
        # Collectives must be launched in one order on all ranks, whichever gradient happens to be ready first.
        self.early = [item for item in reversed(self.items) if early == "all" or not isinstance(item, Matrices)]
        # What got no gradient last time is not waited for: `agree` launches it. All ranks know the same of last time.
        self._queue = self.early
        self._expected = {item.label: len(item.refs) for item in self.early}
        self._next_early = 0
        self._ready: dict[str, int] = defaultdict(int)
        self._syncing = True
        self._arrivals: list[str] | None = [] if self.comm.size > 1 else None  # in the first backward pass
        self._named_order = named_order
        self._agreed: tuple[set[Tensor], float | Tensor] | NonFiniteGradient | None = None
        self._hooks = [
            ref.param.register_post_accumulate_grad_hook(self._hook(item))
            for item in self.early
            for ref in item.refs
            if self.comm.size > 1
        ]
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.comm.broadcast(0, tensor.data)

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
                items.append(Rows(ref.name, [ref], self.comm, self.divisor))
        items += [Small(f"small {k}", refs, self.comm, self.divisor) for k, refs in enumerate(small.values())]
        load = [0.0] * self.comm.size
        for refs in matrices.values():
            for part in halves(refs, buckets):
                label = f"matrices {sum(isinstance(item, Matrices) for item in items)}"
                items.append(Matrices(label, part, self.comm, self.divisor, load, effort))
        return items

    def members(self) -> list[Any]:
        """None: `agree` checks the gradients of all ranks."""
        return []

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
            if self._ready[item.label] == len(item.refs) and self._arrivals is not None:
                self._arrivals.append(item.label)
            while self._next_early < len(self._queue):
                following = self._queue[self._next_early]
                if self._ready[following.label] < self._expected[following.label]:
                    return
                self._launch(following)
                self._next_early += 1

        return arrived

    @torch.no_grad()
    def _launch(self, item: Item) -> None:
        if not item.launched:
            with record_function(f"launch: reduce {item.label}"):
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
        self._agreed = None

    @torch.no_grad()
    def _step(self) -> None:
        if self._agreed is None:
            self.agree()
        assert self._agreed is not None
        if isinstance(self._agreed, NonFiniteGradient):
            raise self._agreed
        has_gradient, finite = self._agreed
        for op, label in self.order:
            item = self.item[label]
            if op == "reduce":
                self._launch(item)
            elif op == "update":
                with record_function(f"wait: update {label}"):
                    item.wait()
                with record_function(f"compute: update {label}"):
                    self._update(item, has_gradient, finite)
            elif op == "gather":
                with record_function(f"launch: gather {label}"):
                    item.gather()
            else:
                with record_function(f"wait: finish {label}"):
                    item.wait()
                with record_function(f"copy: finish {label}"):
                    item.finish()

    def _update(self, item: Item, has_gradient: set[Tensor], finite: float | Tensor) -> None:
        work: dict[SpeedrunOptimizer, list[Work]] = defaultdict(list)
        for ref, local, grad in item.gradients():
            if ref.param in has_gradient:
                work[ref.member].append(ref.work(local, grad))
        for member, members_work in work.items():
            member._update(members_work, finite)

    @torch.no_grad()
    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        """What all ranks must know before a weight changes: who has which gradients, and that they are finite.

        `step` does it if nobody did. Call it yourself, after the last backward pass, to learn the sums of `numbers`
        over all ranks by the same message. Collectives of your own between the backward pass and `step` belong
        behind it: they must come in the same order on all ranks.

        A gradient that is not finite is an error of `step` on a CPU, before any weight changes. On a GPU the update is
        masked and the error comes with the next step, as in a single process.
        """
        self.optimizers[0]._raise_last()
        on_cpu, count = self.refs[0].param.device.type == "cpu", len(self.refs)
        there, bad, where = torch.zeros(count), torch.zeros(count), torch.zeros(self.comm.size)
        with record_function("compute: check agreement"):
            for k, ref in enumerate(self.refs):
                g = ref.param.grad
                there[k] = g is not None
                if g is not None and g.is_sparse:
                    raise ValueError(f"The gradient of {ref.name} is sparse; create the embedding with sparse=False.")
                if on_cpu and g is not None and not all_finite(g):
                    bad[k] = where[self.comm.rank] = 1
        message = torch.cat([there.double(), bad.double(), where.double(), torch.tensor(numbers, dtype=torch.float64)])
        with record_function("launch: reduce agreement"):
            arriving = self.comm.all_reduce_small(message)
        for item in [*self._queue, *(item for item in self.early if item not in self._queue)]:
            self._launch(item)
        with record_function("wait: reduce agreement"):
            if arriving is not None:
                arriving.wait()
        there, bad, where, sums = message.split([count, count, self.comm.size, len(numbers)])
        finite: float | Tensor = 1.0
        if bad.any():
            name = self.refs[int(bad.argmax())].name
            rank = f" on rank {int(where.argmax())}" if self.comm.size > 1 else ""
            self._agreed = NonFiniteGradient(
                f"The gradient of {name} is not finite (NaN or infinite){rank}; no weight was changed. "
                "Skip this step, lower the learning rate, or clip the gradients."
            )
            return sums.tolist()
        if not on_cpu:
            flag = torch.zeros((), dtype=torch.int32, device=self.refs[0].param.device)
            for ref in self.refs:
                if ref.param.grad is not None:
                    flag |= ~ref.param.grad.sum().isfinite()
            all_good = self.comm.all_reduce_max(flag) == 0
            self.optimizers[0]._ask_later(all_good)
            finite = all_good.float()
        has_gradient = {ref.param for k, ref in enumerate(self.refs) if there[k]}
        if self._arrivals is not None:
            self._learn_order()
        self._expected = {item.label: sum(ref.param in has_gradient for ref in item.refs) for item in self.early}
        self._queue = [item for item in self.early if self._expected[item.label]]
        self._agreed = has_gradient, finite
        return sums.tolist()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does, for the gradient of all ranks. All call it, before `step`.

        The norm is known when every reduction has arrived, so none of them hides behind computing any more. `.grad`
        stays as it is: what `step` uses is scaled. Returns the norm.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be positive.")
        if self._agreed is None:
            self.agree()
        for item in self.items:
            self._launch(item)
        total = torch.zeros((), dtype=torch.float64)
        for item in self.items:
            with record_function(f"wait: reduce {item.label}"):
                item.wait()
            if self.comm.rank == 0 or not isinstance(item, Small):  # those are on every rank, and count once
                total += float(item.summed().float().square().sum())
        message = self.comm.all_reduce_small(total)
        if message is not None:
            message.wait()
        norm = total.sqrt() / self.divisor
        scale = max_norm / (float(norm) + 1e-6)
        if scale < 1:
            for item in self.items:
                item.summed().mul_(scale)
        return norm

    def _learn_order(self) -> None:
        """Gradients come in an order that only a backward pass shows; the one on rank 0 counts for all.

        It decides what sets out first, and nothing that is computed.
        """
        first = self.comm.all_gather_object(self._arrivals)[0]
        self._arrivals = None
        place = {label: k for k, label in enumerate(first)}
        self.early.sort(key=lambda item: place.get(item.label, len(place)))
        if self._named_order == "eager":
            late = [item for item in self.items if item not in self.early]
            self.order = ORDERS["eager"]([*late, *reversed(self.early)])

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
    def full_state_dict(self) -> States:
        """The state by name, as a single process would have it. All ranks must call this; rank 0 keeps what arrives.

        The others get the same without its tensors, so a checkpoint is rank 0's to write.
        """
        mine: dict[str, dict[str, Any]] = {}
        for item in self.items:
            for ref, local in item.locals():
                state = ref.member.state.get(local, {})
                mine[ref.name] = {
                    key: (tuple(value.shape), value.dtype) if torch.is_tensor(value) else value
                    for key, value in state.items()
                }
        theirs = self.comm.all_gather_object(mine)
        whole = {
            ref.name: self._gather_state(item, ref, [layout.get(ref.name) for layout in theirs])
            for item in self.items
            for ref in item.refs
        }
        return {name: state for name, state in whole.items() if state}

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
                part = mine[key] if rank == self.comm.rank else torch.empty(shape, dtype=dtype, device=device)
                parts.append(self._passed_on(rank, part))
            if self.comm.rank == 0:
                state[key] = torch.cat(parts) if isinstance(item, Rows) and parts[0].ndim else parts[0].clone()
        return state

    def _passed_on(self, rank: int, part: Tensor) -> Tensor:
        """`part` of one rank on all of them; step counters live on the CPU and travel by way of the device."""
        return self.comm.broadcast(rank, part.to(self.refs[0].param.device)).to(part.device)

    @torch.no_grad()
    def load_full_state_dict(self, states: States) -> None:
        """Take this rank's part of a state as `full_state_dict` gives it, whatever number of ranks gathered it."""
        parts = dict(states)
        for item in self.items:
            if isinstance(item, Rows) and item.ref.name in states:
                start, end = item.bounds[self.comm.rank]
                parts[item.ref.name] = {
                    key: value[start:end] if torch.is_tensor(value) and value.ndim else value
                    for key, value in states[item.ref.name].items()
                }
        self._take(parts)

    def _take(self, parts: States) -> None:
        """Make copies of this rank's parts its state."""
        for item in self.items:
            for ref, local in item.locals():
                ref.member.state.pop(local, None)
                if parts.get(ref.name):
                    ref.member.state[local] = copied(parts[ref.name], local.device)
                ref.member.trust_remainder(local)

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """What has been learned about one parameter becomes what is known about another of the same shape."""
        here, there = self._local(source), self._local(target)
        if here is not None and there is not None:
            there[0].member.state[there[1]] = copied(here[0].member.state.get(here[1], {}), target.device)

    @torch.no_grad()
    def master(self, p: Tensor) -> Tensor:
        """The exact value of a parameter on all ranks, which must all ask for it."""
        item, ref = self._home(p)
        if not ref.member.is_exact(p, ref.group) or isinstance(item, Small):
            return ref.member.master(p)
        if isinstance(item, Matrices):
            owner = item.owner[p]
            value = ref.member.master(p) if owner == self.comm.rank else torch.empty_like(p, dtype=torch.float32)
            return self.comm.broadcast(owner, value.contiguous())
        assert isinstance(item, Rows)
        parts = []
        for rank, (start, end) in enumerate(item.bounds):
            part = torch.empty(end - start, *p.shape[1:], dtype=torch.float32, device=p.device)
            if rank == self.comm.rank and end > start:
                remainder = ref.member.state.get(item.local, {}).get("remainder")
                part = item.local.float() if remainder is None else join(item.local, remainder)
            parts.append(self.comm.broadcast(rank, part) if end > start else part)
        return torch.cat(parts)

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Write a parameter on all ranks so that `master(p)` gives back `value` exactly, where its dtype allows."""
        item, ref = self._home(p)
        exact = ref.member.is_exact(p, ref.group)
        if isinstance(item, Rows) and exact:
            start, end = item.bounds[self.comm.rank]
            ref.member.set_master(p, value)
            remainder = ref.member.state.pop(p)["remainder"]
            ref.member.state[item.local]["remainder"] = remainder[start:end].clone()
            ref.member.trust_remainder(item.local)
            return
        ref.member.set_master(p, value)
        if isinstance(item, Matrices) and exact and item.owner[p] != self.comm.rank:
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
        """This rank's part, for the same number of ranks; `full_state_dict` serves any number."""
        parts: dict[str, Any] = {}
        for item in self.items:
            for ref, local in item.locals():
                if ref.member.state.get(local):
                    parts[ref.name] = dict(ref.member.state[local])
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": parts, "param_groups": groups, "rank": self.comm.rank, "ranks": self.comm.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks = state_dict.get("ranks"), state_dict.get("rank")
        if ranks != (self.comm.size, self.comm.rank):
            raise ValueError(
                f"This state_dict is of rank {ranks[1]} of {ranks[0]}, this is rank {self.comm.rank} of "
                f"{self.comm.size}. Save full_state_dict() and load it with load_full_state_dict() instead."
            )
        self._take(state_dict["state"])
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved_group)


PER_WEIGHT = 256.0  # multiplications in the time of everything else that is done to a weight; about that on a CPU


def effort(ref: Ref) -> float:
    """What a matrix costs to train: the products of its orthogonalisation, and its passes through memory."""
    group, p = ref.group, ref.param
    grid = Grid(p.shape, value_at(group["matrix"], ref.index), value_at(group["blocks"], ref.index), ref.name)
    dtype = group["dtype"] or fast_dtype(p.device)
    products = multiplications(grid.rows, grid.cols, group["steps"], dtype, p.device)
    return grid.count * products + PER_WEIGHT * p.numel()


def halves(refs: list[Ref], parts: int) -> list[list[Ref]]:
    """At most `parts` runs of neighbours with about the same number of weights each."""
    total, done = sum(ref.param.numel() for ref in refs), 0
    found: list[list[Ref]] = [[] for _ in range(parts)]
    for ref in refs:
        middle = done + ref.param.numel() / 2
        found[min(parts - 1, int(parts * middle / total))].append(ref)
        done += ref.param.numel()
    return [part for part in found if part]
