"""One HTML page that carries everything it shows: it needs no network and runs no script.

Every picture is inline SVG in the page's own colours, light or dark as the reader's system is; every picture's data
can be saved as CSV through a link that holds it. Wide tables and pictures scroll inside their own frame, which the
keyboard can reach, so the page itself never grows wider than a phone.
"""

import base64
import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import speedrun
from speedrun.report.draw import line, on_page
from speedrun.templates import part, render

Rows = Sequence[Sequence[Any]]
"""The first row names the columns."""
GOOD, BAD, OPEN = "good", "bad", "open"


@dataclass(frozen=True)
class Headline:
    """The first line of a page."""

    word: str
    sentence: str
    status: str = OPEN


@dataclass(frozen=True)
class Section:
    name: str
    """For links and for the names of CSV files."""
    title: str
    parts: Sequence[str]
    """What the functions below have made; anything else is escaped."""
    data: Rows = ()
    """What the pictures show, for a CSV file."""

    @property
    def csv(self) -> str:
        """Of the data, in base64."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.data)
        return base64.b64encode(out.getvalue().encode()).decode()


def number(value: Any) -> bool:
    return isinstance(value, int | float) or bool(
        re.fullmatch(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?(s|%))?", str(value))
    )


make = partial(part, "parts.html")


def table(rows: Rows, caption: str, *, numbers: bool = True) -> str:
    """A table in a frame of its own; what looks like a number stands on the right, unless all columns are mixed."""
    return make("table", rows, caption, number if numbers else lambda _: False)


def wide(svg: str, caption: str) -> str:
    """A picture in a frame of its own: it scrolls by itself, also by keyboard."""
    return make("wide", on_page(svg), caption)


def grid(pictures: Iterable[tuple[str, str]]) -> str:
    """Pictures beside each other where there is room, each with its caption."""
    return make("grid", [(on_page(svg), words) for svg, words in pictures])


def key(entries: Iterable[tuple[str, str, str]]) -> str:
    """What the colours and dashes mean: (name, colour, dash)."""
    strokes = [(name, line(0, 6, 32, 6, color=color, width=3, dash=dash)) for name, color, dash in entries]
    marks = [(name, f'<svg viewBox="0 0 32 12" aria-hidden="true">{stroke}</svg>') for name, stroke in strokes]
    return make("key", [(name, on_page(mark)) for name, mark in marks])


bullets, heading, paragraph = (partial(make, name) for name in ("bullets", "heading", "paragraph"))
details = partial(make, "details")  # something long, folded: its summary, and what is inside


def finish(title: str, headline: Headline, sections: Iterable[Section | None]) -> str:
    """The whole page."""
    shown = [section for section in sections if section]
    return render("page.html", title=title, headline=headline, sections=shown, version=speedrun.__version__)
