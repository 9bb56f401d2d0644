"""A search gets the split with which a known order fits, and is told of none only where no split has one."""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.placement import Placement
from penstock.planning import plan, stage_costs
from penstock.proofs import Limit
from penstock.searching.search import search
from penstock.searching.split_orders import one_at_a_time, split_within
from penstock.simulation import LayerCosts
from tests.support.splits import every_split

PLACEMENTS = [Placement.line(2), Placement.vee(2), Placement.loop(2, 4), Placement.wave(2, 4)]
COSTS = LayerCosts(
    forward=[1.0] * 6,
    backward_input=[1.0] * 6,
    backward_weight=[1.0] * 6,
    activation_bytes=[1, 2, 3, 1, 4, 1],
    message_bytes=[1] * 6,
    parameter_bytes=[90, 10, 10, 10, 10, 10],
)


def least_of(placement):
    """Return the fewest bytes that the fullest rank holds with any split, one microbatch at a time."""
    schedule, most = one_at_a_time(placement, 3), []
    for split in every_split(6, placement.num_stages):
        timeline = plan(schedule, stage_costs(replace(COSTS, split=split), schedule)).timeline
        most.append(max(map(sum, zip(timeline.peak_bytes, timeline.static_bytes, strict=True))))
    return min(most)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.style)
def test_a_split_is_found_down_to_the_least_that_any_split_needs(placement):
    least = least_of(placement)

    for most in (least, least + 3, least + 30):
        own_placement, split = split_within(COSTS, [placement], 3, Limit.read(most))
        assert own_placement == placement
        assert sum(split) == 6
    with pytest.raises(
        ScheduleError, match=rf"limit of {least - 1}, whatever the split; .* holds {least} B with split"
    ):
        split_within(COSTS, [placement], 3, Limit.read(least - 1))


def test_a_search_takes_another_split_where_the_usual_one_leaves_no_order():
    least = least_of(PLACEMENTS[0])

    usual = search(COSTS, 2, 3, memory_limit=least + 40, evaluations=200)
    other = search(COSTS, 2, 3, memory_limit=least, evaluations=200)

    assert usual.split == ()
    assert sum(other.split) == 6
    assert max(other.peak_bytes) <= least
    assert other.costs == stage_costs(replace(COSTS, split=other.split), other.schedule)
    with pytest.raises(ScheduleError, match="no order was found that fits"):
        search(COSTS, 2, 3, memory_limit=least, evaluations=200, keeps_split=True)
    with pytest.raises(ScheduleError, match=r"no order was found that fits .*, whatever the split"):
        search(COSTS, 2, 3, memory_limit=least - 1, evaluations=200)


def test_of_several_placements_one_with_a_fitting_order_is_searched():
    least = min(map(least_of, PLACEMENTS))

    found = search(COSTS, 2, 3, memory_limit=least, placement="any", evaluations=200)

    assert max(found.peak_bytes) <= least
    assert len(found.split) == found.schedule.num_stages


def result_within(limit, placement):
    try:
        return search(COSTS, 2, 3, memory_limit=limit, placement=placement, evaluations=100)
    except ScheduleError:
        return None


@pytest.mark.parametrize(
    "limit", [104, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (92, 108, 116, 128))]
)
def test_any_placement_is_the_best_of_all_whichever_of_them_need_another_split(limit):
    every = result_within(limit, "any")
    results = [result for name in ("line", "loop", "v", "wave") if (result := result_within(limit, name)) is not None]

    assert every.makespan_s == min(result.makespan_s for result in results)
    assert every.lower_bound_s <= min(result.lower_bound_s for result in results)
    assert every.split in [result.split for result in results if result.makespan_s == every.makespan_s]
    assert max(every.peak_bytes) <= limit
