"""What the optimizers of this package share: checked input, exact bfloat16 weights, state matched by name.

An optimizer here is a `torch.optim.Optimizer`. It gives each parameter a float32 *master*: the parameter itself, or
the bfloat16 parameter joined with its remainder, or a float32 copy of a half-precision parameter. A step changes
masters; `_write` puts them back.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from speedrun.optim.exact_bf16 import checksum, join, split
from speedrun.optim.sharded import is_sharded, largest, local_of, meshes_of, placed_as, refuse_state

Group = dict[str, Any]
States = dict[str, dict[str, Any]]
"""What optimizers know of each parameter, by its name: the form in which checkpoints store it."""
Loss = TypeVar("Loss")


@dataclass
class Work:
    """One parameter that has a gradient, with everything a step needs to know of it."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: Group
    index: int  # within its group, for values given per parameter
    name: str
    sharded: Any = None  # the DTensor of which `param` is this rank's part

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.param.shape if self.sharded is None else self.sharded.shape

    def of(self, key: str) -> Any:
        """A group's value, or the parameter's own when the group lists one for each parameter."""
        return value_at(self.group[key], self.index)


def value_at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value


class NonFiniteGradient(ValueError):
    """A gradient is NaN or infinite. No weight and no state has changed."""


class OneProcess:
    """What a trainer asks of an optimizer, where no other process has a part of the work."""

    state: Any
    param_groups: list[Group]

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for all backward passes of a step but the last one."""
        return nullcontext()

    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        """The sums of `numbers` over all ranks."""
        return list(numbers)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this norm over all parameters, and return the norm they had."""
        params = [p for group in self.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(params, max_norm, foreach=True)

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """Give `target` a copy of the state of `source`, which has the same shape."""
        self.state[target] = copied(self.state.get(source, {}), target.device)


class SpeedrunOptimizer(OneProcess, Optimizer):
    """The common part; not an optimizer by itself."""

    per_parameter: tuple[str, ...] = ("lr_mul", "wd_mul")  # group values that may be a list, one value per parameter

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        if not isinstance(params, Tensor):
            params = cast(ParamsT, list(params))
        if isinstance(params, list) and not params:
            raise ValueError(
                f"{type(self).__name__} got an empty parameter list; pass model.named_parameters(), or what "
                "speedrun.optim.route(model) chose for it."
            )
        self._versions: dict[Tensor, int] = {}  # of a weight when its remainder was last known to belong to it
        self._unproven: dict[Tensor, int] = {}  # checksum of the weight to which a loaded remainder belongs
        self._flag: tuple[Tensor, Any] | None = None  # on a GPU: whether the gradients of the last step were finite
        self._answer: float | Tensor | None = None  # of a check that `Combined` has made already for this step
        self._placed: dict[Any, Tensor] = {}  # gradients that ranks have exchanged already for this step
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
        for name, p in named(group, len(self.param_groups) - 1):
            if p.is_complex():
                raise ValueError(
                    f"{type(self).__name__} cannot train {name}: it is complex ({p.dtype}); "
                    "give it as two real tensors, or to another optimizer."
                )
            if is_sharded(p) and self._is_exact(p, group):
                raise ValueError(
                    f"{name} is a bfloat16 DTensor, which has no room for exact_bf16: keep it in float32 and let FSDP "
                    "compute in bfloat16 (MixedPrecisionPolicy), or pass exact_bf16=False."
                )
            if not p.is_floating_point():
                raise ValueError(f"{type(self).__name__} cannot train {name}: its dtype is {p.dtype}.")
        for key in self.per_parameter:
            value = group[key]
            if isinstance(value, list) and len(value) != len(group["params"]):
                raise ValueError(
                    f"{key} lists {len(value)} values for {len(group['params'])} parameters; "
                    "give one value for all, or one for each parameter."
                )
        for key in ("lr", "weight_decay", "lr_mul", "wd_mul"):
            for value in group[key] if isinstance(group[key], list) else [group[key]]:
                if not 0 <= float(value) < math.inf:
                    raise ValueError(f"{key} is {value}; it must be finite and not negative.")

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch.compiler.disable  # its matrix products gain nothing, and a changed learning rate would recompile it
    @torch.no_grad()
    def _step(self) -> None:
        try:
            work = list(self._work())
            finite = self.check_gradients(work) if self._answer is None else self._answer
        finally:
            self._end_check()
        self._update(work, finite)

    def _end_check(self) -> None:
        """What a check has found holds for one step alone."""
        self._answer = None
        self._placed.clear()

    def _update(self, work: list[Work], finite: float | Tensor) -> None:
        """Change states and weights. `finite` is 1, or on a GPU a tensor: 0 there must leave everything as it was."""
        raise NotImplementedError

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
                whole = p if is_sharded(p) else None
                part, grad = local_of(p), self._grad_of(p)
                if grad.shape != part.shape or (whole is None and is_sharded(p.grad)):
                    raise ValueError(
                        f"The gradient of {name} is not cut as the parameter is: one of them is no DTensor, or they "
                        "are on different meshes. Let backward() make the gradient, or make both DTensors of one mesh."
                    )
                yield Work(part, grad, self.state[p], group, index, name, whole)

    def _grad_of(self, p: Any) -> Tensor:
        """The gradient of this rank's part of `p`, exchanged between ranks if it lies otherwise than `p`."""
        if not (is_sharded(p) and is_sharded(p.grad)) or p.grad.placements == p.placements:
            return local_of(p.grad)
        # The check of `Combined` comes before a member's hooks, which may change the gradient: its versions tell.
        key = p.grad, p.grad._version, local_of(p.grad)._version
        if key not in self._placed:
            self._placed[key] = placed_as(p.grad, p)
        return self._placed[key]

    def check_gradients(self, work: list[Work] | None = None) -> float | Tensor:
        """Refuse gradients that are not finite, before anything has changed; see `check_together`."""
        return check_together([self], work)

    def _ask_later(self, finite: Tensor) -> None:
        """Let the answer travel to the CPU while the GPU works on; the next step reads it."""
        if finite.device.type != "cuda":
            self._flag = (finite, None)
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flag = (answer, event)

    def _raise_last(self) -> None:
        if self._flag is None:
            return
        answer, event = self._flag
        self._flag = None
        if event is not None:
            event.synchronize()
        if not answer.item():
            raise NonFiniteGradient(
                "A gradient of the previous step was not finite (NaN or infinite); that step changed no weight. "
                "Skip such steps, lower the learning rate, or clip the gradients."
            )

    # --------------------------------------------------------------- masters

    def _is_exact(self, p: Tensor, group: Group) -> bool:
        return p.dtype == torch.bfloat16 and bool(group["exact_bf16"])

    def _read(self, w: Work) -> Tensor:
        """The float32 (or float64) master of a parameter; for a float32 parameter the parameter itself."""
        if self._is_exact(w.param, w.group):
            self._prove(w.param, w.name)
            if "remainder" not in w.state:
                w.state["remainder"] = torch.zeros_like(w.param, dtype=torch.int16)
            return join(w.param, w.state["remainder"])
        return w.param if w.param.itemsize >= 4 else w.param.float()

    def _write(self, w: Work, master: Tensor) -> None:
        if self._is_exact(w.param, w.group):
            high, low = split(master)
            w.param.copy_(high)
            w.state["remainder"].copy_(low)
            self._versions[w.param] = w.param._version
        elif master is not w.param:
            w.param.copy_(master)

    def _prove(self, p: Tensor, name: str) -> None:
        """Make sure that the remainder of `p`, if there is one, belongs to its present value."""
        remainder = self.state[p].get("remainder") if p in self.state else None
        if remainder is None:
            return
        expected = self._unproven.get(p)
        if expected is not None:
            if checksum(p) != expected:
                raise ValueError(
                    f"The weight {name} is not the one that the loaded optimizer state belongs to: the remainders of "
                    "its bfloat16 values do not fit. Load the model and the optimizer from the same checkpoint, or "
                    "drop the state with reset()."
                )
            del self._unproven[p]
        elif self._versions.get(p) != p._version:  # somebody else wrote the weight: its own value counts now
            remainder.zero_()
        self._versions[p] = p._version

    def vouch(self, p: Tensor) -> None:
        """The remainder of `p` belongs to its present value, whoever wrote that."""
        self._versions[p] = p._version
        self._unproven.pop(p, None)

    @torch.no_grad()
    def master(self, p: Tensor) -> Tensor:
        """The exact value of a parameter, as a new tensor: float32 for an exact bfloat16 weight."""
        name, group = self._home(p)
        if self._is_exact(p, group) and "remainder" in self.state.get(p, {}):
            self._prove(p, name)
            return join(p, self.state[p]["remainder"])
        return p.detach().clone() if p.itemsize >= 4 else p.detach().float()

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Write a parameter so that `master(p)` gives back `value` exactly, where its dtype allows."""
        _, group = self._home(p)
        if self._is_exact(p, group):
            high, low = split(value.to(torch.float32))
            p.copy_(high)
            self.state[p]["remainder"] = low
            self.vouch(p)
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
        """Forget everything learned about the gradients, remainders included, as if no step had been made."""
        self.state.clear()
        self._versions.clear()
        self._unproven.clear()
        self._flag = None

    def full_state_dict(self) -> States:
        """The state of each parameter that has one, by name; see `by_name`."""
        return by_name(self.param_groups, self.state)

    def load_full_state_dict(self, states: States) -> None:
        """Take a state as `full_state_dict` gives it; the weights must be those it belongs to."""
        put_back(self.param_groups, self.state, states)
        self._vouch_for_all()

    def _vouch_for_all(self) -> None:
        for _, p, _ in self._named():
            self.vouch(p)

    def _checksums(self) -> dict[Tensor, int]:
        """For each exact weight the checksum that its remainder belongs to, after dropping stale remainders."""
        sums = {}
        for name, p, group in self._named():
            if self._is_exact(p, group) and "remainder" in self.state.get(p, {}):
                if p not in self._unproven:
                    self._prove(p, name)
                sums[p] = self._unproven.get(p, checksum(p))
        return sums

    def _refuse_sharded(self, name: str, p: Tensor) -> None:
        if is_sharded(p):
            kept = f"{type(self).__name__} keeps plain tensors for this rank's part"
            raise refuse_state(name, f"{kept}, of which a checkpoint gives one rank's to all")

    def state_dict(self) -> dict[str, Any]:
        """Torch's layout. The state of an exact bfloat16 weight says in `checksum` which bits it belongs to.

        ValueError if a DTensor has state, which is a plain tensor here. torch.distributed.checkpoint takes plain
        tensors to be the same on all ranks: it writes one rank's and gives it to all.
        """
        for name, p, _ in self._named():
            if self.state.get(p):
                self._refuse_sharded(name, p)
        sums = self._checksums()
        for p, value in sums.items():
            self.state[p]["checksum"] = value
        try:
            return super().state_dict()
        finally:
            for p in sums:
                self.state[p] = {k: v for k, v in self.state[p].items() if k != "checksum"}

    @torch.compiler.disable
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's, but matched by name when both sides have names, and with every dtype kept as it was saved."""
        state_dict = self._aligned(state_dict)
        super().load_state_dict(state_dict)
        self._versions.clear()
        self._unproven.clear()
        self._flag = None
        position = 0
        for group in self.param_groups:
            for p in group["params"]:
                saved = state_dict["state"].get(position)
                position += 1
                if saved is None:
                    continue
                self.state[p] = copied(saved, p.device)
                self.state[p].pop("checksum", None)
                if "remainder" in saved:
                    self._unproven[p] = saved["checksum"]

    def _aligned(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same state in the order of our groups, numbered from 0; ValueError when it is not ours."""
        groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
        if not isinstance(groups, list) or not isinstance(state_dict.get("state"), dict):
            raise ValueError("This is not an optimizer's state_dict: it needs `state` and `param_groups`.")
        mine = [list(named(group, number)) for number, group in enumerate(self.param_groups)]
        by_name = all("param_names" in g for g in [*groups, *self.param_groups])
        chosen = (
            self._match(groups, mine)
            if by_name
            else list(zip(groups, [list(g["params"]) for g in groups], strict=True))
        )
        if len(chosen) != len(mine) or any(len(ids) != len(own) for (_, ids), own in zip(chosen, mine, strict=True)):
            raise ValueError(
                f"The state_dict has groups of {[len(g['params']) for g in groups]} parameters, this "
                f"{type(self).__name__} has {[len(own) for own in mine]}. Build it for the same model, in the same "
                "order, or from named parameters, which are matched by name."
            )
        state: dict[int, Any] = {}
        new_groups, position = [], 0
        for (saved_group, ids), own, group in zip(chosen, mine, self.param_groups, strict=True):
            missing = sorted(set(group) - {"params", "param_names"} - set(saved_group))
            if missing:
                raise ValueError(
                    f"This state_dict was not made by {type(self).__name__}: its group lacks {', '.join(missing)}."
                )
            fresh = {**saved_group, "params": list(range(position, position + len(own)))}
            if by_name:
                order = [saved_group["params"].index(i) for i in ids]
                fresh["param_names"] = [saved_group["param_names"][i] for i in order]
                for key in self.per_parameter:
                    if isinstance(saved_group[key], list):
                        fresh[key] = [saved_group[key][i] for i in order]
            new_groups.append(fresh)
            for (name, p), i in zip(own, ids, strict=True):
                if i in state_dict["state"]:
                    if state_dict["state"][i]:
                        self._refuse_sharded(name, p)
                    state[position] = state_dict["state"][i]
                    self._check_state(name, p, group, state[position])
                position += 1
        return {**state_dict, "state": state, "param_groups": new_groups}

    def _match(self, groups: list[Group], mine: list[list[tuple[str, Tensor]]]) -> list[tuple[Group, list[int]]]:
        """For each of our groups the saved group with the same names, and its ids in our order."""
        left = list(groups)
        chosen = []
        for own in mine:
            names = [name for name, _ in own]
            for saved in left:
                ids = dict(zip(saved["param_names"], saved["params"], strict=True))
                if set(ids) == set(names):
                    chosen.append((saved, [ids[name] for name in names]))
                    left = [g for g in left if g is not saved]
                    break
            else:
                saved_names = {name for g in groups for name in g["param_names"]}
                unknown = [name for name in names if name not in saved_names]
                what = f"it lacks {unknown[0]}" if unknown else f"it groups {names[0]} with other parameters"
                raise ValueError(
                    f"The state_dict does not fit this {type(self).__name__}: {what}. Build the optimizer with the "
                    "same parameters in the same groups; their order does not matter."
                )
        return chosen

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        """Every key that the state of `p` may have, with the shape it must have (None: any)."""
        raise NotImplementedError

    def _state_layout(self, p: Tensor, group: Group) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor in the state of `p` when it is fullest, with the group's settings."""
        raise NotImplementedError

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes the state of each parameter takes when it is fullest. Allocates nothing: meta tensors will do.

        Fullest is between two of Adam's turns, when gradients wait for the next one.
        """
        sizes = {}
        for _, p, group in self._named():
            layout = self._state_layout(p, group)
            if self._is_exact(p, group):
                layout["remainder"] = tuple(p.shape), torch.int16
            sizes[p] = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        return sizes

    def _check_state(self, name: str, p: Tensor, group: Group, state: dict[str, Any]) -> None:
        shapes = {**self._state_shapes(p, group), "remainder": tuple(p.shape), "checksum": None}
        for key, value in state.items():
            if key not in shapes:
                raise ValueError(
                    f"This state_dict is of another optimizer: {type(self).__name__} knows no {key!r} (in {name})."
                )
            shape = shapes[key]
            if shape is not None and torch.is_tensor(value) and tuple(value.shape) != shape:
                raise ValueError(
                    f"The state {key!r} of {name} has shape {tuple(value.shape)}, but this model's needs {shape}."
                )
        if ("remainder" in state) != ("checksum" in state):
            raise ValueError(f"The state of {name} has a remainder without a checksum, or the reverse; it was altered.")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: parameters are copied with us, so remainders have to be proven again there."""
        return {**super().__getstate__(), "_sums": self._checksums()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sums = state.pop("_sums", {})
        super().__setstate__(state)
        self._versions, self._unproven, self._flag, self._answer, self._placed = {}, dict(sums), None, None, {}


def named(group: Group, number: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters with names to show: their own, or where they stand."""
    names: Sequence[str] | None = group.get("param_names")
    for index, p in enumerate(group["params"]):
        yield (names[index] if names else f"parameter {index} of group {number} {tuple(p.shape)}"), p


def by_name(groups: list[Group], states: Mapping[Tensor, Any]) -> States:
    """The state of each parameter that has one, by the parameter's name, in whatever group it is."""
    return {
        name: dict(states[p])
        for number, group in enumerate(groups)
        for name, p in named(group, number)
        if states.get(p)
    }


def put_back(groups: list[Group], states: MutableMapping[Tensor, Any], saved: States) -> None:
    """Make a copy of what `by_name` gave the state of the parameters; the order of groups does not matter."""
    for number, group in enumerate(groups):
        for name, p in named(group, number):
            states.pop(p, None)
            if saved.get(name):
                states[p] = copied(saved[name], p.device)


def copied(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A state with tensors of its own. Steps are counted on the CPU, the rest is where the parameter is."""
    return {
        key: value.to("cpu" if key == "step" else device, copy=True) if torch.is_tensor(value) else value
        for key, value in state.items()
    }


@torch.no_grad()
def check_together(optimizers: Sequence[SpeedrunOptimizer], work: list[Work] | None = None) -> float | Tensor:
    """Refuse gradients that are not finite, before any of `optimizers` has changed anything.

    On a CPU the error comes at once and names the parameter. Reading a GPU's answer would make it wait, so there the
    update is multiplied by the answer (0 leaves everything as it was) and the error comes with the next step.

    Ranks talk about it only if there are DTensors, and only to the ranks of the DTensors' meshes: a model that other
    ranks train, or the next stage of a pipeline, may step at another time.
    """
    for optimizer in optimizers:
        optimizer._raise_last()
    work = [w for optimizer in optimizers for w in optimizer._work()] if work is None else work
    # Of all parameters, not only of those in `work`: a rank without gradients must answer, too.
    meshes = meshes_of(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    rank = torch.distributed.get_rank() if meshes else 0
    if answers_at_once(work):
        bad = next((w.name for w in work if not all_finite(w.grad)), None)
        where = int(largest(torch.tensor(rank + 1 if bad else 0, dtype=torch.int32), meshes))  # 0: nowhere
        if bad or where:
            raise NonFiniteGradient(
                (f"The gradient of {bad} is" if bad else f"A gradient on rank {where - 1}, whose error names it, is")
                + " not finite (NaN or infinite); no weight was changed. "
                "Skip this step, lower the learning rate, or clip the gradients."
            )
        return 1.0
    finite = torch.stack([w.grad.sum().isfinite() for w in work]).all()
    if meshes:
        finite = largest(finite.logical_not().int(), meshes) == 0
    optimizers[0]._ask_later(finite)
    return finite.float()


def answers_at_once(work: list[Work]) -> bool:
    """Whether asking for a value makes nobody wait: on a CPU."""
    return not work or work[0].param.device.type == "cpu"


def all_finite(g: Tensor) -> bool:
    """A sum is one quick pass; only when it is not finite (it may also overflow) is every value looked at."""
    total = g.sum(dtype=torch.float32 if g.itemsize < 4 else None).item()
    return math.isfinite(total) or bool(g.isfinite().all())


def require(condition: bool, key: str, value: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}; it must be {what}.")
