"""Snoo: every k steps, a Nesterov step on the distance that the inner optimizer has covered.

    optimizer = Snoo(Combined(NorMuon(...), Adam(...)), lr=0.68, momentum=0.37, k=28)

The inner optimizer explores for k steps. What it did, seen as one long gradient, goes through momentum, and training
goes on from there.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from speedrun.optim.base import named, require
from speedrun.optim.combined import Plain
from speedrun.optim.sharded import is_sharded, refuse_state

Loss = TypeVar("Loss")


class Snoo(Optimizer):
    """Wraps any optimizer; groups and state are the inner one's, so schedulers work as before.

    The first outer step comes right after the first inner one, then after every k. Exact bfloat16 weights stay exact:
    the outer step is made on their float32 values.
    """

    def __init__(self, optimizer: Optimizer, lr: float = 0.68, momentum: float = 0.37, k: int = 28) -> None:
        require(lr >= 0, "lr", lr, "not negative")
        require(0 <= momentum < 1, "momentum", momentum, "at least 0 and below 1")
        require(k >= 1, "k", k, "at least 1")
        self.optimizer = optimizer
        self.lr, self.momentum, self.k, self.count = lr, momentum, k, 0
        super().__init__([{"params": self._params()}], {})
        self._share()
        self._start()

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def _start(self) -> None:
        self.outer: list[Tensor] = [self._masters.master(p) for p in self._params()]
        self.buffers: list[Tensor | None] = [None] * len(self.outer)

    @property
    def _masters(self) -> Any:
        return self.optimizer if hasattr(self.optimizer, "master") else Plain

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not getattr(self, "param_groups", None):  # called by the constructor
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        for p in self._params()[len(self.outer) :]:
            self.outer.append(self._masters.master(p))
            self.buffers.append(None)

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
        for i, p in enumerate(self._params()):
            gone = self.outer[i] - self._masters.master(p)
            buffer = self.buffers[i]
            if buffer is None:
                buffer = self.buffers[i] = gone.clone()
            else:
                buffer.mul_(self.momentum).add_(gone)
            self.outer[i] -= (gone + self.momentum * buffer) * self.lr
            self._masters.set_master(p, self.outer[i])

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
        self._start()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes each parameter takes here and in the inner optimizer, which must be one of this package."""
        if not hasattr(self.optimizer, "state_bytes"):
            raise ValueError(f"{type(self.optimizer).__name__} does not say how large its state gets.")
        sizes: dict[Tensor, int] = self.optimizer.state_bytes()
        for p, outer in zip(self._params(), self.outer, strict=True):
            sizes[p] += 2 * outer.nbytes  # the outer weights and their momentum
        return sizes

    def master(self, p: Tensor) -> Tensor:
        return self._masters.master(p)

    def set_master(self, p: Tensor, value: Tensor) -> None:
        self._masters.set_master(p, value)

    def tensors(self, names: Mapping[Any, str]) -> dict[str, Tensor]:
        """The outer weights and momenta by parameter name, for checkpoints."""
        found = {}
        for p, outer, buffer in zip(self._params(), self.outer, self.buffers, strict=True):
            found[f"outer.{names[p]}"] = outer
            if buffer is not None:
                found[f"momentum.{names[p]}"] = buffer
        return found

    def load_tensors(self, names: Mapping[Any, str], tensors: Mapping[str, Tensor], count: int) -> None:
        """Put back what `tensors` gave."""
        self.count = count
        for i, p in enumerate(self._params()):
            self.outer[i] = tensors[f"outer.{names[p]}"].to(p.device, copy=True)
            buffer = tensors.get(f"momentum.{names[p]}")
            self.buffers[i] = None if buffer is None else buffer.to(p.device, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and `snoo` beside it, in the order of the parameters."""
        self._refuse_sharded()
        outer = {
            "count": self.count, "lr": self.lr, "momentum": self.momentum, "k": self.k, "outer": list(self.outer),
            "buffers": list(self.buffers),
        }  # fmt: skip
        return {**self.optimizer.state_dict(), "snoo": outer}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_sharded()
        if "snoo" not in state_dict:
            raise ValueError(
                "This state_dict was not made by Snoo: it has no `snoo`; load it into the inner optimizer."
            )
        saved = state_dict["snoo"]
        order = self._order(state_dict)
        params = self._params()
        if [tuple(saved["outer"][i].shape) for i in order] != [tuple(p.shape) for p in params]:
            raise ValueError("The state_dict's `snoo` holds other shapes than this model has.")
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "snoo"})
        self._share()
        self.count, self.lr, self.momentum, self.k = (saved[key] for key in ("count", "lr", "momentum", "k"))
        self.outer = [saved["outer"][i].to(p.device, copy=True) for i, p in zip(order, params, strict=True)]
        self.buffers = [
            None if saved["buffers"][i] is None else saved["buffers"][i].to(p.device, copy=True)
            for i, p in zip(order, params, strict=True)
        ]

    def _refuse_sharded(self) -> None:
        """torch.distributed.checkpoint drops `snoo` without a word, whatever the inner optimizer does."""
        for number, group in enumerate(self.param_groups):
            for name, p in named(group, number):
                if is_sharded(p):
                    raise refuse_state(name, "a checkpoint leaves out what Snoo keeps, whichever optimizer it wraps")

    def _order(self, state_dict: dict[str, Any]) -> list[int]:
        """Where each of our parameters stands in the saved lists: by name if there are names."""
        count = len(self._params())
        mine = [name for group in self.param_groups for name in group.get("param_names", [])]
        theirs = [name for group in state_dict["param_groups"] for name in group.get("param_names", [])]
        if len(state_dict["snoo"]["outer"]) != count:
            raise ValueError(
                f"The state_dict's `snoo` holds {len(state_dict['snoo']['outer'])} parameters, this model has {count}."
            )
        if len(mine) == len(theirs) == count and set(mine) == set(theirs):
            return [theirs.index(name) for name in mine]
        return list(range(count))

    def __getstate__(self) -> dict[str, Any]:
        keys = ("optimizer", "lr", "momentum", "k", "count", "outer", "buffers", "defaults")
        return {key: self.__dict__[key] for key in keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({"defaults": state["defaults"], "state": {}, "param_groups": []})
        self._share()
