"""Optimizers are built from the roles that the model declares."""

from typing import get_args

import pytest
import torch
from torch import nn

from speedrun.model.gpt import COUNTED_AS, GPT, MATRICES, ROLES, Role
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.training.optimizers import PARTS, build_optimizer, part_of
from tests.recipes.test_native_scale import part_of as part_of_name


def test_every_role_is_counted_and_has_its_settings() -> None:
    roles = set(get_args(Role))
    assert set(ROLES.values()) == set(COUNTED_AS) == roles
    assert {part_of(role) for role in roles} == set(PARTS)
    assert set(MATRICES) < roles


@pytest.mark.parametrize("name", LINEAGE)
def test_every_parameter_has_the_role_that_its_name_says(name: str) -> None:
    recipe = get_recipe(name, "pocket")
    with torch.device("meta"):
        model = GPT(recipe.model, recipe.context)
    roles = model.param_roles()
    assert list(roles) == [n for n, _ in model.named_parameters()]
    assert {n: part_of(role) for n, role in roles.items()} == {n: part_of_name(n) for n in roles}
    for n, role in roles.items():
        assert (role in MATRICES) == n.endswith(".weight")
        assert role not in MATRICES or role.endswith(n.split(".")[-2]), n


def test_a_parameter_without_a_role_is_refused() -> None:
    model = GPT(get_recipe("adamw", "pocket").model, 8)
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError, match="extra"):
        model.param_roles()


@pytest.mark.parametrize("name", LINEAGE)
def test_every_parameter_is_in_one_group_of_its_part(name: str) -> None:
    recipe = get_recipe(name, "pocket")
    with torch.device("meta"):
        model = GPT(recipe.model, recipe.context)
        optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    roles = dict(zip(model.parameters(), model.param_roles().values(), strict=True))
    found = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(set(found)) == len(roles)
    muon, o = ["blocks"], recipe.optim
    muon += ["gates"] * o.muon.gates + ["smear_gate"] * (o.muon.gates and o.muon.smear_gate)
    for group in optimizer.param_groups:
        expected = muon if "momentum" in group else [group["part"]]
        assert {part_of(roles[p]) for p in group["params"]} <= set(expected)
