"""`speedrun recipes`: list the recipes, or show every field of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Column, Table

from speedrun.cli.common import grid, parse, say, unset
from speedrun.errors import UserError, plural
from speedrun.files import write_atomic
from speedrun.model import count_parameters
from speedrun.recipes import DEFAULT, RECIPES, default_for, get_recipe
from speedrun.report import schedule_svg
from speedrun.tracks import get_track
from speedrun.training import Recipe, fields_of, meanings


@dataclass(frozen=True)
class Recipes:
    """List the recipes, or show every field of one."""

    action: Annotated[str, tyro.conf.Positional] = "list"
    """`list`, or `show NAME`."""
    name: Annotated[str | None, tyro.conf.Positional] = None
    """Which recipe to show."""
    track: str = "pocket"
    """At the size of which track."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Also draw the schedules over the steps into this file."""


def main(args: Sequence[str]) -> int:
    about = "`speedrun recipes` lists them; `speedrun recipes show NAME` explains one."
    given: Recipes = parse(Recipes, "recipes", args, about=about)
    if given.action == "list":
        rows = [("recipe", "sizes", "what")]
        for name, sizes in RECIPES.items():
            called = name + (" (default)" if name == DEFAULT else "")
            rows.append((called, ", ".join(sizes), next(iter(sizes.values()))().about))
        grid(rows)
        say("`speedrun recipes show NAME` lists every field of one.")
        return 0
    if given.action != "show":
        raise UserError(f"Unknown action {given.action!r}; use `speedrun recipes` or `speedrun recipes show NAME`.")
    track_name = get_track(given.track).name
    recipe = get_recipe(given.name or default_for(track_name), track_name)
    show(recipe)
    if given.plot is not None:
        write_atomic(given.plot, schedule_svg(recipe))
        say(f"schedules drawn in {given.plot}")
    return 0


def show(recipe: Recipe) -> None:
    counts = count_parameters(recipe.model)
    say(f"{recipe.name} at {recipe.track} size: {recipe.about}")
    parts = ", ".join(f"{k} {v / 1e6:.2f} M" for k, v in counts.items())
    say(f"{sum(counts.values()) / 1e6:.2f} M parameters ({parts})")
    say(f"{recipe.schedule.tokens / 1e6:,.2f} M training tokens in {plural(recipe.schedule.total, 'step')}")
    grid(recipe.model.table())
    table = Table(Column("field", no_wrap=True), "value", "meaning", box=None)
    sentences = meanings(Recipe)
    for name, value in fields_of(recipe).items():
        if "." in name:
            table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value), sentences[name])
    say(table)
