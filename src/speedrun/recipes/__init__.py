"""Recipes: how a track is run. One file per step of the lineage; `get_recipe(name, track)` is the way in."""

from collections.abc import Callable
from pathlib import Path

from speedrun.errors import UserError, nearest
from speedrun.files import read_json
from speedrun.recipes import adamw, gpt2, interleaved, medium, medium_before, muon, normuon, orthogonal_nesterov
from speedrun.recipes.published import get_curve
from speedrun.tracks import TRACKS
from speedrun.training import Recipe

__all__ = [
    "DEFAULT",
    "LINEAGE",
    "RECIPES",
    "default_for",
    "get_curve",
    "get_recipe",
    "read_recipe",
    "track_of",
]

LINEAGE: dict[str, dict[str, Callable[[], Recipe]]] = {
    "gpt2": gpt2.SIZES,
    "adamw": adamw.SIZES,
    "orthogonal-nesterov": orthogonal_nesterov.SIZES,
    "muon": muon.SIZES,
    "normuon": normuon.SIZES,
    "interleaved": interleaved.SIZES,
    "medium-before": medium_before.SIZES,
    "medium": medium.SIZES,
}
PRESETS = {"normuon-24gb": {"short": normuon.short_24gb}}
"""Recipes of the lineage whose rows are too long for a smaller GPU, with shorter ones. The others fit as they are."""
RECIPES = LINEAGE | PRESETS
DEFAULT = "normuon"


def default_for(track: str) -> str:
    """The recipe that is taken on a track where none is named: the default, or else the newest that has the size."""
    return DEFAULT if track in LINEAGE[DEFAULT] else [name for name, sizes in LINEAGE.items() if track in sizes][-1]


def is_file(name: str) -> bool:
    """Whether a recipe is named by the file of a stored one, such as a record's recipe.json."""
    return name.endswith(".json")


def read_recipe(file: str | Path) -> Recipe:
    return read_json(Path(file), Recipe, "Name the file of a stored recipe, or one that `speedrun recipes` lists.")


def track_of(name: str | None) -> str:
    """The track on which a recipe is trained where no track is named."""
    track = read_recipe(name).track if name and is_file(name) else "pocket"
    return track if track in TRACKS else "pocket"


def get_recipe(name: str, track: str) -> Recipe:
    """The recipe at the size of a track, by its name or by its file."""
    if is_file(name):
        recipe = read_recipe(name)
        size = recipe.track
        if size != track and size in TRACKS:
            raise UserError(f"{name} has the size of track {size!r}, not {track!r}; pass --track {size}.")
        return recipe
    if name not in RECIPES:
        raise UserError(f"Unknown recipe {name!r}.{nearest(name, RECIPES)}")
    sizes = RECIPES[name]
    if track not in sizes:
        raise UserError(f"Recipe {name!r} has no size for track {track!r}; it has {', '.join(sizes)}.")
    return sizes[track]()
