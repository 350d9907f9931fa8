"""`speedrun report`: one HTML page of a run or several, a race, a record, an ablation or all records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedrun.cli.common import parse, say, unset
from speedrun.report import pages


@dataclass(frozen=True)
class Report:
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, unset("PATH ...")]
    """A run, race, record or ablation, or the folder of all records; or several runs, beside each other on one page."""
    out: Annotated[Path | None, unset("FILE.html")] = None
    """Where the page goes; default: beside the first folder, with its name and .html."""


def main(args: Sequence[str]) -> int:
    given: Report = parse(Report, "report", args, about=pages.__doc__)
    out = pages.write_page(given.folders, given.out)
    say(f"written to {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0
