"""What values a config field may have: said in its annotation, checked in one place.

    layers: Annotated[int, Meta(ge=1)] = 3
    softcap: Literal["none", "tanh"] = "none"

`check_fields(self, "model.")` in `__post_init__` refuses anything else, by its dotted name. The same annotations are
checked by msgspec when a stored file is read (`speedrun.files.read_json`).
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from speedrun.errors import UserError

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]


def check_fields(config: Any, prefix: str) -> None:
    """Raise UserError for the first field whose type, word or range is not what its annotation says."""
    kind: Any = type(config)
    for name, hint in _hints(kind).items():
        value = getattr(config, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as e:
            must = requirement(hint, value) or f"this is wrong: {e}"
            raise UserError(f"{prefix}{name} is {value!r}; {must}.") from None
        floats = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float)]
        if not all(map(math.isfinite, floats)):
            raise UserError(f"{prefix}{name} is {value!r}; it must be finite.")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def requirement(hint: Any, value: Any) -> str:
    """'it must be at least 1', for annotations with words or ranges; otherwise an empty string."""
    if get_origin(hint) is Literal:
        return f"it must be one of: {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return requirement(get_args(hint)[0], 0).replace("it must", "every value must", 1)
    if get_origin(hint) is not Annotated:
        return ""
    m = next(m for m in hint.__metadata__ if isinstance(m, Meta))
    limits = {"at least": m.ge, "above": m.gt, "at most": m.le, "below": m.lt}
    words = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
    whole = "a whole number, " if hint.__origin__ is int and type(value) is not int else ""
    return f"it must be {whole}{' and '.join(words)}"
