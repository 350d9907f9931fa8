"""Several optimizers as one.

    optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)     # scales the rates of both

Its groups are the groups of its members (the same dicts), so schedulers and your own changes reach them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from speedrun.optim.base import step_members
from speedrun.optim.protocol import SingleProcess, StateDictMethods, adapt, shared_defaults
from speedrun.optim.state import Group, match_groups, pack, params_of


def _optimizer_of(optimizers: Iterable[Optimizer], p: Any) -> Any:
    """The one that trains this parameter, or None."""
    return next((o for o in optimizers if any(q is p for q in params_of(o.param_groups))), None)


class _MemberStates(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping; each parameter's lives in the optimizer that trains it."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        self.other: dict[Any, Any] = defaultdict(dict)  # what belongs to no parameter

    def _home(self, key: Any) -> Any:
        found = _optimizer_of(self.optimizers, key)
        return self.other if found is None else found.state

    def __getitem__(self, key: Any) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._home(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self.optimizers:
            yield from optimizer.state
        yield from self.other

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers) + len(self.other)

    def __contains__(self, key: object) -> bool:
        return key in self._home(key)


class Combined(SingleProcess, StateDictMethods, Optimizer):
    """One `torch.optim.Optimizer` that steps all of `optimizers`, each with its own parameters."""

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("Combined got no optimizers; pass at least one.")
        seen: dict[Tensor, Optimizer] = {}
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise ValueError(
                    f"Combined got a {type(optimizer).__name__}; pass optimizers, one after the other: "
                    "Combined(NorMuon(...), Adam(...))."
                )
            for p in params_of(optimizer.param_groups):
                if p in seen:
                    raise ValueError(
                        f"A parameter of shape {tuple(p.shape)} is in {type(seen[p]).__name__} and in "
                        f"{type(optimizer).__name__}; each parameter may have one optimizer."
                    )
                seen[p] = optimizer
        self.optimizers = list(optimizers)
        super().__init__([{"params": list(seen)}], shared_defaults(optimizers))
        self.state: Any = _MemberStates(self.optimizers)
        self.sync()

    def sync(self) -> None:
        """Take over groups that were added to a member. New ones come last, as schedulers expect."""
        live = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        kept = [group for group in self.param_groups if any(group is other for other in live)]
        self.param_groups[:] = kept + [group for group in live if not any(group is other for other in kept)]

    def add_param_group(self, param_group: Group) -> None:
        """Give a group to the optimizer that it names (`"optimizer": "Adam"`), or to the only one that it fits.

        A group fits an optimizer that has its options and, if it needs matrices, gets nothing else.
        """
        if not self.param_groups:  # called by the constructor
            super().add_param_group(param_group)
            return
        group = dict(param_group)
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        named = group.pop("optimizer", None)
        for p in group["params"]:
            p = p[1] if isinstance(p, tuple) else p
            known = _optimizer_of(self.optimizers, p)
            if known is not None:
                raise ValueError(
                    f"A parameter of shape {tuple(p.shape)} is in {type(known).__name__} already; "
                    "each parameter may have one optimizer."
                )
        fitting = [
            o for o in self.optimizers if named in (o, type(o).__name__) or (named is None and self._fits(o, group))
        ]
        if len(fitting) != 1:
            members = ", ".join(type(optimizer).__name__ for optimizer in fitting or self.optimizers)
            which = f"each of {members}" if fitting else f"none of {members}"
            what = "the group" if named is None else f"a group for {named}"
            raise ValueError(
                f"Combined cannot know which optimizer is meant: {what} fits {which}. Name one in the group, as in "
                f'{{"params": ..., "optimizer": "{type(self.optimizers[0]).__name__}"}}, or give the optimizer itself.'
            )
        fitting[0].add_param_group(group)
        self.sync()

    def _fits(self, optimizer: Any, group: Group) -> bool:
        options = {key for other in self.optimizers for key in other.defaults} & set(group)
        shapes = [(p[1] if isinstance(p, tuple) else p).shape for p in group["params"]]
        vectors = any(len(shape) < 2 for shape in shapes)
        return options <= set(optimizer.defaults) and not (vectors and adapt(optimizer).sharding == "owned")

    step = step_members

    def members(self) -> list[Any]:
        return [member for optimizer in self.optimizers for member in adapt(optimizer).members()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def reset(self) -> None:
        """Drop the state of all members."""
        self.state.other.clear()
        for optimizer in self.optimizers:
            adapt(optimizer).reset()

    def state_bytes(self) -> dict[Tensor, int]:
        """How many bytes the state of each parameter takes when it is fullest."""
        return {p: size for o in self.optimizers for p, size in adapt(o).state_bytes().items()}

    def master(self, p: Tensor) -> Tensor:
        return self._owner(p).master(p)

    def set_master(self, p: Tensor, value: Tensor) -> None:
        self._owner(p).set_master(p, value)

    def _owner(self, p: Tensor) -> Any:
        found = _optimizer_of(self.optimizers, p)
        if found is None:
            raise ValueError(f"None of the optimizers trains this parameter of shape {tuple(p.shape)}.")
        return adapt(found)

    # ----------------------------------------------------------------- state

    def _save(self) -> dict[str, Any]:
        """Torch's layout: the groups of all members, parameters numbered through."""
        states: dict[Any, Any] = dict(self.state.other)
        groups = list(self.param_groups)
        for optimizer in self.optimizers:
            part = optimizer.state_dict()
            numbers = [i for group in part["param_groups"] for i in group["params"]]
            known = dict(zip(numbers, params_of(optimizer.param_groups), strict=True))
            states |= {known.get(i, i): state for i, state in part["state"].items()}
            for group, saved in zip(optimizer.param_groups, part["param_groups"], strict=True):
                groups[self._place(group)] = {**saved, "params": group["params"]}
        return pack(groups, states)

    def _check(self, state_dict: dict[str, Any]) -> tuple[list[Any], dict[Any, Any]]:
        """What each member's `check_state_dict` returns, and what belongs to no parameter."""
        chosen = match_groups(state_dict, self.param_groups, "Combined")
        states, checked, known = state_dict["state"], [], set()
        for optimizer in self.optimizers:
            places = [self._place(group) for group in optimizer.param_groups]
            ids = [i for place in places for i in chosen[place][1]]
            known.update(ids)
            part = {"state": {i: states[i] for i in ids if i in states}}
            checked.append(adapt(optimizer).check_state_dict({**part, "param_groups": [chosen[k][0] for k in places]}))
        return checked, {key: value for key, value in states.items() if key not in known}

    def _place(self, group: Group) -> int:
        return next(k for k, other in enumerate(self.param_groups) if other is group)

    def _load(self, checked: tuple[list[Any], dict[Any, Any]]) -> None:
        places = [[self._place(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        foreign_first = sorted(range(len(places)), key=lambda k: isinstance(self.optimizers[k], StateDictMethods))
        for k in foreign_first:  # they may still refuse
            adapt(self.optimizers[k]).load_checked(checked[0][k])
            for place, group in zip(places[k], self.optimizers[k].param_groups, strict=True):
                self.param_groups[place] = group
        self.state.other.clear()
        self.state.other.update(checked[1])

    def __getstate__(self) -> dict[str, Any]:
        kept = {"defaults": self.defaults, "param_groups": self.param_groups}
        return {**kept, "optimizers": self.optimizers, "other": dict(self.state.other)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        together = _MemberStates(state["optimizers"])
        together.other.update(state.pop("other"))
        super().__setstate__({**state, "state": together})
