"""Several optimizers as one.

    optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)     # scales the rates of both

Its groups are the groups of its members (the same dicts), so schedulers and your own changes reach them.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from speedrun.optim.base import SpeedrunOptimizer, check_together
from speedrun.optim.protocol import InOneProcess, adapted
from speedrun.optim.state import Group, Loss, evaluate, params_of


class _Together(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one mapping; each parameter's lives in the optimizer that trains it."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def _home(self, p: Tensor) -> Any:
        for optimizer in self.optimizers:
            if any(q is p for q in params_of(optimizer.param_groups)):
                return optimizer.state
        raise KeyError(p)

    def __getitem__(self, p: Tensor) -> Any:
        return self._home(p)[p]

    def __setitem__(self, p: Tensor, value: Any) -> None:
        self._home(p)[p] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._home(p)[p]

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers)

    def __contains__(self, p: object) -> bool:
        return any(p in optimizer.state for optimizer in self.optimizers)


class Combined(InOneProcess, Optimizer):
    """One `torch.optim.Optimizer` that steps all of `optimizers`, each with its own parameters."""

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("Combined got no optimizers; pass at least one.")
        seen: dict[Tensor, Optimizer] = {}
        for optimizer in optimizers:
            for p in params_of(optimizer.param_groups):
                if p in seen:
                    raise ValueError(
                        f"A parameter of shape {tuple(p.shape)} is in {type(seen[p]).__name__} and in "
                        f"{type(optimizer).__name__}; each parameter may have one optimizer."
                    )
                seen[p] = optimizer
        self.optimizers = list(optimizers)
        super().__init__([{"params": list(seen)}], {})
        self.sync()

    def sync(self) -> None:
        """Take over groups that were added to a member."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = _Together(self.optimizers)

    def add_param_group(self, param_group: Group) -> None:
        """Not possible here: the group would not say which optimizer it is for."""
        if not hasattr(self, "param_groups") or not self.param_groups:  # called by the constructor
            super().add_param_group(param_group)
            return
        raise ValueError(
            "Combined cannot know which optimizer a new group is for; add it to that one, then call sync()."
        )

    @torch.compiler.disable
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """One step of each. Gradients of all are checked before the first weight changes."""
        loss = evaluate(closure)
        # Members that have a result are in a `Combined` around this one, which has checked them.
        checking = [member for member in self.members() if member.checked is None]
        try:
            if checking:
                finite = check_together(checking)
                for member in checking:
                    member.checked = finite
            for optimizer in self.optimizers:
                optimizer.step()  # not `_update`: hooks and schedulers of a member see its step
        finally:
            for member in checking:
                member.end_check()
        return loss

    def members(self) -> list[Any]:
        return [member for optimizer in self.optimizers for member in adapted(optimizer).members()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def reset(self) -> None:
        """Drop the state of all members."""
        for optimizer in self.optimizers:
            adapted(optimizer).reset()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes the state of each parameter takes when it is fullest."""
        sizes: dict[Tensor, int] = {}
        for optimizer in self.optimizers:
            sizes |= adapted(optimizer).state_bytes()
        return sizes

    def master(self, p: Tensor) -> Tensor:
        return self._owner(p).master(p)

    def set_master(self, p: Tensor, value: Tensor) -> None:
        self._owner(p).set_master(p, value)

    def _owner(self, p: Tensor) -> Any:
        for optimizer in self.optimizers:
            if any(q is p for q in params_of(optimizer.param_groups)):
                return adapted(optimizer)
        raise ValueError(f"None of the optimizers trains this parameter of shape {tuple(p.shape)}.")

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Torch's layout: the groups of all members, parameters numbered through."""
        state: dict[int, Any] = {}
        groups: list[Group] = []
        start = 0
        for optimizer in self.optimizers:
            part = optimizer.state_dict()
            state |= {start + i: value for i, value in part["state"].items()}
            for group in part["param_groups"]:
                groups.append({**group, "params": [start + i for i in group["params"]]})
            start += sum(len(group["params"]) for group in part["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        parts = []
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            mine, groups = groups[:count], groups[count:]
            if len(mine) < count:
                raise ValueError(
                    f"The state_dict has {len(state_dict['param_groups'])} groups, these optimizers have "
                    f"{len(self.param_groups)}; build Combined from the same optimizers in the same order."
                )
            ids = {i for group in mine for i in group["params"]}
            parts.append({"state": {i: v for i, v in state_dict["state"].items() if i in ids}, "param_groups": mine})
        if groups:
            raise ValueError(f"The state_dict has {len(groups)} more groups than these optimizers.")
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            if isinstance(optimizer, SpeedrunOptimizer):
                optimizer._aligned(part)  # refuses before the first member has changed
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)
        self.sync()

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers = state["optimizers"]
        super().__setstate__({"defaults": state["defaults"], "state": {}, "param_groups": []})
        self.sync()
