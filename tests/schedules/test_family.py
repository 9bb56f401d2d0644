"""Families: what every row of the registry says."""

import pytest

from penstock.schedules import FAMILIES, Choice, Shape
from penstock.schedules.family import loop


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_field_says_something(family):
    assert all((family.summary, family.source, family.placement, family.restrictions, family.bubble, family.memory))
    assert family.advice
    assert all(option.help and option.default for option in family.options.values())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_defaults_are_among_the_choices(family):
    choices = [option for option in family.options.values() if isinstance(option, Choice)]

    assert all(option.default in option.choices for option in choices)


def test_stages_per_rank_are_the_first_that_a_family_takes_unless_options_decide():
    plain, waves = FAMILIES["1f1b"], FAMILIES["hanayo"]

    assert plain.default_stages_per_rank(plain.read_options({})) == 1
    assert waves.default_stages_per_rank(waves.read_options({})) == 2
    assert waves.default_stages_per_rank(waves.read_options({"waves": 3})) == 6


@pytest.mark.parametrize(("stages", "style"), [(3, "line"), (4, "loop"), (6, "loop")])
def test_a_loop_of_one_stage_per_rank_is_a_line(stages, style):
    placement = loop(Shape(3, stages, 1, 1))

    assert (placement.style, placement.num_stages) == (style, stages)
