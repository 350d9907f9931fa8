"""The picture of a recipe's schedules."""

import xml.etree.ElementTree as ET

import pytest

from speedrun.recipes import LINEAGE, get_recipe
from speedrun.report.schedules import panels, pieces, schedule_svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", LINEAGE)
def test_every_recipe_can_be_drawn(name: str) -> None:
    picture = ET.fromstring(schedule_svg(get_recipe(name, "pocket")))
    words = [t.text for t in picture.iter(f"{SVG}text")]
    assert "learning rate factor" in words
    assert len(list(picture.iter(f"{SVG}path"))) >= 2


def test_what_changes_has_a_panel_with_its_values() -> None:
    drawn = dict(panels(get_recipe("interleaved", "short")))
    assert list(drawn) == [
        "learning rate factor",
        "tokens per step",
        "attention window, tokens",
        "Muon momentum",
        "loss weights",
        "head tied to the embedding",
    ]
    (_, rate) = drawn["learning rate factor"][0]
    assert (rate[0], rate[601], rate[-1]) == (1.0, 1.52, pytest.approx(0.1))
    (_, third) = drawn["loss weights"][2]
    assert third[0] == 0.25
    assert third[600] is None


def test_a_constant_line_is_one_segment_and_gaps_lift_the_pen() -> None:
    assert pieces([1, 1, 1, 1]) == [[(0, 1), (3, 1)]]
    assert pieces([None, 1, None, 2]) == [[(1, 1)], [(3, 2)]]
