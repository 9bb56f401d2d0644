"""Families: what every row of the registry says."""

import pytest

from penstock.errors import ConfigError
from penstock.placement import Placement
from penstock.schedules import FAMILIES, Choice, Options, Shape
from penstock.schedules.family import by_rank, loop
from penstock.schedules.phases import b, f, pair, phases, repeat
from tests.support.grids import assert_grid


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_field_says_something(family):
    assert all((family.summary, family.source, family.placement, family.restrictions, family.bubble, family.memory))
    assert family.advice
    assert all(option.help and option.default for option in family.options.values())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_defaults_are_among_the_choices(family):
    choices = [option for option in family.options.values() if isinstance(option, Choice)]

    assert all(option.default in option.choices for option in choices)


def test_options_are_read_under_the_name_of_the_family():
    assert FAMILIES["1f1b"].read_options({"warmup": "eager"}).word("warmup") == "eager"
    with pytest.raises(ConfigError, match="sequential has no option 'warmup'"):
        FAMILIES["sequential"].read_options({"warmup": "eager"})


def test_stages_per_rank_are_the_first_that_a_family_takes_unless_options_decide():
    plain, waves = FAMILIES["1f1b"], FAMILIES["hanayo"]

    assert plain.default_stages_per_rank(plain.read_options({})) == 1
    assert waves.default_stages_per_rank(waves.read_options({})) == 2
    assert waves.default_stages_per_rank(waves.read_options({"waves": 3})) == 6


def test_phases_of_one_rank_make_the_schedule_of_all():
    def order(rank, shape, options):
        return phases(
            repeat(1, f(rank)), repeat(shape.num_microbatches - 1, pair(f(rank), b(rank))), repeat(1, b(rank))
        )

    schedule = by_rank("mine", order)(Shape(2, 2, 3, 1), Options())

    assert_grid(schedule, "0F0 (0F1;0B0) (0F2;0B1) 0B2\n1F0 (1F1;1B0) (1F2;1B1) 1B2")
    assert (schedule.name, schedule.placement.style) == ("mine", "line")


def test_two_routes_take_half_of_the_microbatches_each():
    def order(rank, shape, options):
        return phases(repeat(2, f(rank)), repeat(2, f(3 - rank, first=2)))

    schedule = by_rank("both", order, lambda shape: Placement.bidirectional(2))(Shape(2, 4, 4, 1), Options())

    assert_grid(schedule, "0F0 0F1 3F2 3F3\n1F0 1F1 2F2 2F3")
    assert schedule.route_of_microbatch.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("stages", "style"), [(3, "line"), (4, "loop"), (6, "loop")])
def test_a_loop_of_one_stage_per_rank_is_a_line(stages, style):
    placement = loop(Shape(3, stages, 1, 1))

    assert (placement.style, placement.num_stages) == (style, stages)
