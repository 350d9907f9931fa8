"""One step of every rank as a picture: what it computed, launched and waited for.

`python -m benchmarks.simulate --plot FILE.svg` draws with it, and `python -m benchmarks.overlap --plot FILE.svg`.
Several steps share one time scale, so that the picture shows what the other order gains.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from speedrun.report.draw import COLORS as PALETTE
from speedrun.report.draw import GRID, INK, PAPER, picture, text
from speedrun.training.trace import Span

WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 960, 86, 16, 56, 30, 40
COLORS = {
    "compute": PALETTE[1],
    "backward": PALETTE[7],
    "launch": PALETTE[3],
    "wait": PALETTE[0],
    "transfer": PALETTE[4],
}
WORDS = {
    "compute": "compute",
    "backward": "backward pass",
    "launch": "launch",
    "wait": "wait",
    "transfer": "on the link",
}


def color_of(span: Span) -> str:
    return COLORS["backward" if span.op == "backward" else span.kind]


def lanes(ranks: Sequence[Sequence[Span]]) -> list[tuple[str, list[Span]]]:
    found = []
    for rank, spans in enumerate(ranks):
        moving = [s for s in spans if s.kind == "transfer"]
        found.append((f"rank {rank}", [s for s in spans if s.kind != "transfer"]))
        if moving:
            found.append(("its link", moving))
    return found


def timeline_svg(panels: Sequence[tuple[str, Sequence[Sequence[Span]]]]) -> str:
    """`panels`: a title, and what each rank did. Time 0 is the end of the slowest backward pass."""
    drawn = []
    for title, ranks in panels:
        rows = lanes(ranks)
        spans = [s for _, found in rows for s in found]
        starts = [max((s.end for s in found if s.op == "backward"), default=None) for _, found in rows]
        known = [s for s in starts if s is not None]
        zero = max(known) if known else min(s.start for s in spans)
        shown = [(name, sorted(found, key=lambda s: s.op != "backward")) for name, found in rows]  # it lies below
        drawn.append((title, shown, zero))
    last = max(s.end - zero for _, rows, zero in drawn for _, found in rows for s in found)
    # What began long before the end of the backward pass would leave no room for the rest.
    first = max(-last / 3, min(s.start - zero for _, rows, zero in drawn for _, found in rows for s in found))
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    out: list[str] = []
    x, y = LEFT, 22
    for kind, color in COLORS.items():
        if any(color_of(s) == color for _, rows, _ in drawn for _, found in rows for s in found):
            out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
            out.append(text(x + 17, y, WORDS[kind]))
            x += 110
    y = TOP
    for title, rows, zero in drawn:
        out.append(text(LEFT, y + 12, title, size=13))
        y += 22
        for name, found in rows:
            out.append(text(LEFT - 8, y + LANE / 2, name, anchor="end"))
            out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE - 8}" fill="{GRID}"/>')
            for s in found:
                start, end = max(s.start - zero, first), s.end - zero
                if end < first:
                    continue
                left, wide = LEFT + scale * (start - first), max(0.4, scale * (end - start))
                about = f"{s.kind}: {s.item} {s.op}, {1e3 * (s.end - s.start):.2f} ms"
                out.append(
                    f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{LANE - 8}" fill="{color_of(s)}">'
                    f"<title>{escape(about)}</title></rect>"
                )
                if wide > 7 * len(s.item) + 6 and s.kind in ("compute", "transfer"):
                    out.append(text(left + 4, y + LANE / 2 - 1, s.item, color=PAPER))
            y += LANE
        y += GAP // 2
    axis = y
    for k in range(6):
        value = first + (last - first) * k / 5
        at = LEFT + scale * (value - first)
        out.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{axis}" stroke="{INK}" stroke-opacity="0.15"/>')
        out.append(text(at, axis + 14, f"{1e3 * value:.3g} ms", anchor="middle" if k < 5 else "end"))
    names = "; ".join(title for title, _, _ in drawn)
    return picture(WIDTH, axis + 24, out, f"What every rank did in one step, over time: {names}.")
