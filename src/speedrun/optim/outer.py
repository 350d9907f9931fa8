"""Snoo: every k steps, a Nesterov step on the distance that the inner optimizer has covered.

    optimizer = Snoo(Combined(NorMuon(...), Adam(...)), lr=0.68, momentum=0.37, k=28)

The inner optimizer makes k steps. Their sum, taken as one long gradient, goes through momentum, and training continues
from there. Kallusky et al., SNOO, https://arxiv.org/abs/2510.15830; lr, momentum and k are those of the record,
https://github.com/KellerJordan/modded-nanogpt/pull/128.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from speedrun.optim.arguments import require_number
from speedrun.optim.base import step_inner
from speedrun.optim.dtensor import as_dtensor, load_tensor, local_of
from speedrun.optim.protocol import StateDictMethods, adapt
from speedrun.optim.state import (
    Loss,
    States,
    by_name,
    call_closure,
    load_by_name,
    match_groups,
    named,
    params_of,
    require,
    untraced,
)

COUNTERS = ("count", "lr", "momentum", "k")
OUTER_KEYS = ("outer", "outer_momentum")
"""The state of a parameter here: float32 also where the weight is not."""


class _InGroups:
    """A number of Snoo's, kept in every parameter group: of an optimizer's numbers, checkpoints have only those."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = f"snoo_{name}"

    def __get__(self, snoo: Any, owner: type) -> Any:
        return snoo.param_groups[0][self.key]

    def __set__(self, snoo: Any, value: Any) -> None:
        for group in snoo.param_groups:
            group[self.key] = value


def _divide(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A parameter's state here, and the rest, which is the inner optimizer's."""
    outer = {key: state[key] for key in OUTER_KEYS if key in state}
    return outer, {key: value for key, value in state.items() if key not in OUTER_KEYS}


class _JoinedState(MutableMapping[Any, Any]):
    """The state of the inner optimizer and Snoo's own, as one mapping."""

    def __init__(self, inner: Any, outer: dict[Tensor, dict[str, Tensor]]) -> None:
        self.inner, self.outer = inner, outer

    def __getitem__(self, key: Any) -> Any:
        return ChainMap(self.inner.state[key], self.outer[key]) if key in self.outer else self.inner.state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if torch.is_tensor(key):
            self.outer.pop(key, None)
            outer, value = _divide(value)
            if outer:
                self.outer[key] = outer
        self.inner.state[key] = value

    def __delitem__(self, key: Any) -> None:
        self.outer.pop(key, None)
        del self.inner.state[key]

    def __iter__(self) -> Iterator[Any]:
        yield from dict.fromkeys([*self.inner.state, *self.outer])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Snoo(StateDictMethods, Optimizer):
    """Wraps any optimizer; groups and state are the inner one's, so schedulers work as before.

    The first outer step comes right after the first inner one, then after every k. Exact bfloat16 weights stay exact:
    the outer step is made on their float32 values. The weights at the first step are the first outer ones.

    `state[p]` has `outer` and `outer_momentum` beside what the inner optimizer keeps. `lr`, `momentum`, `k` and the
    number of steps are in the groups, as `snoo_lr` and so on.
    """

    count, lr, momentum, k = _InGroups(), _InGroups(), _InGroups(), _InGroups()

    def __init__(self, optimizer: Optimizer, lr: float = 0.68, momentum: float = 0.37, k: int = 28) -> None:
        if not hasattr(optimizer, "param_groups"):
            kind = type(optimizer).__name__
            raise ValueError(f"Snoo got a {kind}; wrap it around an optimizer: Snoo(Adam(...)).")
        require_number("lr", lr)
        require_number("momentum", momentum, below=1)
        require(type(k) is int and k >= 1, "k", k, "at least 1, and whole")
        self.optimizer: Any = optimizer
        self.outer: dict[Tensor, dict[str, Tensor]] = {}
        super().__init__([{"params": params_of(optimizer.param_groups)}], optimizer.defaults)
        self._share()
        self.lr, self.momentum, self.k, self.count = lr, momentum, k, 0

    def _share(self) -> None:
        self.param_groups = self.optimizer.param_groups
        self.state: Any = _JoinedState(self.optimizer, self.outer)

    def _add_outer(self) -> None:
        """Weights that are new here are their own outer ones; momentum comes with the first outer step."""
        for p in params_of(self.param_groups):
            if p.requires_grad and p not in self.outer:
                self.outer[p] = {"outer": self._inner.master(p)}

    @property
    def _inner(self) -> Any:
        return adapt(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not getattr(self, "param_groups", None):  # called by the constructor
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        for key in COUNTERS:
            setattr(self, key, getattr(self, key))

    @untraced
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        loss = call_closure(closure)
        self._add_outer()
        step_inner(self.optimizer)
        if self.count % self.k == 0:
            self._outer_step()
        self.count += 1
        return loss

    @torch.no_grad()
    def _outer_step(self) -> None:
        for p, state in self.outer.items():
            outer = state["outer"]
            gone = outer - self._inner.master(p)
            if "outer_momentum" not in state:
                state["outer_momentum"] = gone.clone()
            else:
                state["outer_momentum"].mul_(self.momentum).add_(gone)
            outer -= (gone + self.momentum * state["outer_momentum"]) * self.lr
            self._inner.set_master(p, outer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def reset(self) -> None:
        """Drop all state; the weights at the next step are the new starting point."""
        self._inner.reset()
        self.count = 0
        self.outer.clear()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes each parameter takes here and in the inner optimizer, which must be one of this package."""
        sizes: dict[Tensor, int] = self._inner.state_bytes()
        for p, size in self.outer_bytes().items():
            sizes[p] += 2 * size  # the outer weights and their momentum
        return sizes

    def outer_bytes(self) -> dict[Tensor, int]:
        """How many bytes the outer weights of each parameter take."""
        trained = [p for p in params_of(self.param_groups) if p.requires_grad]
        return {p: local_of(p).numel() * max(p.itemsize, 4) for p in trained}

    def master(self, p: Tensor) -> Tensor:
        return self._inner.master(p)

    def set_master(self, p: Tensor, value: Tensor) -> None:
        self._inner.set_master(p, value)

    def members(self) -> list[Any]:
        return self._inner.members()

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        """Of the inner optimizer; the outer weights and momenta stay."""
        self._inner.copy_state(source, target)

    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        return self._inner.clip_grad_norm_(max_norm, parameters)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._inner.no_sync()

    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        return self._inner.agree(numbers)

    def full_state_dict(self) -> States:
        """The inner optimizer's state by name, with the outer weights and momenta."""
        states: States = self._inner.full_state_dict()
        for name, state in by_name(self.param_groups, self.outer).items():
            states.setdefault(name, {}).update(state)
        return states

    def load_full_state_dict(self, states: States) -> None:
        """Load what `full_state_dict` returned; the caller sets `count`."""
        divided = {name: _divide(state) for name, state in states.items()}
        load_by_name(self.param_groups, self.outer, {name: outer for name, (outer, _) in divided.items()})
        self._inner.load_full_state_dict({name: inner for name, (_, inner) in divided.items()})

    def _save(self) -> dict[str, Any]:
        """The inner optimizer's, with the outer weights and momenta in the state of each parameter."""
        saved: dict[str, Any] = self.optimizer.state_dict()
        numbers = [i for group in saved["param_groups"] for i in group["params"]]
        states = dict(saved["state"])
        for i, p in zip(numbers, params_of(self.param_groups), strict=True):
            if p in self.outer:
                states[i] = {**states.get(i, {}), **self.outer[p]}
        return {**saved, "state": states}

    def _check(self, state_dict: dict[str, Any]) -> tuple[dict[Tensor, dict[str, Tensor]], Any]:
        outer: dict[Tensor, dict[str, Tensor]] = {}
        chosen = match_groups(state_dict, self.param_groups, "Snoo")
        for number, ((saved, ids), group) in enumerate(zip(chosen, self.param_groups, strict=True)):
            if not all(f"snoo_{key}" in saved for key in COUNTERS):
                raise _foreign("its groups lack `snoo_count`")
            for (name, p), i in zip(named(group, number), ids, strict=True):
                found, _ = _divide(state_dict["state"].get(i, {}))
                if found:
                    outer[p] = {key: _load_outer(value, key, name, p) for key, value in found.items()}
        if any(state_dict["state"].get(i) for _, ids in chosen for i in ids) and not outer:
            raise _foreign("parameters have state, and none has `outer`")
        inner = {i: _divide(s)[1] if isinstance(s, dict) else s for i, s in state_dict["state"].items()}
        return outer, self._inner.check_state_dict({**state_dict, "state": inner})

    def _load(self, checked: tuple[dict[Tensor, dict[str, Tensor]], Any]) -> None:
        outer, inner = checked
        self._inner.load_checked(inner)
        self.outer.clear()
        self.outer.update(outer)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("optimizer", "outer", "defaults")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({"defaults": state["defaults"], "state": {}, "param_groups": []})
        self._share()


def _load_outer(saved: Tensor, key: str, name: str, p: Tensor) -> Tensor:
    shape, wide = tuple(local_of(p).shape), torch.promote_types(p.dtype, torch.float32)
    return as_dtensor(load_tensor(saved, p, f"The state {key!r} of {name}", shape, wide), p)


def _foreign(why: str) -> ValueError:
    return ValueError(f"This state_dict was not made by Snoo: {why}. Load it into the inner optimizer.")
