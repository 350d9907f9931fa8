"""`speedrun sweep`: search a recipe's fields within a budget."""

from collections.abc import Sequence

from speedrun.cli.common import console, parse
from speedrun.experiments import sweep
from speedrun.experiments.children import terminable


@terminable()
def main(args: Sequence[str]) -> int:
    return sweep.run(parse(sweep.Sweep, "sweep", args, about=sweep.__doc__), console)
