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
from html import escape
from typing import Any

import speedrun
from speedrun.report.draw import on_page

Rows = Sequence[Sequence[Any]]
"""The first row names the columns."""
GOOD, BAD, OPEN = "good", "bad", "open"

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --page: #f4f6f7; --ink: #2c3e50; --grid: #d5d8dc; --faint: #5f6a73; --link: #1a5276;
  --good: #186a3b; --bad: #a93226; --open: #7e5109;
  --c0: #c0392b; --c1: #2471a3; --c2: #1e8449; --c3: #9a7d0a; --c4: #7d3c98;
  --c5: #117a65; --c6: #a04000; --c7: #5d6d7e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #1c2126; --page: #14171a; --ink: #e5e8e8; --grid: #3b444c; --faint: #a6b0b8; --link: #85c1e9;
    --good: #82e0aa; --bad: #f1948a; --open: #f8c471;
    --c0: #ec7063; --c1: #5dade2; --c2: #58d68d; --c3: #f4d03f; --c4: #bb8fce;
    --c5: #48c9b0; --c6: #e59866; --c7: #aeb6bf;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 64rem; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
a { color: var(--link); }
a:focus-visible, [tabindex]:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--paper); padding: .3rem .6rem; }
.lead { border-left: .4rem solid var(--open); background: var(--paper); padding: .6rem .9rem; margin: .6rem 0; }
.lead.good { border-color: var(--good); } .lead.bad { border-color: var(--bad); }
.lead strong { font-size: 1.25rem; color: var(--open); }
.lead.good strong { color: var(--good); } .lead.bad strong { color: var(--bad); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .6rem 0; }
section { background: var(--paper); border-radius: .4rem; padding: .9rem; margin: 0 0 1rem; }
.grid { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 48rem; }
.note, figcaption, footer { color: var(--faint); font-size: .9rem; }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .4rem 0; }
ul.key svg { width: 2rem; height: .8rem; vertical-align: middle; margin-right: .3rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding: .2rem 0; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th[scope=col] { white-space: nowrap; } td.n { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; font-size: .85rem; }
@media (max-width: 30rem) { main, header, footer { padding: 0 .5rem; } section { padding: .6rem; } }
@media print { nav, .skip { display: none; } section { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Lead:
    """What a reader must know first."""

    word: str
    sentence: str
    mood: str = OPEN


@dataclass(frozen=True)
class Section:
    name: str
    """For links and for the names of CSV files."""
    title: str
    parts: Sequence[str]
    """HTML"""
    data: Rows = ()
    """What the pictures show, for a CSV file."""


def number(value: Any) -> bool:
    return isinstance(value, int | float) or bool(
        re.fullmatch(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?(s|%))?", str(value))
    )


def table(rows: Rows, caption: str, *, numbers: bool = True) -> str:
    """A table in a frame of its own; what looks like a number stands on the right, unless all columns are mixed."""
    head, *body = rows

    def cell(value: Any, first: bool) -> str:
        words = escape(str(value))
        if first:
            return f'<th scope="row">{words}</th>'
        return f'<td class="n">{words}</td>' if numbers and number(value) else f"<td>{words}</td>"

    top = "".join(f'<th scope="col">{escape(str(name))}</th>' for name in head)
    lines = "".join("<tr>" + "".join(cell(v, k == 0) for k, v in enumerate(row)) + "</tr>" for row in body)
    inner = f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return frame(inner, caption)


def frame(inner: str, about: str) -> str:
    """Something wide: it scrolls by itself, also by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(about)}">{inner}</div>'


def wide(svg: str, caption: str) -> str:
    return frame(f"<figure>{on_page(svg)}<figcaption>{escape(caption)}</figcaption></figure>", caption)


def grid(pictures: Iterable[tuple[str, str]]) -> str:
    """Pictures beside each other where there is room, each with its caption."""
    cells = (f"<figure>{on_page(svg)}<figcaption>{escape(words)}</figcaption></figure>" for svg, words in pictures)
    return f'<div class="grid">{"".join(cells)}</div>'


def key(entries: Iterable[tuple[str, str, str]]) -> str:
    """What the colours and dashes mean: (name, colour, dash)."""
    items = []
    for name, color, dash in entries:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        stroke = f'<line x1="0" x2="32" y1="6" y2="6" stroke="{color}" stroke-width="3"{dashes}/>'
        mark = on_page(f'<svg viewBox="0 0 32 12" aria-hidden="true">{stroke}</svg>')
        items.append(f"<li>{mark}{escape(name)}</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def bullets(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def heading(words: str) -> str:
    return f"<h3>{escape(words)}</h3>"


def details(summary: str, inner: str) -> str:
    """Something long, folded."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def paragraph(words: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(words)}</p>' if kind else f"<p>{escape(words)}</p>"


def as_csv(rows: Rows) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def finish(title: str, lead: Lead, sections: Sequence[Section | None]) -> str:
    """The whole page."""
    links, bodies = [], []
    for s in filter(None, sections):
        links.append(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>')
        save = ""
        if s.data:
            rows = len(s.data) - 1
            coded = base64.b64encode(as_csv(s.data).encode()).decode()
            save = (
                f'<p><a download="{s.name}.csv" href="data:text/csv;charset=utf-8;base64,{coded}">'
                f"Save the data of {escape(s.title.lower())} (CSV, {rows:,} row{'s' * (rows != 1)})</a></p>"
            )
        bodies.append(
            f'<section id="{s.name}" aria-labelledby="{s.name}-title"><h2 id="{s.name}-title">{escape(s.title)}</h2>'
            f"{''.join(s.parts)}{save}</section>"
        )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escape(title)}</h1>
<div class="lead {lead.mood}"><strong>{escape(lead.word)}</strong><p>{escape(lead.sentence)}</p></div>
<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>
</header>
<main id="content" tabindex="-1">
{"".join(bodies)}
</main>
<footer><p>Made by speedrun {escape(speedrun.__version__)}.</p></footer>
</body>
</html>
"""
