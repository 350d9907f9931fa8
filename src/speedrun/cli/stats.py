"""`speedrun stats`: test losses against a target."""

from collections.abc import Sequence

from speedrun.cli.common import console, parse
from speedrun.experiments.commands import Stats, stats


def main(args: Sequence[str]) -> int:
    about = "What these losses prove about the target. Exit code 0 if they are valid, 1 if not."
    return stats(parse(Stats, "stats", args, about=about), console)
