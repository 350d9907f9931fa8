"""Parameters by name, and what optimizers know of them: the form in which checkpoints store optimizer state."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Group = dict[str, Any]
States = dict[str, dict[str, Any]]
"""The state of each parameter, by the parameter's name."""
Loss = TypeVar("Loss")


def value_at(value: Any, index: int) -> Any:
    """The value of one parameter, for a group that gives one value for all or a list with one for each."""
    return value[index] if isinstance(value, list) else value


def named(group: Group, number: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters with names to show: their own, or their position."""
    names: Sequence[str] | None = group.get("param_names")
    for index, p in enumerate(group["params"]):
        yield (names[index] if names else f"parameter {index} of group {number} {tuple(p.shape)}"), p


def params_of(groups: list[Group]) -> list[Tensor]:
    return [p for group in groups for p in group["params"]]


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


def evaluate(closure: Callable[[], Loss] | None) -> Loss | None:
    """The loss of a `step(closure)`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def require(condition: bool, key: str, value: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}; it must be {what}.")
