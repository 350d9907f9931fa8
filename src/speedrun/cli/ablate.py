"""`speedrun ablate`: what each switch of a recipe is worth."""

from collections.abc import Sequence

from speedrun.cli.common import console, grid, parse, say
from speedrun.experiments import ablate
from speedrun.experiments.children import terminable
from speedrun.files import write_atomic
from speedrun.report.ablation import ablation_svg
from speedrun.templates import markdown


@terminable()
def main(args: Sequence[str]) -> int:
    given = parse(ablate.Ablate, "ablate", args, about=ablate.__doc__)
    lines = ablate.run(given, console)
    rows = ablate.table(lines)
    grid(rows)
    title = f"{given.recipe} without each of its switches"
    for file, content in ((given.markdown, markdown(rows)), (given.plot, ablation_svg(title, lines))):
        if file is not None:
            write_atomic(file, content)
            say(f"written to {file}")
    return 0
