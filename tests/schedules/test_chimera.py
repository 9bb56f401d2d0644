"""`chimera`: its order against 1F1B, and its time and memory as published."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build
from tests.schedules.timing import bubble, timeline


def one_way(schedule, rank, stage, first_microbatch):
    """What a rank runs of one stage, with microbatches counted from the first of its direction."""
    return [(action.kind, action.microbatch - first_microbatch) for action in schedule[rank] if action.stage == stage]


@pytest.mark.parametrize("ranks", [4, 6, 8, 12])
def test_with_as_many_microbatches_as_ranks_each_direction_is_1f1b(ranks):
    both = build("chimera", ranks=ranks, microbatches=ranks)
    plain = build("1f1b", ranks=ranks, microbatches=ranks // 2)

    for rank in range(ranks):
        assert one_way(both, rank, rank, 0) == one_way(plain, rank, rank, 0)
        place = ranks - 1 - rank
        assert one_way(both, rank, ranks + place, ranks // 2) == one_way(plain, place, place, 0)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (2, 3), (1, 2)])
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_the_bubble_is_that_of_its_formula_for_any_number_of_microbatches(ranks, forward, backward):
    costs = (forward, backward / 2, backward / 2)

    assert bubble("chimera", ranks, ranks, costs) == (ranks - 2) * backward
    for microbatches in (ranks + 2, 2 * ranks, 5 * ranks + 2):
        assert bubble("chimera", ranks, microbatches, costs) == (ranks - 3) * backward + forward
    assert bubble("chimera", 2, ranks, costs) == 0


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_memory_is_as_published_and_does_not_grow_with_the_microbatches(ranks):
    half = ranks // 2
    at_first = list(range(half + 1, ranks + 1))
    for_ever = [ranks + 1] * (half - 1) + [ranks + 2]

    assert timeline("chimera", ranks, ranks).peak_activations == at_first + at_first[::-1]
    assert timeline("chimera", ranks, 10 * ranks).peak_activations == for_ever + for_ever[::-1]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "told"),
    [
        (5, 8, "ranks: chimera folds .* even number of ranks, got 5; use 6, or hanayo"),
        (4, 7, "microbatches: chimera sends half of the microbatches each way, got 7; use 8"),
    ],
)
def test_what_does_not_fold_is_refused_with_a_fix(ranks, microbatches, told):
    with pytest.raises(ConfigError, match=told):
        build("chimera", ranks=ranks, microbatches=microbatches)
