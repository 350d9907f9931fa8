"""What values a config field may have: said in its annotation, checked in one place.

    layers: Annotated[int, Meta(ge=1)] = 3
    softcap: Literal["tanh", "isru"] | None = None

`check_fields(self, "model.")` in `__post_init__` refuses anything else, by its dotted name, also in the dataclasses
inside, and `check_options(given)` refuses options of a command. The same annotations are checked by msgspec when a
stored file is read (`speedrun.files.read_json`).
"""

import dataclasses
import functools
import math
import operator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from speedrun.errors import UserError

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Share = Annotated[float, Meta(ge=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]


def check_fields(config: Any, prefix: str) -> None:
    """Raise UserError for the first field whose type, word or range is not what its annotation says."""
    kind: Any = type(config)
    for name, hint in _hints(kind).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{prefix}{name}.")
        else:
            _check(prefix + name, value, hint, " or None" * (NoneType in get_args(hint)))


def check_options(given: Any) -> None:
    """The same for the arguments of a command, also nested ones, where an annotation limits them."""
    kind: Any = type(given)
    for name, hint in _hints(kind).items():
        if dataclasses.is_dataclass(getattr(given, name)):
            check_options(getattr(given, name))
        bare = _bare(hint)
        if any(get_origin(each) is Annotated for each in (bare, *get_args(bare))):
            _check(f"--{name.replace('_', '-')}", getattr(given, name), hint)


def _check(called: str, value: Any, hint: Any, otherwise: str = "") -> None:
    problem = _problem(value, hint)
    if problem:
        required = requirement(_bare(hint), value)
        raise UserError(f"{called} is {value!r}; {required + otherwise if required else problem}.")
    floats = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float)]
    if not all(map(math.isfinite, floats)):
        raise UserError(f"{called} is {value!r}; it must be finite.")


def _bare(hint: Any) -> Any:
    """An annotation without None and without what only a parser of commands reads."""
    if get_origin(hint) is Annotated and not any(isinstance(m, Meta) for m in hint.__metadata__):
        return _bare(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return next(_bare(each) for each in get_args(hint) if each is not NoneType)
    return hint


def _problem(value: Any, hint: Any) -> str:
    """What msgspec says of a value that does not fit; empty for one that does."""
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as e:
        return str(e)
    return ""


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def requirement(hint: Any, value: Any) -> str:
    """'it must be at least 1': what `value` breaks of an annotation with words or ranges; empty for others."""
    if get_origin(hint) is Literal:
        return f"it must be one of: {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,) and isinstance(value, tuple):
        each = get_args(hint)[0]
        worst = next(x for x in value if _problem(x, each))
        return requirement(each, worst).replace("it must", "every value must", 1)
    if get_origin(hint) is not Annotated:
        return ""
    if isinstance(value, tuple):
        return requirement(hint.__origin__, value) if value else "it must have a value"
    if hint.__origin__ is int and type(value) is not int:
        return "it must be a whole number"
    m = next(m for m in hint.__metadata__ if isinstance(m, Meta))
    if m.pattern:  # "^(auto|gloo|nccl)$"
        return f"it must be one of: {m.pattern.strip('^()$').replace('|', ', ')}"
    if type(value) not in (int, float):
        return "it must be a number"
    limits = (
        ("at least", m.ge, operator.ge),
        ("above", m.gt, operator.gt),
        ("at most", m.le, operator.le),
        ("below", m.lt, operator.lt),
    )
    broken = [f"{word} {x:g}" for word, x, holds in limits if x is not None and not holds(value, x)]
    return f"it must be {' and '.join(broken)}"
