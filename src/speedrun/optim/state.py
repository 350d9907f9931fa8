"""Parameters and their state by name: the form in which checkpoints store optimizer state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

Group = dict[str, Any]
States = dict[str, dict[str, Any]]
"""The state of each parameter, by the parameter's name."""
Loss = TypeVar("Loss")
untraced: Any = _disable_dynamo
"""torch.compiler.disable as torch's own optimizers have it: it loads torch._dynamo when it is needed, not on import."""
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
"""Parts of names that torch.compile, DDP, FSDP, activation checkpointing and Lightning add."""


def value_at(value: Any, index: int) -> Any:
    """The value of one parameter, for a group that gives one value for all or a list with one for each."""
    return value[index] if isinstance(value, list) else value


def named(group: Group, number: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters with names to show: their own, or their position."""
    names: Sequence[str] | None = group.get("param_names")
    for index, p in enumerate(group["params"]):
        yield (names[index] if names else f"parameter {index} of group {number} {tuple(p.shape)}"), p


def _all_named(groups: list[Group]) -> Iterator[tuple[str, Tensor]]:
    return (pair for number, group in enumerate(groups) for pair in named(group, number))


def params_of(groups: list[Group]) -> list[Tensor]:
    return [p for group in groups for p in group["params"]]


def by_name(groups: list[Group], states: Mapping[Tensor, Any]) -> States:
    """The state of each parameter that has one, by the parameter's name, in whatever group it is."""
    return {name: dict(states[p]) for name, p in _all_named(groups) if states.get(p)}


def load_by_name(groups: list[Group], states: MutableMapping[Tensor, Any], saved: States) -> None:
    """Make a copy of what `by_name` gave the state of the parameters; the order of groups does not matter."""
    for name, p in _all_named(groups):
        states.pop(p, None)
        if saved.get(name):
            states[p] = clone(saved[name], p.device)


def clone(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A state with tensors of its own. Steps are counted on the CPU, the rest is where the parameter is."""
    return {
        key: value.to("cpu" if key == "step" else device, copy=True) if torch.is_tensor(value) else value
        for key, value in state.items()
    }


def pack(groups: list[Group], states: Mapping[Any, Any]) -> dict[str, Any]:
    """The layout of a state_dict in torch: parameters by number, in the order of the groups."""
    number: dict[Tensor, int] = {}
    for position, p in enumerate(params_of(groups)):
        number.setdefault(p, position)
    return {
        "state": {number[key] if torch.is_tensor(key) else key: state for key, state in states.items()},
        "param_groups": [{**group, "params": [number[p] for p in group["params"]]} for group in groups],
    }


def match_groups(state_dict: Any, groups: list[Group], who: str) -> list[tuple[Group, list[Any]]]:
    """For each of `groups` the saved group that fits, and the numbers of its parameters in our order.

    By name where both sides have names, whatever wraps one of the models; otherwise by order, as in torch. A
    state_dict of torch.distributed.checkpoint has names in place of numbers, which are in our order already. ValueError
    if the state_dict is of other parameters.
    """
    saved = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if not isinstance(saved, list) or not isinstance(state_dict.get("state"), Mapping):
        raise ValueError("This is not an optimizer's state_dict: it needs `state` and `param_groups`.")
    mine, theirs = _names(groups), _names(saved)
    if mine and theirs:
        for rename in (str, unwrapped):
            found = _by_names(saved, _renamed(theirs, rename), _renamed(mine, rename))
            if found:
                return found
        if not all(isinstance(i, str) for group in saved for i in group["params"]):
            raise ValueError(f"The state_dict does not fit this {who}: {_misfit(mine, theirs)}.")
    sizes = [[len(group["params"]) for group in side] for side in (saved, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The state_dict has groups of {sizes[0]} parameters, this {who} has {sizes[1]}. Build it for the same "
            "model, in the same order, or from named parameters, which are matched by name."
        )
    return [(group, list(group["params"])) for group in saved]


def as_tuples(own: Any, saved: Any) -> Any:
    """A saved value with tuples where our own has some: torch.distributed.checkpoint makes lists of them."""
    if isinstance(own, tuple) and isinstance(saved, list):
        return tuple(saved)
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        return [as_tuples(*pair) for pair in zip(own, saved, strict=True)]
    return saved


def unwrapped(name: str) -> str:
    """A parameter's name without what wrappers of the model add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _renamed(names: list[list[str]], rename: Callable[[str], str]) -> list[list[str]]:
    return [[rename(name) for name in group] for group in names]


def _names(groups: Iterable[Group]) -> list[list[str]] | None:
    """The names in each group; None if some have none, or two are the same."""
    found: list[list[str]] = []
    for group in groups:
        ids = group["params"]
        names = ids if all(isinstance(i, str) for i in ids) else group.get("param_names", [])
        if len(names) != len(ids):
            return None
        found.append(list(names))
    every = [name for names in found for name in names]
    return found if len(set(every)) == len(every) else None


def _by_names(saved: list[Group], theirs: list[list[str]], mine: list[list[str]]) -> list[Any] | None:
    """For each list of names the saved group with the same ones, and its numbers in our order."""
    left = [(group, dict(zip(names, group["params"], strict=True))) for group, names in zip(saved, theirs, strict=True)]
    chosen = []
    for names in mine:
        place = next((k for k, (_, ids) in enumerate(left) if set(ids) == set(names)), None)
        if place is None:
            return None
        group, ids = left.pop(place)
        chosen.append((group, [ids[name] for name in names]))
    return None if left else chosen


def _misfit(mine: list[list[str]], theirs: list[list[str]]) -> str:
    """What keeps saved groups from fitting ours, and the way out."""
    ours, saved = ({unwrapped(name): name for names in side for name in names} for side in (mine, theirs))
    lacks, more = [n for k, n in ours.items() if k not in saved], [n for k, n in saved.items() if k not in ours]
    if lacks:
        what = f"it lacks {lacks[0]}"
    elif more:
        what = f"it has {more[0]}, which is not trained here"
    else:
        what = "it groups the parameters otherwise"
    return f"{what}. Build the optimizer with the same parameters in the same groups; their order does not matter"


def call_closure(closure: Callable[[], Loss] | None) -> Loss | None:
    """The loss of a `step(closure)`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def require(condition: bool, key: str, value: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}; it must be {what}.")
