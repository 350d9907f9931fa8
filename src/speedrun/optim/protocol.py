"""The methods that a trainer may call on any optimizer here, in one process or in several."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from speedrun.optim.state import Group, States, by_name, clone, load_by_name, match_groups, params_of, require, untraced

Sharding = Literal["owned", "rows", "replicated"]
"""Matrices that must be whole are owned, each by one rank; others may be cut by rows; or every rank trains all."""


@runtime_checkable
class TrainerOptimizer(Protocol):
    """Adam, Muon, NorMuon, Combined, Interleaved and Snoo have all of this.

    In a sharded optimizer, all ranks must call these methods together.
    """

    param_groups: list[Group]
    state: Any

    def step(self, closure: Callable[[], Any] | None = None) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def members(self) -> list[Any]:
        """The optimizers of this package in here that check the gradients of this process."""

    def full_state_dict(self) -> States:
        """The state of each parameter that has one, by name, as one process has it."""

    def load_full_state_dict(self, states: States) -> None:
        """Load what `full_state_dict` returned; the weights must be those that the state belongs to."""

    def master(self, p: Tensor) -> Tensor:
        """The exact value of a parameter, as a new tensor: float32 for an exact bfloat16 weight."""

    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Write a parameter so that `master(p)` returns `value` exactly, where its dtype allows."""

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """Replace the state of `target` by a copy of the state of `source`, a parameter of the same shape."""

    def reset(self) -> None:
        """Drop all state, as if no step had been made."""

    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Scale the gradients that `step` will use to a joint norm of at most `max_norm`; return the norm before.

        `parameters`: all of them, in the order in which one process adds up their norms (to the last bit, the norm
        depends on it); by default the order of the groups.
        """

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes of state this process keeps for each parameter, at most."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this context only accumulate gradients: for all micro-batches but the last."""

    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        """The sums of `numbers` over all ranks. Called, if at all, after the last backward pass of a step."""


class StateDictMethods:
    """`state_dict` and `load_state_dict` with the hooks of `torch.optim.Optimizer`.

    Loading has two parts, so that an optimizer of several refuses a state before the first of them has changed. A
    subclass has `_save`, which returns what `state_dict` does when there are no hooks; `_check`, which returns
    everything that is needed to load a state_dict, or raises ValueError; and `_load`, which loads what that returned.
    """

    sharding: Sharding | None = None
    """How several ranks share its parameters; None: it consists of optimizers, which are shared instead."""

    def state_dict(self) -> dict[str, Any]:
        """In torch's layout; see docs/optimizers.md."""
        own: Any = self
        for before in own._optimizer_state_dict_pre_hooks.values():
            before(self)
        found: dict[str, Any] = own._save()
        for after in own._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what `state_dict` returned; ValueError, and nothing is changed, if it does not fit."""
        self.load_checked(self.check_state_dict(state_dict))

    def check_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """The first part of loading: it changes nothing, and all ranks of a mesh must call it together."""
        own: Any = self
        state_dict = copy.copy(state_dict)
        for before in own._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        with torch.no_grad():
            return own._check(state_dict)

    def load_checked(self, checked: Any) -> None:
        """The second part of loading: make what `check_state_dict` returned the state."""
        own: Any = self
        own._load(checked)
        for after in own._optimizer_load_state_dict_post_hooks.values():
            after(self)


class SingleProcess:
    """The part of `TrainerOptimizer` that is the same for all optimizers of one process."""

    param_groups: list[Group]
    state: Any

    def members(self) -> list[Any]:
        """The optimizers of this package in here that check the gradients of this process."""
        return [self]

    def full_state_dict(self) -> States:
        """The state of each parameter that has one, by name; see `by_name` in speedrun.optim.state."""
        return by_name(self.param_groups, self.state)

    def load_full_state_dict(self, states: States) -> None:
        """Load what `full_state_dict` returned; the weights must be those that the state belongs to."""
        load_by_name(self.param_groups, self.state, states)
        for member in self.members():
            member.rebase_mantissas()

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """Replace the state of `target` by a copy of the state of `source`, a parameter of the same shape."""
        self.state[target] = clone(self.state.get(source, {}), target.device)

    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """See `TrainerOptimizer`: `torch.nn.utils.clip_grad_norm_`."""
        require(max_norm > 0, "max_norm", max_norm, "positive")
        clipped = params_of(self.param_groups) if parameters is None else parameters
        return nn.utils.clip_grad_norm_(clipped, max_norm, foreach=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """There are no other processes to exchange gradients with."""
        return nullcontext()

    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        """The numbers themselves: this is the only process."""
        return list(numbers)


class Foreign(SingleProcess):
    """A `torch.optim.Optimizer` of another package: each parameter is its own master, and gradients are not checked."""

    sharding: Sharding = "replicated"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def members(self) -> list[Any]:
        return []

    def check_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """In our order, which is the only one that `load_state_dict` of torch knows."""
        own, groups = self.optimizer.param_groups, []
        for (saved, ids), group in zip(match_groups(state_dict, own, type(self.optimizer).__name__), own, strict=True):
            names = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**saved, "params": ids, **names})
        return {**state_dict, "param_groups": groups}

    def load_checked(self, checked: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(checked)

    def reset(self) -> None:
        self.optimizer.state.clear()

    def master(self, p: Tensor) -> Tensor:
        return p.detach().clone()

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        p.copy_(value)

    def state_bytes(self) -> dict[Tensor, int]:
        raise ValueError(f"{type(self.optimizer).__name__} does not say how large its state gets.")


def adapt(optimizer: Any) -> Any:
    """The optimizer itself if it is one of this package, otherwise a `Foreign` around it."""
    return optimizer if hasattr(optimizer, "load_full_state_dict") else Foreign(optimizer)


def shared_defaults(optimizers: Sequence[Any]) -> Group:
    """The defaults that all have, and the momentum of some: OneCycleLR and CyclicLR need it, or betas."""
    first, *others = [optimizer.defaults for optimizer in optimizers]
    shared = {key: value for key, value in first.items() if all(key in other for other in others)}
    momenta = [{"momentum": known["momentum"]} for known in (first, *others) if "momentum" in known]
    return shared if not momenta or "betas" in shared else {**momenta[0], **shared}
