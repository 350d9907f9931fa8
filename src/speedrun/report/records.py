"""Record times over the dates, as one SVG picture.

speedrun records --plot records.svg
"""

from speedrun.experiments import Record
from speedrun.report.draw import COLORS, INK, Frame, Series, dot, picture, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 70, 150, 50, 46


def records_svg(track: str, records: list[Record]) -> str:
    """A step down for every record; each point carries its name."""
    # The slower a record, the earlier it was made: records of one day follow each other, too.
    records = sorted(records, key=lambda r: (r.date, -r.official))
    points = [(float(r.date.toordinal()), r.official) for r in records]
    title = f"Official time of the records on the {track} track, seconds"
    first, last, highest = points[0][0], points[-1][0], max(time for _, time in points)
    frame = Frame(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM, (first, last), (0, highest))
    dates = {first: records[0].date.isoformat(), last: records[-1].date.isoformat()}
    parts = frame.axes("", "", x=dates, y={s: f"{s:.0f}" for s in (0.0, highest / 2, highest)})
    parts.append(text(LEFT, 24, title, size=14))
    steps = [(day, time) for k, (day, _) in enumerate(points) for _, time in points[max(0, k - 1) : k + 1]]
    parts += frame.draw(Series(title, COLORS[1], steps))
    for record, point in zip(records, points, strict=True):
        x, y = frame.at(*point)
        parts += [dot(x, y, INK, radius=4), text(x + 8, y - 6, f"{record.name}: {record.official:.1f}")]
    summary = ", ".join(f"{record.name} {record.official:.1f} on {record.date}" for record in records)
    return picture(WIDTH, HEIGHT, parts, f"{title}: {summary}.")
