"""The arguments of a constructor: collected, and refused with the way out where they are unknown."""

import math
from typing import Any, get_args

from torch import Tensor

from speedrun.optim.state import Group, require

# Names of torch.optim's Muon, AdamW and others, and what they are here.
TORCH_OPTIONS = {
    "ns_steps": "it is called steps here",
    "ns_coefficients": "it is called coefficients here and takes triples: coefficients=[(a, b, c)]",
    "adjust_lr_fn": "it is called scale here: 'original' is scale='spectral', 'match_rms_adamw' is "
    "scale='match-rms-adamw'",
    "maximize": "leave it out and negate the loss: (-loss).backward()",
    "foreach": "leave it out: matrices of one shape are always orthogonalised together, and Adam steps in one pass",
    "fused": "leave it out: Adam uses torch's fused kernel by itself where it is right",
    "capturable": "leave it out: a step cannot be captured in a CUDA graph",
    "differentiable": "leave it out: a step cannot be differentiated; torch.optim.AdamW can",
    "amsgrad": "leave it out, or give these parameters to torch.optim.AdamW(amsgrad=True), also inside Combined",
    "decoupled_weight_decay": "leave it out: weight decay is always decoupled from the gradient",
    "eps": "leave it out: nothing is divided by a small number that needs one",
    "betas": "it is called momentum (and beta2 in NorMuon) here",
    "nesterov": "leave it out: torch.optim.NAdam has it, also inside Combined",
}


def arguments(given: dict[str, Any]) -> Group:
    """The defaults of an optimizer from the `locals()` of its constructor; TypeError if any is unknown."""
    defaults = {key: value for key, value in given.items() if key not in ("self", "params", "unknown", "__class__")}
    for key in given["unknown"]:
        way_out = TORCH_OPTIONS.get(key, f"it has {', '.join(defaults)}")
        raise TypeError(f"{type(given['self']).__name__} has no argument {key!r}; {way_out}.")
    return defaults


def refuse_torch_options(optimizer: Any, group: Group) -> None:
    """Refuse options of torch's optimizers that are set in a group, where torch ignores what it does not know."""
    for key, way_out in TORCH_OPTIONS.items():
        if key not in optimizer.defaults and key != "decoupled_weight_decay" and group.get(key):  # True is right there
            raise ValueError(
                f"A group has {key}={group[key]!r}, which {type(optimizer).__name__} does not know; {way_out}."
            )


def one_number(key: str, value: Any) -> float:
    """A group's value as a number; ValueError if it is none, or a tensor of several."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key} is a tensor of {value.numel()} elements, {value}; a Tensor {key} must be 1-element.")
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{key} is {value!r}; it must be a number.") from e


def require_number(key: str, value: Any, below: float = math.inf) -> None:
    end = "finite and not negative" if below == math.inf else f"at least 0 and below {below:g}"
    require(0 <= one_number(key, value) < below, key, value, end)


def require_choice(key: str, value: Any, choices: Any) -> None:
    """`choices`: a Literal, or one of its values or None."""
    optional = type(None) in get_args(choices)
    words = [word for part in get_args(choices) for word in get_args(part)] if optional else get_args(choices)
    ways = ", ".join(words) + ", or None" * optional
    require(value in words or (optional and value is None), key, value, f"one of: {ways}")
