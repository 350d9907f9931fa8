"""Options of commands are checked by their annotations, whatever else a parser finds in these."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from speedrun.checks import AboveZero, Positive, check_options
from speedrun.errors import UserError

COUNT = tyro.conf.arg(metavar="INT")


@dataclass(frozen=True)
class Given:
    max_rows: Annotated[Positive | None, COUNT] = None
    times: Annotated[tuple[AboveZero, ...], COUNT] = ()
    free: float = 1.0
    where: Annotated[Path | None, COUNT] = None
    word: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_rows": 0}, "--max-rows is 0; it must be at least 1."),
        ({"times": (1.0, -2.0)}, "--times is (1.0, -2.0); every value must be above 0."),
        ({"times": (1.0, float("inf"))}, "--times is (1.0, inf); it must be finite."),
    ],
)
def test_what_an_annotation_limits_is_refused_by_the_name_of_its_flag(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_options(Given(**wrong))
    assert str(caught.value) == said


def test_what_is_not_limited_is_left_to_the_command() -> None:
    check_options(Given(None, (0.5,), float("nan"), Path("x")))
