"""The split that fits is looked for among all of them: every claim is checked by proving and predicting each split."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.lowering import lower
from penstock.planning import plan, stage_costs
from penstock.schedules import build
from penstock.searching import fitting
from penstock.searching.fitting import MemoryOfSplits, fitting_split
from penstock.simulation import LayerCosts
from penstock.simulation.costs.replicas import of_replicas
from tests.support.splits import every_split

NUM_LAYERS = 7
ONE_STAGE = ("1f1b", "gpipe", "zb-h1", "1f1b:recompute")
SEVERAL_STAGES = ("interleaved-1f1b", "zbv", "chimera", "hanayo:recompute")
SCHEDULES = {
    name: (name.partition(":")[0], {"recompute": True} if ":" in name else {}) for name in (*ONE_STAGE, *SEVERAL_STAGES)
}


def schedule_of(name, ranks=2, **options):
    family, own = SCHEDULES[name]
    return build(family, ranks=ranks, microbatches=4, **own, **options)


def random_costs(seed, **others):
    chance = np.random.default_rng(seed)

    def sizes(most):
        return chance.integers(1, most, NUM_LAYERS)

    seconds = {name: chance.random(NUM_LAYERS) for name in ("forward", "backward_input", "backward_weight")}
    return LayerCosts(
        **seconds,
        activation_bytes=sizes(100),
        weight_context_bytes=sizes(50),
        message_bytes=sizes(30),
        parameter_bytes=sizes(99),
        gradient_bytes=sizes(99),
        optimizer_bytes=sizes(99),
        forward_workspace_bytes=sizes(60),
        backward_workspace_bytes=sizes(200),
        **others,
    )


def held(costs, schedule, split):
    """Return the most bytes of each rank with a split, as a proof and a simulation of the whole plan find them."""
    timeline = plan(schedule, stage_costs(replace(costs, split=split), schedule)).timeline
    return [sum(parts) for parts in zip(timeline.peak_bytes, timeline.static_bytes, strict=True)]


def heaviest(costs, split):
    """Return the seconds of the stage that takes longest."""
    layers_s, ends = costs.seconds_of_layers.sum(axis=0), np.cumsum(split)
    return max(layers_s[end - size : end].sum() for size, end in zip(split, ends, strict=True))


FACTORS = {"alike": (1.0,) * 4, "halves": (1.0, 0.5, 0.25, 1.5), "tenths": (0.3, 0.7, 1.1, 0.9), "one": (0.7,) * 4}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factors", FACTORS)
def test_what_fits_and_what_holds_least_is_that_of_all_splits(name, seed, factors):
    costs, schedule = random_costs(seed, microbatch_bytes_factor=FACTORS[factors]), schedule_of(name)
    peaks = {
        split: held(costs, schedule, split) for split in every_split(NUM_LAYERS, len(schedule.placement.routes[0]))
    }
    least = min(map(max, peaks.values()))

    for most in sorted({least - 1, least, *map(max, peaks.values())}):
        found = fitting_split(costs, lower(schedule), np.full(schedule.num_ranks, most))

        fitting_ones = [split for split, of_ranks in peaks.items() if max(of_ranks) <= most]
        assert found.is_exact
        assert (found.least_bytes, max(peaks[found.least])) == (least, least)
        assert (found.split is None) == (not fitting_ones)
        if found.split is not None:
            assert found.split in fitting_ones
            best_s = min(heaviest(costs, split) for split in fitting_ones)
            assert heaviest(costs, found.split) == pytest.approx(best_s, rel=1e-8)


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_each_rank_may_have_a_limit_of_its_own(name):
    costs, schedule = random_costs(1), schedule_of(name)
    peaks = {split: held(costs, schedule, split) for split in every_split(NUM_LAYERS, 2)}

    for limit in peaks.values():
        found = fitting_split(costs, lower(schedule), np.array(limit))

        fitting_ones = [split for split, held_bytes in peaks.items() if (np.array(held_bytes) <= limit).all()]
        assert found.split in fitting_ones


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "others", [{}, {"microbatch_bytes_factor": (1.0, 0.5, 0.25, 1.0)}, {"checkpoint_bytes": tuple(range(1, 8))}]
)
def test_what_each_rank_holds_is_that_of_the_whole_plan(name, others):
    costs, schedule = random_costs(5, **others), schedule_of(name)
    memory = MemoryOfSplits.of(costs, lower(schedule), 1)

    for split in every_split(NUM_LAYERS, len(schedule.placement.routes[0])):
        assert memory.peaks(np.array([split]))[0].tolist() == held(costs, schedule, split)


def test_slices_and_shards_hold_their_part():
    costs, schedule = random_costs(2), build("seq1f1b", ranks=2, microbatches=4, slices=2)
    memory = MemoryOfSplits.of(costs, lower(schedule, shard="full"), 3)

    for split in every_split(NUM_LAYERS, 2):
        own = of_replicas(stage_costs(replace(costs, split=split), schedule), 3, is_sharded=True)
        timeline = plan(schedule, own, shard="full").timeline
        expected = np.array(timeline.peak_bytes) + timeline.static_bytes
        assert memory.peaks(np.array([split]))[0].tolist() == expected.tolist()


def test_a_rank_with_one_stage_is_exact_for_any_number_of_layers():
    """Rank r of 1F1B holds 8 - r microbatches. Each stage that takes all that it may leaves the fewest to others."""
    sizes = np.array([100] * 30 + [1] * 30)
    costs = LayerCosts(forward=[1.0] * 60, backward=[2.0] * 60, activation_bytes=sizes)

    def can_take_all(most_layers):
        start = 0
        for held_times in range(8, 0, -1):
            ends = [end for end in range(start, 61) if held_times * sizes[start:end].sum() <= 3000]
            start = min(max(ends), start + most_layers)
        return start == 60

    found = fitting_split(costs, lower(build("1f1b", ranks=8, microbatches=8)), np.full(8, 3000))

    assert found.is_exact
    assert max(found.split) == min(filter(can_take_all, range(1, 61)))
    assert max(held(costs, build("1f1b", ranks=8, microbatches=8), found.split)) <= 3000


def test_where_not_all_splits_are_tried_moves_find_one_and_nothing_is_called_exact(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_SPLITS", 0)
    num_found = 0
    for name in SEVERAL_STAGES:
        costs, schedule = random_costs(3), schedule_of(name)
        peaks = {
            split: max(held(costs, schedule, split))
            for split in every_split(NUM_LAYERS, len(schedule.placement.routes[0]))
        }
        for most in sorted(peaks.values()):
            found = fitting_split(costs, lower(schedule), np.full(2, most))
            assert not found.is_exact
            assert found.least_bytes == peaks[found.least]
            assert found.split is None or peaks[found.split] <= most
            num_found += found.split is not None
    assert num_found > 20
