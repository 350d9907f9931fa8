"""What each switch is worth, as one SVG picture: a point and its interval per switch.

speedrun ablate --recipe normuon --plot ablation.svg
"""

import math

from speedrun.experiments import SHORTER, Effect, Line
from speedrun.report import draw
from speedrun.report.draw import COLORS, FAINT, INK, Frame, dot, picture, text

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 150, 170, 76, 24
LOSS, TIME = WIDTH - 104, WIDTH - 8  # where the columns end
FAR = 3.0


def bounds(effects: list[Effect]) -> tuple[float, float]:
    """The ends of the axis. An effect more than three times the next one would flatten all others: it is left out."""
    by_size = sorted(effects, key=lambda e: abs(e.mean))
    while len(by_size) > 1 and abs(by_size[-1].mean) > FAR * abs(by_size[-2].mean) > 0:
        by_size.pop()
    ends = [x for e in by_size for x in (e.mean, e.low, e.high) if math.isfinite(x)]
    return min(0.0, *ends), max(0.0, *ends)


def ablation_svg(title: str, lines: list[Line]) -> str:
    shown = [line for line in lines if line.loss is not None]
    height = TOP + ROW * len(shown) + 40
    low, high = bounds([line.loss for line in shown if line.loss])
    frame = Frame(LEFT, TOP - 8, WIDTH - LEFT - RIGHT, height - TOP - 24, (low, high), (0, 1))

    def x(loss: float) -> float:
        return frame.at(loss, 0)[0]

    parts = [
        *frame.axes("", "", x={end: f"{end:+.3f}" for end in (low, high)} | {0.0: "0"}, y={}, tall=True),
        draw.line(x(0), TOP - 8, x(0), height - 32, color=INK),
        text(16, 22, title, size=14),
        text(16, 40, "loss at equal tokens when it is turned off, 95 % intervals; right of the line the switch helps;"),
        text(16, 54, "coloured where p < 0.05 after Holm's correction; time is that to the same loss"),
        text(LOSS, TOP - 14, "loss", anchor="end"),
        text(TIME, TOP - 14, "time", anchor="end"),
    ]
    for k, line in enumerate(shown):
        assert line.loss is not None
        y = TOP + ROW * k + 6
        color = COLORS[1] if line.p is not None and line.p < 0.05 else FAINT
        parts.append(draw.line(x(line.loss.low), y, x(line.loss.high), y, color=color, width=2))
        if low <= line.loss.mean <= high:
            parts.append(dot(x(line.loss.mean), y, color, radius=4))
        else:  # the number beside it says how far
            arrow = "\u25b6" if line.loss.mean > high else "\u25c0"
            parts.append(text(x(line.loss.mean), y + 5, arrow, anchor="middle", color=color))
        parts.append(text(LEFT - 10, y + 4, "a tenth shorter" if line.name == SHORTER else line.name, anchor="end"))
        parts.append(text(LOSS, y + 4, f"{line.loss.mean:+.4f}", anchor="end"))
        if line.to_target is not None:
            parts.append(text(TIME, y + 4, f"{100 * math.expm1(line.to_target.mean):+.1f} %", anchor="end"))
    summary = ", ".join(f"{line.name} {line.loss.mean:+.4f}" for line in shown if line.loss)
    return picture(WIDTH, height, parts, f"{title}. Loss when a switch is turned off: {summary}.")
