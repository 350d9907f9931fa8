"""`speedrun challenge`: repeat a race or record on this machine."""

from collections.abc import Sequence

from speedrun.cli.common import console, parse
from speedrun.experiments.children import terminable
from speedrun.experiments.commands import Challenge, challenge


@terminable()
def main(args: Sequence[str]) -> int:
    about = "Race a record against its baseline again, on this machine, with fresh seeds."
    return challenge(parse(Challenge, "challenge", args, about=about), console)
