"""Record times over the dates, as one SVG picture.

speedrun records --plot records.svg
"""

from datetime import date

from speedrun.race.records import Record
from speedrun.report.draw import COLORS, INK, dot, line, picture, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 70, 150, 50, 46


def records_svg(track: str, records: list[Record]) -> str:
    """A step down for every record; each point carries its name."""
    days = [r.date.toordinal() for r in records]
    first, last = min(days), max(days)
    highest = max(r.official for r in records)

    def x(day: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((day - first) / (last - first) if last > first else 0.5)

    def y(seconds: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - seconds / highest)

    title = f"Official time of the records on the {track} track, seconds"
    parts = [text(LEFT, 24, title, size=14)]
    for seconds in (0.0, highest / 2, highest):
        parts.append(line(LEFT, y(seconds), WIDTH - RIGHT, y(seconds)))
        parts.append(text(LEFT - 6, y(seconds) + 4, f"{seconds:.0f}", anchor="end"))
    for day in sorted({first, last}):
        parts.append(text(x(day), HEIGHT - BOTTOM + 18, date.fromordinal(day).isoformat(), anchor="middle"))
    # The slower a record, the earlier it was made: records of one day follow each other, too.
    points = sorted(zip(days, records, strict=True), key=lambda pair: (pair[0], -pair[1].official))
    path = ""
    for day, record in points:
        path += f"{'H' if path else 'M'}{x(day):.1f}{'V' if path else ' '}{y(record.official):.1f}"
    parts.append(f'<path d="{path}" fill="none" stroke="{COLORS[1]}" stroke-width="1.6"/>')
    for day, record in points:
        parts.append(dot(x(day), y(record.official), INK, radius=4))
        parts.append(text(x(day) + 8, y(record.official) - 6, f"{record.name}: {record.official:.1f}"))
    told = ", ".join(f"{record.name} {record.official:.1f} on {record.date}" for _, record in points)
    return picture(WIDTH, HEIGHT, parts, f"{title}: {told}.")
