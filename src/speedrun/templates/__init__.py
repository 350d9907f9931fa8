"""Texts of pages and records as jinja2 templates, in the files beside this one. HTML values are escaped."""

import functools
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


@functools.cache
def _environment() -> "jinja2.Environment":
    import jinja2  # imported for pages and records alone

    return jinja2.Environment(
        loader=jinja2.PackageLoader("speedrun"),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(**values)


def part(name: str, macro: str, *values: Any) -> str:
    """One macro of a template. In an HTML template its result is markup, which is not escaped again."""
    found: str = getattr(_environment().get_template(name).module, macro)(*values)
    return found


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row names its columns."""
    head, *body = [[html.escape(cell, quote=False).replace("|", "&#124;") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))
