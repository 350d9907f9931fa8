"""What each switch is worth, as one SVG picture: a point and its interval per switch.

speedrun ablate --recipe normuon --plot ablation.svg
"""

import math

from speedrun.race.ablate import SHORTER, Line
from speedrun.report import draw
from speedrun.report.draw import COLORS, FAINT, INK, dot, picture, text

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
        text(16, 22, title, size=14),
        text(16, 40, "loss at equal tokens when it is turned off, 95 % intervals; right of the line the switch helps"),
    ]
    for end in (low, high):
        parts.append(draw.line(x(end), TOP - 8, x(end), height - 32))
        parts.append(text(x(end), height - 16, f"{end:+.3f}", anchor="middle"))
    parts.append(draw.line(x(0), TOP - 8, x(0), height - 32, color=INK))
    for k, line in enumerate(shown):
        assert line.loss is not None
        y = TOP + ROW * k + 6
        color = COLORS[1] if line.p is not None and line.p < 0.05 else FAINT
        parts.append(draw.line(x(line.loss.low), y, x(line.loss.high), y, color=color, width=2))
        parts.append(dot(x(line.loss.mean), y, color, radius=4))
        parts.append(text(LEFT - 10, y + 4, "a tenth shorter" if line.name == SHORTER else line.name, anchor="end"))
        worth = "" if line.to_target is None else f"{100 * math.expm1(line.to_target.mean):+.1f} % time to loss"
        parts.append(text(WIDTH - RIGHT + 12, y + 4, f"{line.loss.mean:+.4f}  {worth}"))
    told = ", ".join(f"{line.name} {line.loss.mean:+.4f}" for line in shown if line.loss)
    return picture(WIDTH, height, parts, f"{title}. Loss when a switch is turned off: {told}.")
