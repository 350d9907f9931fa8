"""`speedrun ablate`: what each switch of a recipe is worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun.arguments import narrow
from speedrun.cli.common import console, grid, parse, say
from speedrun.experiments import ablate, handle_sigterm
from speedrun.files import write_atomic
from speedrun.report import ablation_svg
from speedrun.templates import markdown


@dataclass(frozen=True)
class Ablate(ablate.AblationArgs):
    markdown: Path | None = None
    """Also write the table as Markdown into this file."""
    plot: Path | None = None
    """Also draw the effects into this file, as SVG."""


METAVARS = {"set": "FIELD=VALUE ...", "switches": "SWITCH ...", "pairs": "SWITCH+SWITCH ..."}
METAVARS |= {"markdown": "FILE.md", "plot": "FILE.svg"}


@handle_sigterm()
def main(args: Sequence[str]) -> int:
    given: Ablate = parse(Ablate, "ablate", args, about=ablate.__doc__, metavars=METAVARS)
    lines = ablate.run_ablation(narrow(given, ablate.AblationArgs), console)
    rows = ablate.ablation_table(lines)
    grid(rows)
    title = f"{given.recipe} without each of its switches"
    for file, content in ((given.markdown, markdown(rows)), (given.plot, ablation_svg(title, lines))):
        if file is not None:
            write_atomic(file, content)
            say(f"written to {file}")
    return 0
