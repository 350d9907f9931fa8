"""The sharded step: every rank trains its share, and communication overlaps with computation.

After ClassicLarry's record, https://github.com/KellerJordan/modded-nanogpt/pull/190, and the proposal of Chris
McCormick, https://github.com/KellerJordan/modded-nanogpt/discussions/170.

    optimizer = Interleaved(model, [NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001)])    # instead of DDP
    for part in parts[:-1]:
        with optimizer.no_sync():
            loss(part).backward()
    loss(parts[-1]).backward()          # reductions of tables start while this still runs
    optimizer.step()

The step works on buckets of parameters (speedrun.optim.sharded.plan). Every bucket goes through four operations:

    reduce   sum the gradients over all ranks; each rank receives its share
    update   train this rank's share of the weights
    gather   all-gather the updated weights
    finish   wait until they have arrived in the parameters

Their order is a table: see speedrun.optim.sharded.order, or pass your own. Optimizer state exists once over all ranks.
A bucket without a gradient on any rank sits the step out, and one whose weights do not change the last two operations.
Any number of ranks works, also one that gets no matrix or no row. Without a process group it is one rank.

torch.profiler records a step as ranges: `launch: reduce embed` (a transfer is prepared and launched), `wait: update
embed` (nothing to do until it arrives), `compute: update embed`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.profiler import record_function

from speedrun.optim.finite import NonFiniteGradient, all_finite, raise_deferred
from speedrun.optim.protocol import StateDictMethods, shared_defaults
from speedrun.optim.sharded.bucket import BUCKETS, Bucket
from speedrun.optim.sharded.comm import Comm
from speedrun.optim.sharded.foreign import ForeignMember
from speedrun.optim.sharded.order import ORDERS, Early, Order, early_reductions, resolve_order
from speedrun.optim.sharded.plan import Member, ParamRef, param_refs, plan_buckets, state_bytes
from speedrun.optim.state import Group, Loss, States, call_closure, clone, match_groups, require, untraced


class Interleaved(StateDictMethods, Optimizer):
    """Several of this package's optimizers as one, over all ranks of a process group.

    Arguments:
        model: its parameters are made equal to rank 0's at the start.
        optimizers: each with its own parameters. Muon, NorMuon and Adam are shared out; any other
            `torch.optim.Optimizer` steps on all ranks alike, on the gradients of all. Groups are shared with them, so
            schedulers and your own changes take effect.
        order: `eager`, `interleaved`, `sequential`, or a list of (operation, label) of your own; `plan` has the labels.
        early: whose reductions begin during the backward pass: `tables` (and small tensors), or `all`. None takes
            `all` for `eager`, `tables` otherwise.
        average: `mean` divides the summed gradients by the number of ranks, as DDP does; `sum` does not, for losses
            that were divided by the tokens of all ranks; a number divides them by that.
        buckets: how many buckets the matrices of one dtype are divided into.
        replicate_below: tensors with fewer weights are trained by every rank.
        process_group: None takes the default one; without any, this is one rank. GPUs need a backend for small CPU
            tensors beside NCCL: init_process_group("cpu:gloo,cuda:nccl"). A subclass of `Comm` is taken as it is.

    All ranks must step together. A parameter that has a gradient on some ranks only is trained with what they have.

    With several ranks the parameters that are shared out move into flat buffers, at once, and their gradients when they
    are reduced: `p.data` and `p.grad` are views from then on. Clone a gradient that you keep beyond its step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        order: str | Order = "eager",
        early: Early | None = None,
        average: Literal["mean", "sum"] | int = "mean",
        buckets: int = 2,
        replicate_below: int = 1024,
        process_group: Any = None,
    ) -> None:
        self.optimizers = list(map(_member, optimizers))
        _check_arguments(optimizers, average, buckets)
        self.comm = Comm.of(process_group)
        names = {p: name for name, p in model.named_parameters()}
        self.refs = param_refs(self.optimizers, names)
        known = {ref.param for ref in self.refs}
        missing = [name for p, name in names.items() if p.requires_grad and p not in known]
        if missing:
            raise ValueError(f"No optimizer has {missing[0]}; its gradient would never be shared between ranks.")
        if self.comm.size > 1:
            _refuse_overlaps(model, known)
        super().__init__([{"params": [ref.param for ref in self.refs]}], shared_defaults(self.optimizers))
        self.param_groups = [group for member in self.optimizers for group in member.param_groups]
        self.divisor = average if isinstance(average, int) else self.comm.size if average == "mean" else 1
        self.plan = plan_buckets(self.refs, self.comm.size, buckets, replicate_below)
        self.order, self._order_name = resolve_order(order, self.plan), order
        self.buckets = [BUCKETS[plan.kind](plan, self.comm, self.divisor) for plan in self.plan]
        self._by_label = {bucket.label: bucket for bucket in self.buckets}
        # Collectives must be launched in the same order on all ranks, whichever gradient happens to be ready first.
        self.early = [self._by_label[label] for label in early_reductions(self.plan, order, early)]
        self._queue = list(self.early)  # those of this step that have not begun
        self._syncing = True
        self._arrivals: list[str] | None = [] if self.comm.size > 1 else None  # in the first backward pass
        self._agreed: float | Tensor | NonFiniteGradient | None = None
        if self.comm.size > 1:
            for bucket in self.early:
                for ref in bucket.refs:
                    ref.param.register_post_accumulate_grad_hook(self._hook(bucket))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.comm.broadcast(0, tensor.data)

    def add_param_group(self, param_group: Group) -> None:
        """Refused after the start, when buckets and their hooks are laid out."""
        if hasattr(self, "buckets"):
            raise ValueError(
                "Interleaved cannot take another group: its buckets are laid out already. Give the group to one of its "
                "optimizers, and build Interleaved anew around them."
            )
        super().add_param_group(param_group)

    def members(self) -> list[Any]:
        """None: `agree` checks the gradients of all ranks."""
        return []

    # ---------------------------------------------------------------- backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate gradients: for all micro-batches but the last."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if not self._syncing:
                return
            if bucket.launched or self._agreed is not None:
                raise RuntimeError(
                    f"A gradient of {bucket.label} arrived after its reduction had begun. Wrap all backward passes of "
                    "a step but the last one in `with optimizer.no_sync():`."
                )
            bucket.arrived += 1
            if bucket.arrived == len(bucket.refs) and self._arrivals is not None:
                self._arrivals.append(bucket.label)
            while self._queue and self._queue[0].arrived >= self._queue[0].expected:
                self._queue.pop(0).launch()

        return arrived

    # -------------------------------------------------------------------- step

    @untraced
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """One update of every parameter that has a gradient on any rank. Gradients are left as they are."""
        loss = call_closure(closure)
        try:
            self._step()
        finally:
            self._end_step()
        return loss

    def _end_step(self) -> None:
        """Wait for all collectives of this step and drop its results; also after an error."""
        for bucket in self.buckets:
            bucket.end()
        self._queue = [bucket for bucket in self.early if bucket.expected]
        self._agreed = None

    @torch.no_grad()
    def _step(self) -> None:
        if self._agreed is None:
            self.agree()
        assert self._agreed is not None
        if isinstance(self._agreed, NonFiniteGradient):
            raise self._agreed
        for op, label in self.order:
            self._by_label[label].run(op, self._agreed)

    @torch.no_grad()
    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        """Exchange what all ranks must know before a weight changes: who has which gradients, and that they are finite.

        `step` does it if it has not been done. Call it yourself, after the last backward pass, to learn the sums of
        `numbers` over all ranks from the same message. Your own collectives between the backward pass and `step` must
        come after it, in the same order on all ranks.

        On a CPU, a gradient that is not finite is an error of `step`, before any weight changes. On a GPU the update is
        masked and the error comes with the next step, as in a single process.
        """
        raise_deferred(self.optimizers)
        for bucket in self.buckets:
            bucket.restore_views()
        with record_function("compute: check agreement"):
            message = torch.cat([self._check_gradients(), torch.tensor(numbers, dtype=torch.float64)])
        with record_function("launch: reduce agreement"):
            arriving = self.comm.all_reduce_small(message)
        with record_function("wait: reduce agreement"):
            arriving.wait()
        facts, where, sums = message.split([3 * len(self.refs), self.comm.size, len(numbers)])
        there, turns, bad = facts.view(3, -1)
        has_gradient, changing = ({self.refs[k].param for k in row.nonzero().flatten()} for row in (there, turns))
        for bucket in self.buckets:
            bucket.begin(has_gradient, changing)
        for bucket in sorted(self.early, key=lambda bucket: not bucket.expected):  # the order of the backward pass
            bucket.run("reduce")
        if bad.any():
            name = self.refs[int(bad.argmax())].name
            rank = f" on rank {int(where.argmax())}" if self.comm.size > 1 else ""
            self._agreed = NonFiniteGradient(
                f"The gradient of {name} is not finite (NaN or infinite){rank}; no weight was changed. "
                "Skip this step, lower the learning rate, or clip the gradients."
            )
            return sums.tolist()
        self._agreed = 1.0 if self._on_cpu else self._finite_on_gpu()
        if self._arrivals is not None:
            self._learn_order()
        for bucket in self.early:
            bucket.expected = len(bucket.trained)
        return sums.tolist()

    @property
    def _on_cpu(self) -> bool:
        return self.refs[0].param.device.type == "cpu"

    def _check_gradients(self) -> Tensor:
        """1 for each parameter with a gradient, each that this rank will change, each bad gradient; 1 at a bad rank."""
        there, turns, bad = facts = torch.zeros(3, len(self.refs), dtype=torch.float64)
        where = torch.zeros(self.comm.size, dtype=torch.float64)
        mine = {slot.ref for bucket in self.buckets for slot, local in bucket.locals if slot.ref.is_due(local)}
        for k, ref in enumerate(self.refs):
            g = ref.param.grad
            there[k], turns[k] = g is not None, ref in mine
            if g is not None and g.is_sparse:
                raise ValueError(f"The gradient of {ref.name} is sparse; create the embedding with sparse=False.")
            if self._on_cpu and g is not None and not all_finite(g):
                bad[k] = where[self.comm.rank] = 1
        return torch.cat([facts.view(-1), where])

    def _finite_on_gpu(self) -> Tensor:
        """1 if the gradients of all ranks are finite, otherwise 0, without waiting for the GPU."""
        here = [bucket for bucket in self.buckets if any(ref.param.grad is not None for ref in bucket.refs)]
        sums = [bucket.pack().sum(dtype=torch.float32) for bucket in here]
        bad = torch.stack([*sums, torch.zeros((), device=self.refs[0].param.device)]).isfinite().logical_not()
        bad = bad.sum(dtype=torch.int32)
        self.comm.all_reduce(bad).wait()
        finite = bad == 0
        self.optimizers[0]._defer_check(finite)
        return finite.float()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does, for the gradients of all ranks. All call it, before `step`.

        It waits for every reduction, so none of them overlaps with computation any more. `.grad` stays as it is: the
        sum that `step` uses is scaled. Returns the norm, which is added up by buckets; `parameters` is not used.
        """
        require(max_norm > 0, "max_norm", max_norm, "positive")
        if self._agreed is None:
            self.agree()
        for bucket in self.buckets:
            bucket.run("reduce")
        total = torch.zeros((), dtype=torch.float64)
        trained = [bucket for bucket in self.buckets if bucket.trained]
        for bucket in trained:
            bucket.wait("reduce")
            total += bucket.square_sum()
        self.comm.all_reduce_small(total).wait()
        norm = total.sqrt() / self.divisor
        scale = max_norm / (float(norm) + 1e-6)
        if scale < 1:
            for bucket in trained:
                bucket.summed().mul_(scale)
        return norm

    def _learn_order(self) -> None:
        """Launch reductions in the order in which gradients arrived on rank 0 in the first backward pass.

        It decides what is sent first, and changes no result.
        """
        first = self.comm.all_gather_object(self._arrivals)[0]
        self._arrivals = None
        place = {label: k for k, label in enumerate(first)}
        self.early.sort(key=lambda bucket: place.get(bucket.label, len(place)))
        if self._order_name == "eager":
            late = [bucket for bucket in self.buckets if bucket not in self.early]
            self.order = ORDERS["eager"]([bucket.plan for bucket in [*late, *reversed(self.early)]])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; reductions of a step that is not made are waited for and dropped."""
        self._end_step()
        for member in self.optimizers:
            member.zero_grad(set_to_none)

    # ------------------------------------------------------------------- state

    def _home(self, p: Tensor) -> tuple[Bucket, ParamRef]:
        for bucket in self.buckets:
            for ref in bucket.refs:
                if ref.param is p:
                    bucket.restore_views()
                    return bucket, ref
        raise ValueError(f"Interleaved does not train this parameter of shape {tuple(p.shape)}.")

    @torch.no_grad()
    def full_state_dict(self) -> States:
        """The state by name, as a single process would have it. All ranks must call this; rank 0 gets the tensors.

        The others get the same without its tensors, so rank 0 writes checkpoints.
        """
        mine: dict[str, Any] = {}
        for bucket in self.buckets:
            mine |= bucket.state_layouts()
        layouts = self.comm.all_gather_object(mine)
        full = {
            ref.name: bucket.unshard_state(ref, [layout.get(ref.name) for layout in layouts])
            for bucket in self.buckets
            for ref in bucket.refs
        }
        return {name: state for name, state in full.items() if state}

    @torch.no_grad()
    def load_full_state_dict(self, states: States) -> None:
        """Load this rank's part of what `full_state_dict` returned on any number of ranks."""
        for bucket in self.buckets:
            bucket.load_state(states, full=True)

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """Replace the state of `target` by a copy of the state of `source`, a parameter of the same shape."""
        (here, of), (there, to) = self._home(source), self._home(target)
        mine, local = here.local(of), there.local(to)
        if mine is not None and local is not None:
            to.member.state[local] = clone(of.member.state.get(mine, {}), target.device)

    @torch.no_grad()
    def master(self, p: Tensor) -> Tensor:
        """The exact value of a parameter on all ranks, which must all call this."""
        bucket, ref = self._home(p)
        return bucket.master(ref)

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Write a parameter on all ranks so that `master(p)` returns `value` exactly, where its dtype allows."""
        bucket, ref = self._home(p)
        bucket.set_master(ref, value)

    def reset(self) -> None:
        """Drop all state, mantissas included, as if no step had been made."""
        self.state.clear()
        for member in self.optimizers:
            member.reset()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes of state this rank keeps for each parameter, at most. Meta tensors are enough."""
        return state_bytes(self.plan, self.comm.rank)

    def _save(self) -> dict[str, Any]:
        """This rank's part, for the same number of ranks; `full_state_dict` is for any number."""
        other = {key: value for key, value in self.state.items() if not torch.is_tensor(key)}
        parts = {ref.name: dict(state) for bucket in self.buckets for ref, state in bucket.states() if state}
        ranks = {"rank": self.comm.rank, "ranks": self.comm.size}
        return {"state": other | parts, "param_groups": self._groups_by_name(), **ranks}

    def _groups_by_name(self) -> list[Group]:
        name = {ref.param: ref.name for ref in self.refs}
        return [{**group, "params": [name[p] for p in group["params"]]} for group in self.param_groups]

    def _check(self, state_dict: dict[str, Any]) -> tuple[list[Group], States, dict[Any, Any]]:
        """The groups' new values, this rank's states by name, and what belongs to no parameter."""
        groups = self._groups_by_name()
        chosen = match_groups(state_dict, groups, "Interleaved")
        ranks = state_dict.get("ranks"), state_dict.get("rank")
        if ranks != (self.comm.size, self.comm.rank):
            raise ValueError(
                f"This state_dict is of rank {ranks[1]} of {ranks[0]}, this is rank {self.comm.rank} of "
                f"{self.comm.size}. Save full_state_dict() and load it with load_full_state_dict() instead."
            )
        members = [member for member in self.optimizers for _ in member.param_groups]
        pairs = zip(members, chosen, self.param_groups, strict=True)
        fresh = [member._group_from(saved, group) for member, (saved, _), group in pairs]
        mine = [n for group in groups for n in group["params"]]
        theirs = [i for _, ids in chosen for i in ids]
        states = {n: state_dict["state"].get(i, {}) for n, i in zip(mine, theirs, strict=True)}
        states = {n: state for bucket in self.buckets for n, state in bucket.checked_states(states).items()}
        return fresh, states, {k: v for k, v in state_dict["state"].items() if k not in theirs}

    def _load(self, checked: tuple[list[Group], States, dict[Any, Any]]) -> None:
        groups, states, other = checked
        for bucket in self.buckets:
            bucket.load_state(states, full=False)
        for group, fresh in zip(self.param_groups, groups, strict=True):
            group.update(fresh)
        self.state.clear()
        self.state.update(other)

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            "Interleaved cannot be copied or pickled: it has hooks on its model's parameters, and a process group. "
            "Save its state_dict() instead, and build it anew around the copy of the model."
        )


def _member(optimizer: Any) -> Member:
    """The optimizer as buckets call it; ValueError if it is none, or consists of others."""
    name, sharding = type(optimizer).__name__, getattr(optimizer, "sharding", "replicated")
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"Interleaved got a {name}; pass Muon, NorMuon, Adam, or any torch.optim.Optimizer.")
    if sharding is None:
        raise ValueError(
            f"Interleaved cannot shard {name}; pass the optimizers in it, and put Snoo around Interleaved."
        )
    return ForeignMember(optimizer) if sharding == "replicated" else optimizer


def _check_arguments(optimizers: Sequence[Any], average: Any, buckets: int) -> None:
    if not optimizers:
        raise ValueError("Interleaved got no optimizers; pass at least one.")
    number = type(average) is int and average >= 1
    require(number or average in ("mean", "sum"), "average", average, "one of: mean, sum, a whole number from 1 on")
    require(buckets >= 1, "buckets", buckets, "at least 1")


def _refuse_overlaps(model: nn.Module, trained: set[Tensor]) -> None:
    """A parameter that moved would leave others behind that share its memory."""
    spans = []
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if x.layout == torch.strided and x.numel():
            start = x.storage_offset() * x.itemsize
            spans.append((x.untyped_storage()._cdata, start, start + x.nbytes, name, x in trained))
    for (memory, _, end, first, moves), (other, start, _, second, too) in itertools.pairwise(sorted(spans)):
        if memory == other and start < end and (moves or too):
            raise ValueError(
                f"{first} and {second} are two tensors in the same memory, which would be separated; make them one: "
                "assign the same nn.Parameter to both modules."
            )
