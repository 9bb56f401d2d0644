"""`hanayo`: its waves, and its time and memory as published."""

import pytest

from penstock.errors import ConfigError
from penstock.placement import Placement
from penstock.schedules import build
from tests.schedules.timing import bubble, timeline


def test_a_round_ends_its_waves_before_the_next_round_begins():
    forwards = [str(action) for action in build("hanayo", ranks=2, microbatches=5, waves=2, forward_only=True)[0]]

    down = [text for text in forwards if text[0] in "04"]
    assert down == ["0F0", "0F1", "4F0", "4F1", "0F2", "0F3", "0F4", "4F2", "4F3", "4F4"]


def test_waves_and_stages_per_rank_say_the_same():
    by_waves = build("hanayo", ranks=3, microbatches=3, waves=2)

    assert by_waves.placement == Placement.wave(3, 12)
    assert by_waves == build("hanayo", ranks=3, microbatches=3, stages_per_rank=4)
    assert by_waves == build("hanayo", ranks=3, microbatches=3, stages=12, waves=2)
    assert build("hanayo", ranks=3, microbatches=3).num_stages == 6


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 4), (2, 7)])
@pytest.mark.parametrize(("ranks", "waves"), [(1, 2), (2, 3), (4, 1), (4, 2)])
def test_the_bubble_is_the_same_for_any_number_of_microbatches(ranks, waves, forward, backward):
    costs = (forward, backward / 2, backward / 2)

    for microbatches in (ranks, ranks + 1, 2 * ranks - 1, 2 * ranks + 1, 4 * ranks):
        assert bubble("hanayo", ranks, microbatches, costs, waves=waves) == 2 * (ranks - 1) * backward


@pytest.mark.parametrize(("ranks", "waves"), [(2, 1), (3, 2), (4, 2), (2, 3)])
def test_memory_is_that_of_a_round_on_every_rank_however_many_there_are(ranks, waves):
    assert timeline("hanayo", ranks, 6 * ranks, waves=waves).peak_activations == [2 * waves * ranks] * ranks


def test_a_larger_round_holds_more():
    assert timeline("hanayo", 4, 17, waves=2).peak_activations == [2 * 4 + 2 * 5] * 4


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"stages_per_rank": 3}, "stages_per_rank: hanayo runs whole waves .* got 3 stages per rank; use an even"),
        ({"stages": 9}, "stages: hanayo runs whole waves .* got 9 stages on 4 ranks"),
        ({"stages_per_rank": 1}, "stages_per_rank: hanayo runs whole waves .* got 1 stage per rank; use an even"),
        ({"stages_per_rank": 2, "waves": 2}, "waves: 2 waves of 2 stages per rank, got 2; give one of the two"),
    ],
)
def test_stages_that_make_no_whole_waves_are_refused_with_a_fix(asked, told):
    with pytest.raises(ConfigError, match=told):
        build("hanayo", ranks=4, microbatches=4, **asked)


def test_waves_beyond_all_memory_are_refused_before_they_are_made():
    with pytest.raises(ConfigError, match="fit in memory"):
        build("hanayo", ranks=4, microbatches=4, waves=100_000_000)
