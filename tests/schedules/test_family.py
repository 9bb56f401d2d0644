"""Families: what every row of the registry says."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import FAMILIES, Choice, build


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_field_says_something(family):
    assert all((family.summary, family.source, family.placement, family.restrictions, family.bubble, family.memory))
    assert family.advice
    assert all(option.help and option.default for option in family.options.values())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_defaults_are_among_the_choices(family):
    choices = [option for option in family.options.values() if isinstance(option, Choice)]

    assert all(option.default in option.choices for option in choices)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_can_make_its_own_example(family):
    ranks, microbatches = family.example

    assert build(family.name, ranks=ranks, microbatches=microbatches).num_ranks == ranks


def test_options_are_read_under_the_name_of_the_family():
    assert FAMILIES["1f1b"].read_options({"warmup": "eager"}).word("warmup") == "eager"
    with pytest.raises(ConfigError, match="sequential has no option 'warmup'"):
        FAMILIES["sequential"].read_options({"warmup": "eager"})


def test_stages_per_rank_are_the_first_that_a_family_takes_unless_options_decide():
    plain, waves = FAMILIES["1f1b"], FAMILIES["hanayo"]

    assert plain.default_stages_per_rank(plain.read_options({})) == 1
    assert waves.default_stages_per_rank(waves.read_options({})) == 2
    assert waves.default_stages_per_rank(waves.read_options({"waves": 3})) == 6
