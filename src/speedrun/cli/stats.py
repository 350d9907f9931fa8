"""`speedrun stats`: test losses against a target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from msgspec import Meta

from speedrun.checks import AboveZero
from speedrun.cli.common import parse, say, unset
from speedrun.errors import UserError
from speedrun.experiments import statistics


@dataclass(frozen=True)
class Stats:
    losses: Annotated[tuple[float, ...], tyro.conf.Positional, unset("LOSS ...")]
    """Final validation losses, one per run."""
    target: AboveZero
    """The loss to reach."""
    times: Annotated[tuple[AboveZero, ...], unset("SECONDS ...")] = ()
    """Seconds of the runs, printed as in records."""
    alpha: Annotated[float, Meta(gt=0, lt=0.5)] = statistics.ALPHA
    """p below which the losses are valid."""


def main(args: Sequence[str]) -> int:
    about = "What these losses prove about the target. Exit code 0 if they are valid, 1 if not."
    given: Stats = parse(Stats, "stats", args, about=about)
    if not all(map(math.isfinite, given.losses)):
        bad = next(x for x in given.losses if not math.isfinite(x))
        raise UserError(f"A loss is {bad}: a failed run cannot be averaged, and leaving it out would flatter.")
    p = float(statistics.below(np.array(given.losses), given.target))
    spreads = {"losses": statistics.spread(given.losses)}
    spreads |= {"time": statistics.spread(given.times)} if given.times else {}
    say("\n".join([f"p={p:.4f}", *(f"{what}: {values}" for what, values in spreads.items())]))
    gap, n = given.target - float(np.mean(given.losses)), len(given.losses)
    where = f"the mean of {n} losses is {abs(gap):.4f} {'below' if gap >= 0 else 'above'} the target {given.target:g}"
    if p < given.alpha:
        say(f"valid: {where}")
        return 0
    needed = statistics.needed(gap, float(np.std(given.losses, ddof=1)), given.alpha)
    more = "no number of runs up to 1000 would decide" if needed is None else ""
    if needed is not None:
        more = f"with this deviation {max(1, needed - n)} more runs would decide, with a chance of {statistics.POWER:g}"
    say(f"not valid: {where}; {more}")
    return 1
