"""What each switch is worth, as one SVG picture: a point and its interval per switch.

speedrun ablate --recipe normuon --plot ablation.svg
"""

import math

from speedrun.race.ablate import SHORTER, Line
from speedrun.report.schedules import COLORS, GRID, INK, text

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 170, 150, 56, 24


def ablation_svg(title: str, lines: list[Line]) -> str:
    shown = [line for line in lines if line.loss is not None]
    height = TOP + ROW * len(shown) + 40
    ends = [
        x for line in shown if line.loss for x in (line.loss.mean, line.loss.low, line.loss.high) if math.isfinite(x)
    ]
    low, high = min(0.0, *ends), max(0.0, *ends)
    span = (high - low) or 1.0

    def x(loss: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(loss, low), high) - low) / span

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(16, 22, title, size=14),
        text(16, 40, "loss at equal tokens when it is turned off, 95 % intervals; right of the line the switch helps"),
    ]
    parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP - 8}" y2="{height - 32}" stroke="{INK}"/>')
    for end in (low, high):
        parts.append(f'<line x1="{x(end):.1f}" x2="{x(end):.1f}" y1="{TOP - 8}" y2="{height - 32}" stroke="{GRID}"/>')
        parts.append(text(x(end), height - 16, f"{end:+.3f}", anchor="middle"))
    for k, line in enumerate(shown):
        assert line.loss is not None
        y = TOP + ROW * k + 6
        color = COLORS[1] if line.p is not None and line.p < 0.05 else "#7f8c8d"
        parts.append(
            f'<line x1="{x(line.loss.low):.1f}" x2="{x(line.loss.high):.1f}" y1="{y}" y2="{y}" stroke="{color}" '
            'stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{x(line.loss.mean):.1f}" cy="{y}" r="4" fill="{color}"/>')
        parts.append(text(LEFT - 10, y + 4, "a tenth shorter" if line.name == SHORTER else line.name, anchor="end"))
        worth = "" if line.to_target is None else f"{100 * math.expm1(line.to_target.mean):+.1f} % time to loss"
        parts.append(text(WIDTH - RIGHT + 12, y + 4, f"{line.loss.mean:+.4f}  {worth}"))
    return "\n".join([*parts, "</svg>", ""])
