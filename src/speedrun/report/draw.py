"""Functions that draw pictures as SVG, so that none needs a plotting library.

A picture stands alone as a file, with white paper. Inside a page, `on_page` lets it take the page's colours, so that
it is dark where the page is dark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from xml.sax.saxutils import escape, quoteattr

INK, GRID, PAPER, FAINT = "#2c3e50", "#d5d8dc", "#ffffff", "#737d86"
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#9a7d0a", "#7d3c98", "#117a65", "#a04000", "#5d6d7e")
THEME = {INK: "ink", GRID: "grid", PAPER: "paper", FAINT: "faint"} | {c: f"c{k}" for k, c in enumerate(COLORS)}
DASHES = ("", "6 3", "2 3")
HALO = 'stroke-width="3" paint-order="stroke"'


def picture(width: float, height: float, parts: Sequence[str], about: str) -> str:
    """A whole SVG file. `about` is what a screen reader says of it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif" font-size="11" role="img" '
        f"aria-label={quoteattr(about)}>"
    )
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>', *parts, "</svg>", ""])


def on_page(svg: str) -> str:
    """The same picture in the colours of the page around it."""
    for color, name in THEME.items():
        svg = svg.replace(f'"{color}"', f'"var(--{name}, {color})"')
    return svg


def text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start", color: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, *, color: str = GRID, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width:g}"{dashes}/>'


def dot(x: float, y: float, color: str, *, about: str = "", hollow: bool = False, radius: float = 3) -> str:
    """A point; pointing at it shows what `about` says."""
    fill = f'fill="{PAPER}" stroke="{color}" stroke-width="1.6"' if hollow else f'fill="{color}"'
    at = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
    return f"<circle {at} {fill}><title>{escape(about)}</title></circle>" if about else f"<circle {at} {fill}/>"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers from low to high: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 1500000 as 1.5M, 0.30000000000000004 as 0.3."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.6g}{letter}"
    return f"{value:.6g}"


@dataclass(frozen=True)
class Series:
    """One curve: `points` are joined by a line, `marks` are shown one by one."""

    name: str
    color: str
    points: Sequence[tuple[float, float]] = ()
    marks: Sequence[tuple[float, float]] = ()
    dash: str = ""
    hollow: bool = False
    opacity: float = 1.0
    radius: float = 3
    """Of the marks."""


@dataclass(frozen=True)
class Frame:
    """A rectangle with axes: where a value lies in it."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Values outside stay on the border."""
        return (self.left + self.width * _share(x, *self.x), self.top + self.height * (1 - _share(y, *self.y)))

    def axes(
        self,
        x_name: str,
        y_name: str,
        *,
        x: Mapping[float, str] | None = None,
        y: Mapping[float, str] | None = None,
        tall: bool = False,
    ) -> list[str]:
        """`x` and `y` are what stands at which value; default: round numbers. `tall`: those of x cross the frame."""
        bottom, right = self.top + self.height, self.left + self.width
        parts = [text(self.left, self.top - 8, y_name, color=FAINT), text(right, bottom + 30, x_name, anchor="end")]
        for value, words in ({v: short(v) for v in ticks(*self.y)} if y is None else y).items():
            _, at = self.at(self.x[0], value)
            parts += [line(self.left, at, right, at), text(self.left - 6, at + 4, words, anchor="end", color=FAINT)]
        for value, words in ({v: short(v) for v in ticks(*self.x)} if x is None else x).items():
            at, _ = self.at(value, self.y[0])
            parts.append(line(at, self.top if tall else bottom, at, bottom + 4))
            parts.append(text(at, bottom + 16, words, anchor="middle", color=FAINT))
        return parts

    def level(self, y: float, words: str) -> list[str]:
        """A dashed line across, such as a target. Its name stands where most curves are far above, and clear of others.

        To be drawn after the curves.
        """
        (x, height), right = self.at(self.x[0], y), self.left + self.width
        name = text(x + 2, height - 4, words).replace("<text", f'<text stroke="{PAPER}" {HALO}', 1)
        return [line(x, height, right, height, color=INK, dash="4 3"), name]

    def draw(self, series: Series) -> list[str]:
        """It begins where it comes into the frame from above; a later spike stays, on the border."""
        parts = []
        points, marks = (list(dropwhile(lambda p: p[1] > self.y[1], found)) for found in (series.points, series.marks))
        if points:
            steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in (self.at(*p) for p in points))
            dashes = f' stroke-dasharray="{series.dash}"' if series.dash else ""
            parts.append(
                f'<path d="M{steps}" fill="none" stroke="{series.color}" stroke-width="1.4" '
                f'stroke-opacity="{series.opacity:g}"{dashes}/>'
            )
        for x, y in marks:
            about = f"{series.name}: {y:.4f} at {x:,.6g}"
            at = self.at(x, y)
            parts.append(dot(*at, series.color, about=about, hollow=series.hollow, radius=series.radius))
        return parts


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def chart(
    about: str,
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    y: tuple[float, float],
    x: tuple[float, float] | None = None,
    levels: Sequence[tuple[float, str]] = (),
    size: tuple[float, float] = (380, 250),
) -> str:
    """Curves over one pair of axes, as a picture that a phone can show."""
    known = [p[0] for s in series for p in (*s.points, *s.marks)]
    across = x or (0, max(known, default=0) or 1)
    frame = Frame(46, 26, size[0] - 46 - 14, size[1] - 26 - 40, across, y)
    parts = frame.axes(x_name, y_name)
    for one in series:
        parts += frame.draw(one)
    for value, words in levels:
        if y[0] <= value <= y[1]:
            parts += frame.level(value, words)
    return picture(*size, parts, about)
