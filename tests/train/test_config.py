"""A recipe survives run.json, names its differences, and refuses what it does not know."""

import copy
import json

import pytest

from speedrun.errors import UserError
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.train.config import (
    Recipe,
    differences,
    fields_of,
    meanings,
    recipe_from_dict,
    to_dict,
    with_fields,
)

EVERY = [(name, track) for name, sizes in LINEAGE.items() for track in sizes]


@pytest.mark.parametrize(("name", "track"), EVERY)
def test_a_recipe_survives_json(name: str, track: str) -> None:
    recipe = get_recipe(name, track)
    assert recipe_from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe
    assert (recipe.name, recipe.track) == (name, track)


def test_every_field_has_a_meaning() -> None:
    assert set(fields_of(get_recipe("adamw", "pocket"))) == set(meanings(Recipe))


def test_fields_are_changed_by_dotted_name() -> None:
    recipe = with_fields(get_recipe("adamw", "pocket"), {"model.layers": 7, "optim.lr": 0.5, "name": "mine"})
    assert (recipe.model.layers, recipe.optim.lr, recipe.name) == (7, 0.5, "mine")


def test_an_unknown_field_names_its_neighbour() -> None:
    with pytest.raises(UserError, match=r"no field 'optim.lrr'. Did you mean 'optim.lr'"):
        with_fields(get_recipe("adamw", "pocket"), {"optim.lrr": 1})


@pytest.mark.parametrize("change", [{"optim.lr": -1.0}, {"optim.beta1": 1.0}, {"validation.every": 0}])
def test_values_are_checked_when_changed(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        with_fields(get_recipe("adamw", "pocket"), change)


def test_differences_are_listed() -> None:
    a = get_recipe("adamw", "pocket")
    assert differences(a, a) == []
    assert differences(a, with_fields(a, {"model.layers": 9})) == [f"model.layers: {a.model.layers} -> 9"]


def test_a_recipe_of_another_version_is_refused() -> None:
    stored = to_dict(get_recipe("adamw", "pocket"))
    unknown = copy.deepcopy(stored)
    unknown["model"]["wings"] = 2
    with pytest.raises(UserError, match=r"model.wings is unknown"):
        recipe_from_dict(unknown)
    missing = copy.deepcopy(stored)
    del missing["optim"]["lr"]
    with pytest.raises(UserError, match=r"optim.lr is missing"):
        recipe_from_dict(missing)
    with pytest.raises(UserError, match="not an object"):
        recipe_from_dict({**stored, "model": 3})


def test_a_run_from_before_the_compiler_had_fields_can_go_on() -> None:
    recipe = get_recipe("adamw", "pocket")
    stored = to_dict(recipe)
    del stored["compiler"]
    assert recipe_from_dict(stored) == recipe
    stored["compiler"] = {}
    with pytest.raises(UserError, match=r"compiler.coordinate_descent is missing"):
        recipe_from_dict(stored)


def test_an_unknown_recipe_or_size_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'adamw'"):
        get_recipe("adam", "pocket")
    with pytest.raises(UserError, match="it has pocket, short"):
        get_recipe("adamw", "medium")


@pytest.mark.parametrize("field", ["window_ramp", "window_extension"])
def test_no_training_window_is_longer_than_a_document(field: str) -> None:
    """It would never be full, and positions would stretch for distances that do not occur."""
    recipe = get_recipe("interleaved", "short")
    for tokens in (2048, 2176):
        value = (tokens,) if field == "window_ramp" else tokens
        if tokens == recipe.loader.max_document:
            with_fields(recipe, {f"schedule.{field}": value})
        else:
            with pytest.raises(UserError, match=r"A window of 2176 tokens .* \(2048 tokens\); shorten the windows"):
                with_fields(recipe, {f"schedule.{field}": value})
    with_fields(recipe, {"schedule.window_final": 4096})  # the last validation may look further
