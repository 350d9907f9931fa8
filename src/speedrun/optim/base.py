"""What the optimizers of this package share: checked input, exact bfloat16 weights, state matched by name.

An optimizer here is a `torch.optim.Optimizer`. It gives each parameter a float32 *master*: the parameter itself, or
the bfloat16 parameter joined with its mantissa, or a float32 copy of a half-precision parameter. A step changes
masters; `_write` puts them back.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from speedrun.optim.arguments import refuse_torch_options, require_number
from speedrun.optim.dtensor import (
    LocalState,
    as_dtensor,
    device_meshes,
    is_sharded,
    load_tensor,
    local_of,
    max_over,
    redistribute,
    versions,
)
from speedrun.optim.exact_bf16 import checksum, join, split
from speedrun.optim.finite import DeferredFiniteCheck, NonFiniteGradient, all_finite, is_synchronous, raise_deferred
from speedrun.optim.protocol import Sharding, SingleProcess, StateDictMethods
from speedrun.optim.state import Group, Loss, as_tuples, call_closure, match_groups, named, pack, untraced, unwrapped
from speedrun.optim.work import Work


class SpeedrunOptimizer(DeferredFiniteCheck, SingleProcess, StateDictMethods, Optimizer):
    """The common part; not an optimizer by itself."""

    per_parameter: tuple[str, ...] = ("lr_mul", "wd_mul")  # group values that may be a list, one value per parameter
    own_keys: tuple[str, ...] = ()  # group values by which its state_dict is known; others may have come with a version
    required: tuple[str, ...] = ()  # of every state
    replicated_state: tuple[str, ...] = ()  # of a DTensor: the same on all ranks, not cut as the parameter is
    sharding: Sharding = "rows"

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        if not isinstance(params, Tensor):
            params = cast(ParamsT, list(params))
        if isinstance(params, list) and not params:
            raise ValueError(
                f"{type(self).__name__} got an empty parameter list; pass model.named_parameters(), or what "
                "speedrun.optim.route(model) chose for it."
            )
        self._versions: dict[Tensor, Any] = {}  # of a weight when its mantissa was last known to belong to it
        self._unchecked: dict[Tensor, int] = {}  # checksum of the weight to which a loaded mantissa belongs
        self.checked: float | Tensor | None = None  # result of a check that `Combined` has made for this step
        self._counted: list[tuple[Any, int]] = []  # what masked steps have counted, and what it was before
        self._redistributed: dict[Any, Tensor] = {}  # gradients that ranks have exchanged already for this step
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: Group) -> None:
        """As in torch; a group that does not pass the checks leaves the optimizer as it was."""
        known = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ValueError:
            del self.param_groups[known:]
            raise

    def _check_group(self, group: Group) -> None:
        refuse_torch_options(self, group)
        for name, p in named(group, len(self.param_groups) - 1):
            if not p.is_floating_point():
                way_out = "give it as two real tensors" if p.is_complex() else "convert it to a floating-point dtype"
                raise ValueError(
                    f"{type(self).__name__} cannot train {name}: its dtype is {p.dtype}; leave it out, or {way_out}."
                )
        for key in self.per_parameter:
            value = group[key]
            if isinstance(value, list) and len(value) != len(group["params"]):
                raise ValueError(
                    f"{key} lists {len(value)} values for {len(group['params'])} parameters; "
                    "give one value for all, or one for each parameter."
                )
        for key in ("lr", "weight_decay", "lr_mul", "wd_mul"):
            for value in group[key] if isinstance(group[key], list) else [group[key]]:
                require_number(key, value)

    # ------------------------------------------------------------------ step

    @untraced  # its matrix products gain nothing, and a changed learning rate would recompile it
    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """One update of every parameter that has a gradient. Gradients are left as they are."""
        loss = call_closure(closure)
        try:
            work = list(self._work())
            finite = check_gradients([self], work) if self.checked is None else self.checked
        finally:
            self.end_check()
        self._update(work, finite)
        return loss

    def end_check(self) -> None:
        """The result of a check holds for one step."""
        self.checked = None
        self._redistributed.clear()

    def _update(self, work: list[Work], finite: float | Tensor) -> None:
        """Change states and weights. `finite` is 1, or on a GPU a tensor: 0 there must leave everything as it was."""
        raise NotImplementedError

    def is_due(self, state: dict[str, Any], group: Group) -> bool:
        """Whether the next step on a gradient changes the weight with this state."""
        return True

    def _work(self) -> Iterator[Work]:
        for number, group in enumerate(self.param_groups):
            for index, (name, p) in enumerate(named(group, number)):
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(
                        f"The gradient of {name} is sparse, which {type(self).__name__} does not support; "
                        "create the embedding with sparse=False."
                    )
                whole: Any = p if is_sharded(p) else None
                part = local_of(p)
                held: Any = p.grad
                elsewhere = is_sharded(held) and (whole is None or held.device_mesh != whole.device_mesh)
                if elsewhere or (grad := self._grad_of(p)).shape != part.shape:
                    raise ValueError(
                        f"The gradient of {name} is not cut as the parameter is: one of them is no DTensor, or they "
                        "are on different meshes. Let backward() make the gradient, or make both DTensors of one mesh."
                    )
                state = self.state[p]
                if whole is not None:
                    state = LocalState(state, whole, self.replicated_state)
                yield Work(part, grad, state, group, index, name, whole)

    def _grad_of(self, p: Any) -> Tensor:
        """The gradient of this rank's part of `p`, exchanged between ranks if it lies otherwise than `p`."""
        if not (is_sharded(p) and is_sharded(p.grad)) or p.grad.placements == p.placements:
            return local_of(p.grad)
        # `Combined` checks before a member's hooks run, which may change the gradient; its version shows that.
        key = p.grad, p.grad._version, local_of(p.grad)._version
        if key not in self._redistributed:
            self._redistributed[key] = redistribute(p.grad, p)
        return self._redistributed[key]

    # --------------------------------------------------------------- masters

    def is_exact(self, p: Tensor, group: Group) -> bool:
        """Whether a mantissa is kept for `p`."""
        return p.dtype == torch.bfloat16 and bool(group["exact_bf16"])

    def _read(self, w: Work) -> Tensor:
        """The float32 (or float64) master of a parameter; for a float32 parameter the parameter itself."""
        if self.is_exact(w.param, w.group):
            self._check_mantissa(w.home, w.name)
            self._add_mantissa(w)
            return join(w.param, w.state["mantissa"])
        return w.param if w.param.itemsize >= 4 else w.param.float()

    def _add_mantissa(self, w: Work) -> None:
        if self.is_exact(w.param, w.group) and "mantissa" not in w.state:
            w.state["mantissa"] = torch.zeros_like(w.param, dtype=torch.int16)
            w.state["checksum"] = None  # known when saved: torch.distributed.checkpoint flattens keys that are here

    def _write(self, w: Work, master: Tensor) -> None:
        if self.is_exact(w.param, w.group):
            high, low = split(master)
            w.param.copy_(high)
            w.state["mantissa"].copy_(low)
            self._versions[w.home] = versions(w.home)
        elif master is not w.param:
            w.param.copy_(master)

    def _check_mantissa(self, p: Tensor, name: str) -> None:
        """Make sure that the mantissa of `p`, if there is one, belongs to its present value."""
        mantissa = self.state[p].get("mantissa") if p in self.state else None
        if mantissa is None:
            return
        expected = self._unchecked.get(p)
        if expected is not None:
            if checksum(p) != expected:
                raise ValueError(
                    f"The weight {name} is not the one that the loaded optimizer state belongs to: the mantissas of "
                    "its bfloat16 values do not fit. Load the model and the optimizer from the same checkpoint, or "
                    "drop the state with reset()."
                )
            del self._unchecked[p]
        elif self._versions.get(p) != versions(p):  # the weight was written outside of the optimizer, which counts
            mantissa.zero_()
        self._versions[p] = versions(p)

    def rebase_mantissa(self, p: Tensor) -> None:
        """Declare that the mantissa of `p` belongs to its present value, whatever wrote it."""
        self._versions[p] = versions(p)
        self._unchecked.pop(p, None)

    @torch.no_grad()
    def master(self, p: Tensor) -> Tensor:
        """The exact value of a parameter, as a new tensor: float32 for an exact bfloat16 weight."""
        name, group = self._home(p)
        if self.is_exact(p, group) and "mantissa" in self.state.get(p, {}):
            self._check_mantissa(p, name)
            return as_dtensor(join(local_of(p), self.state[p]["mantissa"]), p)
        return p.detach().clone() if p.itemsize >= 4 else p.detach().float()

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Write a parameter so that `master(p)` gives back `value` exactly, where its dtype allows."""
        _, group = self._home(p)
        if self.is_exact(p, group):
            high, low = split(local_of(value).to(torch.float32))
            local_of(p).copy_(high)
            self.state[p] |= {"mantissa": low, "checksum": None}
            self.rebase_mantissa(p)
        else:
            p.copy_(value)

    def _home(self, p: Tensor) -> tuple[str, Group]:
        """The name of a parameter, and its group."""
        for name, q, group in self._named():
            if q is p:
                return name, group
        raise ValueError(f"{type(self).__name__} does not train this parameter of shape {tuple(p.shape)}.")

    def _named(self) -> Iterator[tuple[str, Tensor, Group]]:
        for number, group in enumerate(self.param_groups):
            for name, p in named(group, number):
                yield name, p, group

    # ----------------------------------------------------------------- state

    def reset(self) -> None:
        """Forget everything learned about the gradients, mantissas included, as if no step had been made."""
        self.state.clear()
        self._versions.clear()
        self._unchecked.clear()
        self._flag = None

    def rebase_mantissas(self) -> None:
        """Declare that the mantissas of all parameters belong to their present values."""
        for _, p, _ in self._named():
            self.rebase_mantissa(p)

    def _checksums(self) -> dict[Tensor, int]:
        """For each exact weight the checksum that its mantissa belongs to, after dropping stale mantissas."""
        sums = {}
        for name, p, group in self._named():
            if self.is_exact(p, group) and "mantissa" in self.state.get(p, {}):
                if p not in self._unchecked:
                    self._check_mantissa(p, name)
                sums[p] = self._unchecked.get(p, checksum(p))
        return sums

    def _save(self) -> dict[str, Any]:
        """Torch's layout. The state of an exact bfloat16 weight says in `checksum` which bits it belongs to.

        This rank's part of the state of a DTensor leaves as a DTensor that shares its memory.
        """
        sums = self._checksums()
        states = {}
        for p, state in self.state.items():
            if not torch.is_tensor(p):
                states[p] = state
            elif state:
                kept = {key: value for key, value in state.items() if key not in ("mantissa", "checksum")}
                if p in sums:  # as bfloat16, since neither gloo nor NCCL sends 16-bit integers
                    kept |= {"mantissa": state["mantissa"].view(torch.bfloat16), "checksum": sums[p]}
                states[p] = {
                    k: value if k in self.replicated_state else as_dtensor(value, p) for k, value in kept.items()
                }
        return pack(self.param_groups, states)

    def _check(self, state_dict: dict[str, Any]) -> tuple[list[Group], dict[Any, Any]]:
        """The groups' new values, and the new states. Matched by name when both sides have names."""
        groups: list[Group] = []
        states: dict[Any, Any] = {}
        known = set()
        chosen = match_groups(state_dict, self.param_groups, type(self).__name__)
        for number, ((saved, ids), group) in enumerate(zip(chosen, self.param_groups, strict=True)):
            groups.append(self._group_from(saved, group))
            known.update(ids)
            for (name, p), i in zip(named(group, number), ids, strict=True):
                # torch.distributed.checkpoint unflattens {} where nothing was saved under a key that we have.
                state = {k: v for k, v in state_dict["state"].get(i, {}).items() if not isinstance(v, dict) or v}
                if state:
                    states[p] = self._state_from(state, name, p, {**group, **groups[-1]})
        return groups, states | {k: copy.deepcopy(v) for k, v in state_dict["state"].items() if k not in known}

    def _load(self, checked: tuple[list[Group], dict[Any, Any]]) -> None:
        groups, states = checked
        self.reset()
        for group, fresh in zip(self.param_groups, groups, strict=True):
            group.update(fresh)
        for key, state in states.items():
            if torch.is_tensor(key) and "checksum" in state:
                self._unchecked[key] = state["checksum"]
            if is_sharded(key):
                LocalState(self.state[key], key, self.replicated_state).update(state)
            else:
                self.state[key] = state

    def _group_from(self, saved: Group, group: Group) -> Group:
        """The values of a saved group for ours, which keeps those that the saved one does not have."""
        foreign = [key for key in self.own_keys if key not in saved]
        if foreign:
            raise ValueError(f"This state_dict was not made by {type(self).__name__}: its group lacks {foreign[0]}.")
        fresh = {key: copy.deepcopy(value) for key, value in saved.items() if key != "params"}
        theirs, mine = (list(map(unwrapped, g.get("param_names") or [])) for g in (saved, group))
        for key, value in fresh.items():
            if isinstance(value, list) and key in self.per_parameter and len(value) == len(mine) == len(theirs):
                value = [value[theirs.index(name)] for name in mine] if set(mine) == set(theirs) else value
            fresh[key] = as_tuples(group.get(key), value)
        if mine or len(theirs) != len(group["params"]):
            fresh.pop("param_names", None)
        self._check_group({**group, **fresh, "lr": 0.0})  # a schedule may end a rounding error below 0
        return fresh

    def _state_from(
        self, saved: dict[str, Any], name: str, p: Tensor, group: Group, *, rebased: bool = False
    ) -> dict[str, Any]:
        """A copy of the saved state of `p`, as it is kept here; ValueError if it is no state of `p`.

        `rebased`: the mantissa belongs to the present value, and no checksum says to which.
        """
        who, shapes = type(self).__name__, {**self._state_shapes(p, group), "mantissa": tuple(local_of(p).shape)}
        for key in saved:
            if key not in shapes and key != "checksum":
                raise ValueError(f"This state_dict is of another optimizer: {who} knows no {key!r} (in {name}).")
        for key in self.required:
            if key not in saved:
                raise ValueError(f"This state_dict is of another optimizer: {who} needs {key!r}, and {name} has none.")
        exact = self.is_exact(p, group)
        if exact and not rebased and ("mantissa" in saved) != (saved.get("checksum") is not None):
            raise ValueError(f"The state of {name} has a mantissa without a checksum, or the reverse; it was altered.")
        kept = {key: value for key, value in saved.items() if exact or key not in ("mantissa", "checksum")}
        return {
            key: value if shapes.get(key) is None else self._value_from(value, key, name, p, shapes[key] or ())
            for key, value in kept.items()
        }

    def _value_from(self, value: Any, key: str, name: str, p: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the saved state of `p`, of which this rank's part has the shape `shape`."""
        what, whole = f"The state {key!r} of {name}", key in self.replicated_state
        if key == "step":  # some save a number; counted on the CPU
            return load_tensor(torch.as_tensor(value, dtype=torch.float32), p, what, shape, torch.float32, whole).cpu()
        if key == "mantissa":
            value = value.view(torch.bfloat16) if value.dtype == torch.int16 else value
            return load_tensor(value, p, what, shape, torch.bfloat16, whole).view(torch.int16)
        return load_tensor(value, p, what, shape, torch.promote_types(p.dtype, torch.float32), whole)

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        """Every key that the state of `p` may have, with the shape it must have (None: not a tensor)."""
        raise NotImplementedError

    def _unused_keys(self, group: Group) -> set[str]:
        """Keys of `_state_shapes` that no parameter has with the group's settings."""
        raise NotImplementedError

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes the state of each parameter takes when it is fullest.

        Allocates nothing; meta tensors are enough. Fullest is between two steps of Adam, when gradients wait for the
        next one.
        """
        sizes = {}
        for _, p, group in self._named():
            unused, wide = self._unused_keys(group), max(4, p.itemsize)
            shapes = self._state_shapes(p, group).items()
            kept = {key: math.prod(shape) for key, shape in shapes if shape is not None and key not in unused}
            sizes[p] = sum(numel * (4 if key == "step" else wide) for key, numel in kept.items())
            sizes[p] += 2 * local_of(p).numel() * self.is_exact(p, group)
        return sizes

    def cost(self, p: Tensor, group: Group, index: int) -> float:
        """What a step of `p` costs beside that of other parameters of this optimizer."""
        return float(p.numel())

    def __getstate__(self) -> dict[str, Any]:
        """For copies: parameters are copied with us, so mantissas have to be checked again there."""
        return {**super().__getstate__(), "_sums": self._checksums()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sums = state.pop("_sums", {})
        super().__setstate__(state)
        self._versions, self._unchecked, self._flag, self.checked = {}, dict(sums), None, None
        self._redistributed, self._counted = {}, []


@untraced
def step_members(self: Any, closure: Callable[[], Loss] | None = None) -> Loss | None:
    """A method: one step of each of `self.optimizers`. Gradients of all are checked before the first weight changes."""
    loss = call_closure(closure)
    # Members that have a result are in a `Combined` around this one, which has checked them.
    checking = [member for member in self.members() if member.checked is None]
    try:
        finite = check_gradients(checking)
        for member in checking:
            member.checked = finite
        for optimizer in self.optimizers:
            step_inner(optimizer)  # not `_update`: hooks and schedulers of a member see its step
    finally:
        for member in checking:
            member.end_check()
    return loss


def step_inner(optimizer: Any) -> None:
    """`optimizer.step()` as a part of the step of another optimizer around it.

    Its own hooks are called. Hooks for all optimizers and the profiler see the step of the one around it alone.
    """
    step = type(optimizer).step
    replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if replaced or not hasattr(step, "hooked"):
        optimizer.step()
        return
    optimizer._opt_called = True  # a scheduler looks at it
    args: Any = (optimizer,)
    kwargs: Any = {}
    for before in optimizer._optimizer_step_pre_hooks.values():
        args, kwargs = before(optimizer, args, kwargs) or (args, kwargs)
    step.__wrapped__(*args, **kwargs)  # without what torch puts around every `step`
    optimizer._optimizer_step_code()
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, args, kwargs)


@torch.no_grad()
def check_gradients(optimizers: Sequence[SpeedrunOptimizer], work: list[Work] | None = None) -> float | Tensor:
    """Refuse gradients that are not finite, before any of `optimizers` has changed anything.

    On a CPU the error comes at once and names the parameter. Reading a GPU's answer would make it wait, so there the
    update is multiplied by the answer (0 leaves everything as it was) and the error comes with the next step.

    Ranks talk about it only if there are DTensors, and only to the ranks of the DTensors' meshes: a model that other
    ranks train, or the next stage of a pipeline, may step at another time.
    """
    raise_deferred(optimizers)
    work = [w for optimizer in optimizers for w in optimizer._work()] if work is None else work
    # Of all parameters, not only of those in `work`: a rank without gradients must answer, too.
    meshes = device_meshes(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    rank = torch.distributed.get_rank() if meshes else 0
    if is_synchronous(work):
        bad = next((w.name for w in work if not all_finite(w.grad)), None)
        where = int(max_over(torch.tensor(rank + 1 if bad else 0, dtype=torch.int32), meshes))  # 0: nowhere
        if bad or where:
            raise NonFiniteGradient(
                (f"The gradient of {bad} is" if bad else f"A gradient on rank {where - 1}, whose error names it, is")
                + " not finite (NaN or infinite); no weight was changed. "
                "Skip this step, lower the learning rate, or clip the gradients."
            )
        return 1.0
    finite = torch.stack([w.grad.sum().isfinite() for w in work]).all()
    if meshes:
        finite = max_over(finite.logical_not().int(), meshes) == 0
    optimizers[0]._defer_check(finite)
    return finite.float()
