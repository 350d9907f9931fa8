"""`speedrun verify`: recompute a race or record, and report what does not agree."""

from collections.abc import Sequence

from speedrun.cli.common import console, parse
from speedrun.experiments.commands import Verify, verify


def main(args: Sequence[str]) -> int:
    about = "Recompute a race or record from its run folders, and report what does not agree."
    return verify(parse(Verify, "verify", args, about=about), console)
