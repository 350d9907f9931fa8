"""`speedrun sweep`: search a recipe's fields within a budget."""

from collections.abc import Sequence

from speedrun.cli.common import console, parse
from speedrun.experiments import handle_sigterm, sweep

METAVARS = {"vary": "FIELD=VALUES ...", "fix": "FIELD=VALUE ...", "clock": "SECONDS"}


@handle_sigterm()
def main(args: Sequence[str]) -> int:
    sweep.run_sweep(parse(sweep.SweepArgs, "sweep", args, about=sweep.__doc__, metavars=METAVARS), console)
    return 0
