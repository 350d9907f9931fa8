"""The sharded step: every rank trains its share, and communication overlaps with computation.

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
    finish   wait for them and copy them into the parameters

Their order is a table: see speedrun.optim.sharded.order, or pass your own. Optimizer state exists once over all ranks.
Any number of ranks works, also one that gets no matrix or no row. Without a process group it is one rank.

torch.profiler records a step as ranges: `launch: reduce embed` (a transfer is prepared and launched), `wait: update
embed` (nothing to do until it arrives), `compute: update embed`, `copy: finish embed` (it is copied into place).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.profiler import record_function

from speedrun.optim.base import NonFiniteGradient, SpeedrunOptimizer, all_finite
from speedrun.optim.sharded.bucket import BUCKETS, Bucket
from speedrun.optim.sharded.comm import Comm
from speedrun.optim.sharded.order import ORDERS, Early, Order, early_reductions, order_of
from speedrun.optim.sharded.plan import ParamRef, param_refs, plan_buckets, state_bytes
from speedrun.optim.state import Loss, States, copied, evaluate


class Interleaved(Optimizer):
    """Several of this package's optimizers as one, over all ranks of a process group.

    Arguments:
        model: its parameters are made equal to rank 0's at the start.
        optimizers: Muon, NorMuon and Adam, each with its own parameters. Groups are shared with them, so schedulers
            and your own changes take effect.
        order: `eager`, `interleaved`, `plain`, or a list of (operation, label) of your own; `plan` has the labels.
        early: whose reductions begin during the backward pass: `tables` (and small tensors), or `all`. None takes
            `all` for `eager`, `tables` otherwise.
        average: `mean` divides the summed gradients by the number of ranks, as DDP does; `sum` does not, for losses
            that were divided by the tokens of all ranks; a number divides them by that.
        buckets: how many buckets the matrices of one dtype are divided into.
        replicate_below: tensors with fewer weights are trained by every rank.
        process_group: None takes the default one; without any, this is one rank. GPUs need a backend for small CPU
            tensors beside NCCL: init_process_group("cpu:gloo,cuda:nccl"). A subclass of `Comm` is taken as it is.

    All ranks must step together. A parameter that has a gradient on some ranks only is trained with what they have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[SpeedrunOptimizer],
        *,
        order: str | Order = "eager",
        early: Early | None = None,
        average: Literal["mean", "sum"] | int = "mean",
        buckets: int = 2,
        replicate_below: int = 1024,
        process_group: Any = None,
    ) -> None:
        _check_arguments(optimizers, average, buckets)
        self.optimizers = list(optimizers)
        self.comm = Comm.of(process_group)
        names = {p: name for name, p in model.named_parameters()}
        self.refs = param_refs(self.optimizers, names)
        known = {ref.param for ref in self.refs}
        missing = [name for p, name in names.items() if p.requires_grad and p not in known]
        if missing:
            raise ValueError(f"No optimizer has {missing[0]}; its gradient would never be shared between ranks.")
        super().__init__([{"params": [ref.param for ref in self.refs]}], {})
        self.param_groups = [group for member in self.optimizers for group in member.param_groups]
        self.divisor = average if isinstance(average, int) else self.comm.size if average == "mean" else 1
        self.plan = plan_buckets(self.refs, self.comm.size, buckets, replicate_below)
        self.buckets = [BUCKETS[plan.kind](plan, self.comm, self.divisor) for plan in self.plan]
        self._by_label = {bucket.label: bucket for bucket in self.buckets}
        self.order, self._order_name = order_of(order, self.plan), order
        # Collectives must be launched in the same order on all ranks, whichever gradient happens to be ready first.
        self.early = [self._by_label[label] for label in early_reductions(self.plan, order, early)]
        # Buckets that got no gradient in the last step are launched by `agree`. All ranks know the same of that step.
        self._queue = self.early
        self._expected = {bucket.label: len(bucket.refs) for bucket in self.early}
        self._next_early = 0
        self._ready: dict[str, int] = defaultdict(int)
        self._syncing = True
        self._arrivals: list[str] | None = [] if self.comm.size > 1 else None  # in the first backward pass
        self._agreed: tuple[set[Tensor], float | Tensor] | NonFiniteGradient | None = None
        if self.comm.size > 1:
            for bucket in self.early:
                for ref in bucket.refs:
                    ref.param.register_post_accumulate_grad_hook(self._hook(bucket))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.comm.broadcast(0, tensor.data)

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
            if bucket.launched:
                raise RuntimeError(
                    f"A gradient of {bucket.label} came after its reduction had begun. Wrap all backward passes of a "
                    "step but the last one in `with optimizer.no_sync():`."
                )
            self._ready[bucket.label] += 1
            if self._ready[bucket.label] == len(bucket.refs) and self._arrivals is not None:
                self._arrivals.append(bucket.label)
            while self._next_early < len(self._queue):
                following = self._queue[self._next_early]
                if self._ready[following.label] < self._expected[following.label]:
                    return
                self._launch(following)
                self._next_early += 1

        return arrived

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        if not bucket.launched:
            with record_function(f"launch: reduce {bucket.label}"):
                bucket.reduce()
            bucket.launched = True

    # -------------------------------------------------------------------- step

    @torch.compiler.disable
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """One update of every parameter that has a gradient on any rank. Gradients are left as they are."""
        loss = evaluate(closure)
        try:
            self._step()
        finally:
            self._end_step()
        return loss

    def _end_step(self) -> None:
        """Wait for all collectives of this step and drop its results; also after an error."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.launched = False
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
            bucket = self._by_label[label]
            if op == "reduce":
                self._launch(bucket)
            elif op == "update":
                with record_function(f"wait: update {label}"):
                    bucket.wait()
                with record_function(f"compute: update {label}"):
                    bucket.update(has_gradient, finite)
            elif op == "gather":
                with record_function(f"launch: gather {label}"):
                    bucket.gather()
            else:
                with record_function(f"wait: finish {label}"):
                    bucket.wait()
                with record_function(f"copy: finish {label}"):
                    bucket.finish()

    @torch.no_grad()
    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        """Exchange what all ranks must know before a weight changes: who has which gradients, and that they are finite.

        `step` does it if it has not been done. Call it yourself, after the last backward pass, to learn the sums of
        `numbers` over all ranks from the same message. Your own collectives between the backward pass and `step` must
        come after it, in the same order on all ranks.

        On a CPU, a gradient that is not finite is an error of `step`, before any weight changes. On a GPU the update is
        masked and the error comes with the next step, as in a single process.
        """
        self.optimizers[0]._raise_last()
        count = len(self.refs)
        with record_function("compute: check agreement"):
            message = torch.cat([self._check_gradients(), torch.tensor(numbers, dtype=torch.float64)])
        with record_function("launch: reduce agreement"):
            arriving = self.comm.all_reduce_small(message)
        for bucket in [*self._queue, *(bucket for bucket in self.early if bucket not in self._queue)]:
            self._launch(bucket)
        with record_function("wait: reduce agreement"):
            if arriving is not None:
                arriving.wait()
        there, bad, where, sums = message.split([count, count, self.comm.size, len(numbers)])
        if bad.any():
            name = self.refs[int(bad.argmax())].name
            rank = f" on rank {int(where.argmax())}" if self.comm.size > 1 else ""
            self._agreed = NonFiniteGradient(
                f"The gradient of {name} is not finite (NaN or infinite){rank}; no weight was changed. "
                "Skip this step, lower the learning rate, or clip the gradients."
            )
            return sums.tolist()
        finite = 1.0 if self._on_cpu else self._finite_on_gpu()
        has_gradient = {ref.param for k, ref in enumerate(self.refs) if there[k]}
        if self._arrivals is not None:
            self._learn_order()
        self._expected = {b.label: sum(ref.param in has_gradient for ref in b.refs) for b in self.early}
        self._queue = [bucket for bucket in self.early if self._expected[bucket.label]]
        self._agreed = has_gradient, finite
        return sums.tolist()

    @property
    def _on_cpu(self) -> bool:
        return self.refs[0].param.device.type == "cpu"

    def _check_gradients(self) -> Tensor:
        """1 for each parameter with a gradient; 1 for each with a bad one; 1 at this rank if it has a bad one."""
        there, bad = torch.zeros(2, len(self.refs), dtype=torch.float64)
        where = torch.zeros(self.comm.size, dtype=torch.float64)
        for k, ref in enumerate(self.refs):
            g = ref.param.grad
            there[k] = g is not None
            if g is not None and g.is_sparse:
                raise ValueError(f"The gradient of {ref.name} is sparse; create the embedding with sparse=False.")
            if self._on_cpu and g is not None and not all_finite(g):
                bad[k] = where[self.comm.rank] = 1
        return torch.cat([there, bad, where])

    def _finite_on_gpu(self) -> Tensor:
        """1 if the gradients of all ranks are finite, otherwise 0, without waiting for the GPU."""
        flag = torch.zeros((), dtype=torch.int32, device=self.refs[0].param.device)
        for ref in self.refs:
            if ref.param.grad is not None:
                flag |= ~ref.param.grad.sum().isfinite()
        finite = self.comm.all_reduce_max(flag) == 0
        self.optimizers[0]._ask_later(finite)
        return finite.float()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """What `torch.nn.utils.clip_grad_norm_` does, for the gradients of all ranks. All call it, before `step`.

        It waits for every reduction, so none of them overlaps with computation any more. `.grad` stays as it is: the
        sum that `step` uses is scaled. Returns the norm, which is added up by buckets; `parameters` is not used.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be positive.")
        if self._agreed is None:
            self.agree()
        for bucket in self.buckets:
            self._launch(bucket)
        total = torch.zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            with record_function(f"wait: reduce {bucket.label}"):
                bucket.wait()
            total += bucket.square_sum()
        message = self.comm.all_reduce_small(total)
        if message is not None:
            message.wait()
        norm = total.sqrt() / self.divisor
        scale = max_norm / (float(norm) + 1e-6)
        if scale < 1:
            for bucket in self.buckets:
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
            to.member.state[local] = copied(of.member.state.get(mine, {}), target.device)

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
        """Drop all state, remainders included, as if no step had been made."""
        for member in self.optimizers:
            member.reset()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes of state this rank keeps for each parameter, at most. Meta tensors are enough."""
        return state_bytes(self.plan, self.comm.rank)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for the same number of ranks; `full_state_dict` is for any number."""
        parts = {ref.name: dict(state) for bucket in self.buckets for ref, state in bucket.states() if state}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": parts, "param_groups": groups, "rank": self.comm.rank, "ranks": self.comm.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks = state_dict.get("ranks"), state_dict.get("rank")
        if ranks != (self.comm.size, self.comm.rank):
            raise ValueError(
                f"This state_dict is of rank {ranks[1]} of {ranks[0]}, this is rank {self.comm.rank} of "
                f"{self.comm.size}. Save full_state_dict() and load it with load_full_state_dict() instead."
            )
        for bucket in self.buckets:
            bucket.load_state(state_dict["state"], full=False)
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved_group)


def _check_arguments(optimizers: Sequence[Any], average: Any, buckets: int) -> None:
    if not optimizers:
        raise ValueError("Interleaved got no optimizers; pass at least one.")
    for optimizer in optimizers:
        if not isinstance(optimizer, SpeedrunOptimizer):
            raise ValueError(f"Interleaved cannot shard {type(optimizer).__name__}; pass Muon, NorMuon or Adam.")
    if average not in ("mean", "sum") and not (type(average) is int and average >= 1):
        raise ValueError(f"average is {average!r}; it must be one of: mean, sum, a whole number from 1 on.")
    if buckets < 1:
        raise ValueError(f"buckets is {buckets}; it must be at least 1.")
