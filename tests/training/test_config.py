"""A recipe survives run.json, names its differences, and refuses what it does not know."""

import json
from typing import Any

import pytest

from speedrun.errors import UserError
from speedrun.files import from_json
from speedrun.recipes import RECIPES, get_recipe
from speedrun.training.config import (
    Recipe,
    differences,
    fields_of,
    meanings,
    to_dict,
    with_fields,
)


def recipe_from_dict(stored: dict[str, Any]) -> Recipe:
    return from_json(stored, Recipe, "run.json", "Restore it.")


EVERY = [(name, track) for name, sizes in RECIPES.items() for track in sizes]


@pytest.mark.parametrize(("name", "track"), EVERY)
def test_a_recipe_survives_json(name: str, track: str) -> None:
    recipe = get_recipe(name, track)
    assert recipe_from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe
    assert (recipe.name, recipe.track) == (name, track)


def test_every_field_has_a_meaning() -> None:
    assert set(fields_of(get_recipe("adamw", "pocket"))) == set(meanings(Recipe))


def test_fields_are_changed_by_dotted_name() -> None:
    recipe = with_fields(get_recipe("adamw", "pocket"), {"model.num_layers": 7, "optim.lr": 0.5, "name": "mine"})
    assert (recipe.model.num_layers, recipe.optim.lr, recipe.name) == (7, 0.5, "mine")


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
    assert differences(a, with_fields(a, {"model.num_layers": 9})) == [f"model.num_layers: {a.model.num_layers} -> 9"]


def test_a_field_that_came_later_has_its_default() -> None:
    recipe = get_recipe("adamw", "pocket")
    stored = to_dict(recipe)
    del stored["compiler"]  # a whole part
    del stored["model"]["embeddings"]["smear"]
    assert recipe_from_dict(stored) == recipe
    del stored["name"]  # which always existed
    with pytest.raises(UserError, match=r"run.json is damaged: Object missing required field `name`. Restore it."):
        recipe_from_dict(stored)


@pytest.mark.parametrize(
    ("part", "field", "value", "says"),
    [
        ("schedule", "xyz", 2, "run.json has the field 'schedule.xyz', which this version of speedrun does not know."),
        ("model", "num_layer", 2, "'model.num_layer', which .* does not know. Did you mean 'num_layers'"),
        ("model", "num_layers", "3", "damaged at model.num_layers: Expected `int`, got `str`"),
        ("model", "num_layers", 3.0, "damaged at model.num_layers: Expected `int`, got `float`"),
        ("model", "num_layers", 0, "damaged at model.num_layers: Expected `int` >= 1"),
        ("model", "head", {"softcap": "soft"}, "damaged at model.head.softcap: Invalid enum value 'soft'"),
        ("model", "num_heads", 7, "damaged at model: model.dim 128 does not split into 7 heads"),
        ("optim", "lr", -1.0, "damaged at optim.lr: Expected `float` >= 0.0"),
        ("schedule", "warmup", 2.0, "damaged at schedule.warmup: Expected `float` <= 1.0"),
        ("optim", "muon", None, "damaged at optim.muon: Expected `object`, got `null`"),
    ],
)
def test_what_a_stored_recipe_cannot_have_is_named(part: str, field: str, value: object, says: str) -> None:
    stored = to_dict(get_recipe("adamw", "pocket"))
    stored[part][field] = value
    with pytest.raises(UserError, match=says):
        recipe_from_dict(stored)


def test_an_unknown_recipe_or_size_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'adamw'"):
        get_recipe("adam", "pocket")
    with pytest.raises(UserError, match="it has pocket, short"):
        get_recipe("adamw", "medium")


@pytest.mark.parametrize("field", ["window_ramp", "window_extra"])
def test_no_training_window_is_longer_than_a_document(field: str) -> None:
    """It would never be full, and positions would stretch for distances that do not occur."""
    recipe = get_recipe("interleaved", "short")
    for tokens in (2048, 2176):
        value = (tokens,) if field == "window_ramp" else tokens
        if tokens == recipe.loader.max_doc_len:
            with_fields(recipe, {f"schedule.{field}": value})
        else:
            with pytest.raises(UserError, match=r"A window of 2176 tokens .* \(2048 tokens\); shorten the windows"):
                with_fields(recipe, {f"schedule.{field}": value})
    with_fields(recipe, {"schedule.window_final": 4096})  # the last validation may look further
