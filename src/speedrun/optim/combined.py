"""Several optimizers as one.

    optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)     # scales the rates of both

Its groups are the groups of its members (the same dicts), so schedulers and a person's own changes reach them.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from speedrun.optim.base import Group, OneProcess, SpeedrunOptimizer, States, by_name, check_together, put_back

Loss = TypeVar("Loss")


class _Together(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one mapping; each parameter's lives in the optimizer that trains it."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def _home(self, p: Tensor) -> Any:
        for optimizer in self.optimizers:
            if any(q is p for group in optimizer.param_groups for q in group["params"]):
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


class Combined(OneProcess, Optimizer):
    """One `torch.optim.Optimizer` that steps all of `optimizers`, each with its own parameters."""

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("Combined got no optimizers; pass at least one.")
        seen: dict[Tensor, Optimizer] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
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
        """Take notice of groups that were added to a member."""
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Those with an answer are in a `Combined` around this one, which has checked them.
        checking = [o for o in checked_in(self.optimizers) if o._answer is None]
        try:
            if checking:
                answer = check_together(checking)
                for checked in checking:
                    checked._answer = answer
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            for checked in checking:
                checked._end_check()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def reset(self) -> None:
        """Forget what the members learned."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, SpeedrunOptimizer | Combined):
                optimizer.reset()
            else:
                optimizer.state.clear()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes the state of each parameter takes when it is fullest."""
        sizes: dict[Tensor, int] = {}
        for optimizer in self.optimizers:
            if not isinstance(optimizer, SpeedrunOptimizer | Combined):
                raise ValueError(f"{type(optimizer).__name__} does not say how large its state gets.")
            sizes |= optimizer.state_bytes()
        return sizes

    def master(self, p: Tensor) -> Tensor:
        return self._owner(p).master(p)

    def set_master(self, p: Tensor, value: Tensor) -> None:
        self._owner(p).set_master(p, value)

    def _owner(self, p: Tensor) -> Any:
        for optimizer in self.optimizers:
            if any(q is p for group in optimizer.param_groups for q in group["params"]):
                return optimizer if hasattr(optimizer, "master") else Plain()
        raise ValueError(f"None of the optimizers trains this parameter of shape {tuple(p.shape)}.")

    # ----------------------------------------------------------------- state

    def full_state_dict(self) -> States:
        """The state of each parameter that has one, by name; see `by_name` in speedrun.optim.base."""
        return by_name(self.param_groups, self.state)

    def load_full_state_dict(self, states: States) -> None:
        """Take a state as `full_state_dict` gives it; the weights must be those it belongs to."""
        put_back(self.param_groups, self.state, states)
        for optimizer in checked_in(self.optimizers):
            optimizer._vouch_for_all()

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


def checked_in(optimizers: Iterable[Optimizer]) -> Iterator[SpeedrunOptimizer]:
    """Those that check their gradients, wherever they are: also in a member that combines others, and inside a Snoo."""
    from speedrun.optim.outer import Snoo  # which imports this module

    for optimizer in optimizers:
        if isinstance(optimizer, SpeedrunOptimizer):
            yield optimizer
        elif isinstance(optimizer, Combined):
            yield from checked_in(optimizer.optimizers)
        elif isinstance(optimizer, Snoo):
            yield from checked_in([optimizer.optimizer])


class Plain:
    """Weights of an optimizer that keeps no exact ones: the parameter is its own master."""

    @staticmethod
    def master(p: Tensor) -> Tensor:
        return p.detach().clone()

    @staticmethod
    @torch.no_grad()
    def set_master(p: Tensor, value: Tensor) -> None:
        p.copy_(value)
