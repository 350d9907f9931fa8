"""Snoo: every k steps, a Nesterov step on the distance that the inner optimizer has covered.

    optimizer = Snoo(Combined(NorMuon(...), Adam(...)), lr=0.68, momentum=0.37, k=28)

The inner optimizer explores for k steps. What it did, seen as one long gradient, goes through momentum, and training
goes on from there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from speedrun.optim.base import States, by_name, named, put_back, require
from speedrun.optim.combined import Plain
from speedrun.optim.sharded import is_sharded, refuse_state

Loss = TypeVar("Loss")
NUMBERS = ("count", "lr", "momentum", "k")
KEPT = ("outer", "outer_momentum")
"""The state of a parameter here: float32 also where the weight is not."""


class Snoo(Optimizer):
    """Wraps any optimizer; groups and state are the inner one's, so schedulers work as before.

    The first outer step comes right after the first inner one, then after every k. Exact bfloat16 weights stay exact:
    the outer step is made on their float32 values.
    """

    def __init__(self, optimizer: Optimizer, lr: float = 0.68, momentum: float = 0.37, k: int = 28) -> None:
        require(lr >= 0, "lr", lr, "not negative")
        require(0 <= momentum < 1, "momentum", momentum, "at least 0 and below 1")
        require(k >= 1, "k", k, "at least 1")
        self.optimizer: Any = optimizer
        self.outer: dict[Tensor, dict[str, Tensor]] = {}
        self.lr, self.momentum, self.k, self.count = lr, momentum, k, 0
        super().__init__([{"params": self._params()}], {})
        self._share()
        self._start()

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def _start(self) -> None:
        """Weights that are new here are their own outer ones; momentum comes with the first outer step."""
        for p in self._params():
            if p not in self.outer:
                self.outer[p] = {"outer": self._masters.master(p)}

    @property
    def _masters(self) -> Any:
        return self.optimizer if hasattr(self.optimizer, "master") else Plain

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not getattr(self, "param_groups", None):  # called by the constructor
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        self._start()

    @torch.compiler.disable
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.optimizer.step()
        if self.count % self.k == 0:
            self._outer_step()
        self.count += 1
        return loss

    @torch.no_grad()
    def _outer_step(self) -> None:
        for p, state in self.outer.items():
            outer = state["outer"]
            gone = outer - self._masters.master(p)
            if "outer_momentum" not in state:
                state["outer_momentum"] = gone.clone()
            else:
                state["outer_momentum"].mul_(self.momentum).add_(gone)
            outer -= (gone + self.momentum * state["outer_momentum"]) * self.lr
            self._masters.set_master(p, outer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything learned; the present weights are the new starting point."""
        if hasattr(self.optimizer, "reset"):
            self.optimizer.reset()
        else:
            self.optimizer.state.clear()
        self.count = 0
        self.outer.clear()
        self._start()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes each parameter takes here and in the inner optimizer, which must be one of this package."""
        if not hasattr(self.optimizer, "state_bytes"):
            raise ValueError(f"{type(self.optimizer).__name__} does not say how large its state gets.")
        sizes: dict[Tensor, int] = self.optimizer.state_bytes()
        for p, state in self.outer.items():
            sizes[p] += 2 * state["outer"].nbytes  # the outer weights and their momentum
        return sizes

    def master(self, p: Tensor) -> Tensor:
        return self._masters.master(p)

    def set_master(self, p: Tensor, value: Tensor) -> None:
        self._masters.set_master(p, value)

    def copy_state(self, source: Tensor, target: Tensor) -> None:
        self.optimizer.copy_state(source, target)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def agree(self, numbers: Sequence[float] = ()) -> list[float]:
        return self.optimizer.agree(numbers)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return self.optimizer.clip_grad_norm_(max_norm)

    def full_state_dict(self) -> States:
        """The inner optimizer's state by name, with the outer weights and momenta."""
        states: States = self.optimizer.full_state_dict()
        for name, state in by_name(self.param_groups, self.outer).items():
            states.setdefault(name, {}).update(state)
        return states

    def load_full_state_dict(self, states: States) -> None:
        """Take a state as `full_state_dict` gives it; `count` is the caller's to set."""
        ours = {name: {key: state[key] for key in KEPT if key in state} for name, state in states.items()}
        put_back(self.param_groups, self.outer, ours)
        inner = {name: {k: v for k, v in state.items() if k not in KEPT} for name, state in states.items()}
        self.optimizer.load_full_state_dict(inner)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and `snoo` beside it, by the names of the parameters."""
        self._refuse_sharded()
        kept = {key: getattr(self, key) for key in NUMBERS} | {"state": by_name(self.param_groups, self.outer)}
        return {**self.optimizer.state_dict(), "snoo": kept}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_sharded()
        if "snoo" not in state_dict:
            raise ValueError(
                "This state_dict was not made by Snoo: it has no `snoo`; load it into the inner optimizer."
            )
        saved = state_dict["snoo"]
        for name, state in by_name(self.param_groups, self.outer).items():
            if name not in saved["state"] or saved["state"][name]["outer"].shape != state["outer"].shape:
                raise ValueError(f"The state_dict's `snoo` has no {name}, or one of another shape.")
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "snoo"})
        self._share()
        put_back(self.param_groups, self.outer, saved["state"])
        for key in NUMBERS:
            setattr(self, key, saved[key])

    def _refuse_sharded(self) -> None:
        """torch.distributed.checkpoint drops `snoo` without a word, whatever the inner optimizer does."""
        for number, group in enumerate(self.param_groups):
            for name, p in named(group, number):
                if is_sharded(p):
                    raise refuse_state(name, "a checkpoint leaves out what Snoo keeps, whichever optimizer it wraps")

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in (*NUMBERS, "optimizer", "outer", "defaults")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({"defaults": state["defaults"], "state": {}, "param_groups": []})
        self._share()
