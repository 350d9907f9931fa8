"""The validation losses that records published: what a run of the same recipe on the same track should repeat.

Each is one run on eight H100s, from the log that its author put into KellerJordan/modded-nanogpt.
"""

from speedrun.errors import UserError, nearest
from speedrun.training import PublishedCurve

CURVES = {
    curve.record: curve
    for curve in (
        PublishedCurve(
            record="muon",
            track="short",
            source="KellerJordan/modded-nanogpt, record of 10 October 2024, commit b356a1fb",
            losses=((0, 10.9264), (5750, 3.3017), (6000, 3.2859), (6125, 3.2802), (6200, 3.2785)),
            seconds=1339.067,
        ),
        PublishedCurve(
            record="normuon",
            track="short",
            source="KellerJordan/modded-nanogpt, pull request 146, commit edf5cdb7",
            losses=(
                (0, 10.8258), (250, 4.0897), (500, 3.8175), (750, 3.6732), (1000, 3.5690), (1250, 3.4998),
                (1500, 3.4265), (1750, 3.3674), (2000, 3.3208), (2250, 3.2838), (2285, 3.2780),
            ),
            seconds=139.804,
        ),
        PublishedCurve(
            record="interleaved",
            track="short",
            source="KellerJordan/modded-nanogpt, pull request 190, commit 13badcf9",
            losses=(
                (0, 10.8289), (250, 4.6059), (500, 4.2909), (750, 4.0140), (1000, 3.7744), (1250, 3.5321),
                (1500, 3.3997), (1750, 3.3015), (1840, 3.2763),
            ),
            seconds=112.767,
        ),
        PublishedCurve(
            record="medium",
            track="medium",
            source="KellerJordan/modded-nanogpt, pull request 188, commit d7011639",
            losses=(
                (0, 10.8318), (250, 4.5266), (500, 4.0326), (750, 3.6401), (1000, 3.4782), (1500, 3.3339),
                (2000, 3.2324), (2500, 3.1588), (3000, 3.0970), (3500, 3.0361), (4000, 2.9816), (4500, 2.9337),
                (4740, 2.9165),
            ),
            seconds=1041.071,
        ),
    )
}  # fmt: skip


def get_curve(name: str | None, recipe: str, track: str) -> PublishedCurve | None:
    """The curve of a record on this track; `name` None: that of the recipe itself, if there is one; "none": none."""
    if name == "none":
        return None
    if name is None:
        own = CURVES.get(recipe)
        return own if own and own.track == track else None
    if name not in CURVES:
        raise UserError(f"Unknown curve {name!r}.{nearest(name, [*CURVES, 'none'])}")
    if CURVES[name].track != track:
        here = [curve.record for curve in CURVES.values() if curve.track == track]
        raise UserError(
            f"--curve {name} is of track {CURVES[name].track!r}, but the run is on track {track!r}; "
            f"pass --curve {' or '.join([*here, 'none'])}."
        )
    return CURVES[name]
