"""`speedrun race`: plan, run and judge a race."""

from collections.abc import Sequence

from speedrun.cli.common import console, parse
from speedrun.experiments import commands
from speedrun.experiments.children import terminable
from speedrun.experiments.race import Race


@terminable()
def main(args: Sequence[str]) -> int:
    about = "Plan, run and judge a race. Exit code 0 for `valid` and `faster`, 1 for any other verdict."
    return commands.hold(parse(Race, "race", args, about=about), console)
