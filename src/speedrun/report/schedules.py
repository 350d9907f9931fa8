"""A recipe's schedules over its steps, as one SVG picture.

    speedrun recipes show interleaved --plot schedules.svg

One panel per quantity that changes, all over the same steps.
"""

from collections.abc import Callable, Sequence

from speedrun.errors import plural
from speedrun.report.draw import COLORS, Frame, Series, picture, text
from speedrun.training import Recipe, Stage

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 760, 96, 86, 20, 44, 38

Lines = Sequence[tuple[str, Sequence[float | None]]]  # a name and one value per step; None: nothing to draw


def panels(recipe: Recipe) -> list[tuple[str, Lines]]:
    """(title, lines) of everything that the schedule decides."""
    schedule = recipe.schedule
    stages = [schedule.at(s) for s in range(schedule.total)]

    def over(value: Callable[[Stage], float | None]) -> list[float | None]:
        return [value(stage) for stage in stages]

    found: list[tuple[str, Lines]] = [
        ("learning rate factor", [("", over(lambda s: s.lr))]),
        ("tokens per step", [("", over(lambda s: s.tokens))]),
    ]
    if schedule.has_windows:
        both = [s.windows for s in stages if s.windows]
        lines = [("long", [w.long for w in both]), ("short", [w.short for w in both])]
        found.append(("attention window, tokens", lines))
    if stages[0].momentum is not None:
        found.append(("Muon momentum", [("", over(lambda s: s.momentum))]))
    if schedule.mtp_tokens > 1:
        names = ("next token", "second", "third")

        def weight(k: int) -> list[float | None]:
            return over(lambda s: s.mtp_weights[k] if k < len(s.mtp_weights) else None)

        found.append(("loss weights", [(name, weight(k)) for k, name in enumerate(names)]))
    if schedule.untie_step is not None:
        found.append(("head tied to the embedding", [("", over(lambda s: float(s.tied)))]))
    return found


def schedule_svg(recipe: Recipe) -> str:
    """The whole picture."""
    drawn = panels(recipe)
    total = recipe.schedule.total
    height = TOP + len(drawn) * (PANEL + GAP) + 16
    title = f"{recipe.name} at {recipe.track} size: {plural(total, 'step')}"
    if recipe.optim.every > 1:
        title += f"; Adam steps once in {recipe.optim.every}"
    parts = [text(LEFT, 22, title, size=14)]
    for number, (name, lines) in enumerate(drawn):
        top = TOP + number * (PANEL + GAP)
        parts += panel(name, lines, top, total, recipe.schedule.steps)
    return picture(WIDTH, height, parts, f"Schedules of {title}: {', '.join(name for name, _ in drawn)}.")


def panel(title: str, lines: Lines, top: int, total: int, scheduled: int) -> list[str]:
    values = [v for _, line in lines for v in line if v is not None]
    low, high = min(0.0, *values), max(values)
    if title == "Muon momentum":  # its whole range is a tenth; from zero it would look flat
        low = min(values) - 0.01
    high = high if high > low else low + 1.0

    frame = Frame(LEFT, top, WIDTH - LEFT - RIGHT, PANEL, (0, max(1, total - 1)), (low, high))
    room = 60 * total / frame.width  # steps that a label covers
    steps = (0, total - 1) if total - scheduled < room else (0, scheduled, total - 1)
    parts = frame.axes("", title, x={s: f"{s:,}" for s in steps}, y={v: f"{v:g}" for v in (low, high)})
    for k, (name, line) in enumerate(lines):
        color = COLORS[k % len(COLORS)]
        for points in pieces(line):
            parts += frame.draw(Series(name, color, points))
        if name:
            parts.append(text(WIDTH - RIGHT - 76 * (len(lines) - k) + 10, top - 6, name, color=color))
    return parts


def pieces(line: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Connected segments; a constant value is one segment, whatever the number of steps."""
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in enumerate(line):
        if value is None:
            found.append([])
        elif not (0 < step < len(line) - 1 and line[step - 1] == value == line[step + 1]):
            found[-1].append((step, value))
    return [points for points in found if points]
