"""Bounds for every split: brute force over all splits, stages per rank, stages that recompute, and orders."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.placement import Placement
from penstock.searching.bounds.whole_layers import packing_bound, whole_layer_bound
from penstock.searching.joint.splits import Splits
from penstock.searching.listing import list_schedule
from penstock.searching.sequences import run
from penstock.searching.settings import settings_for
from penstock.simulation import LayerCosts
from tests.searching.exhaustive import optimum

ROUNDING = 1 + 1e-12


def splits_of(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(np.diff((0, *cuts, num_layers)).tolist())


def placements_of(num_layers, num_ranks):
    """Every placement of stages whose neighbours are on different ranks, with a stage on each rank."""
    for num_stages in range(num_ranks, num_layers + 1):
        for ranks in product(range(num_ranks), repeat=num_stages):
            if set(ranks) == set(range(num_ranks)) and all(map(int.__ne__, ranks[1:], ranks[:-1])):
                yield Placement.explicit(ranks)


def random_layers(seed, num_layers, **others):
    random = np.random.default_rng(seed)
    names = "forward", "backward_input", "backward_weight"
    seconds = {name: random.integers(1, 5, num_layers).astype(float) for name in names}
    sizes = {
        "activation_bytes": random.integers(2, 9, num_layers),
        "weight_context_bytes": random.integers(0, 3, num_layers),
        "parameter_bytes": random.integers(0, 6, num_layers),
        "message_bytes": random.integers(0, 2, num_layers),
    }
    return LayerCosts(**seconds, **sizes, latency_s=float(random.choice([0.0, 0.5])), **others)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_any_split_is_below_a_bound(seed):
    costs, microbatches = random_layers(seed, 3), 1 + seed % 2
    limit = None if seed % 3 == 0 else 24 + seed
    bound = whole_layer_bound(costs, 2, microbatches, limit)
    most_bytes = None if limit is None else np.full(2, limit, np.int64)
    best_s = math.inf
    for placement in placements_of(3, 2):
        splits = Splits(costs, placement, microbatches, most_bytes)
        for split in splits_of(3, placement.num_stages):
            stages = range(placement.num_stages)
            for recomputed in () if limit is None else [c for n in stages for c in combinations(stages, n + 1)]:
                best_s = min(best_s, optimum(splits.problem_of(split, recomputed)))
            best_s = min(best_s, optimum(splits.problem_of(split)))

    assert bound.seconds <= best_s * ROUNDING


@pytest.mark.parametrize("seed", range(30))
def test_no_list_schedule_of_any_split_is_below_a_bound(seed):
    """More layers, ranks and microbatches than all orders can be tried of."""
    random = np.random.default_rng(seed)
    costs, ranks, microbatches = random_layers(seed, 5), 2 + seed % 2, int(random.integers(2, 6))
    limit = None if seed % 3 == 0 else int(random.integers(20, 60))
    bound = whole_layer_bound(costs, ranks, microbatches, limit)
    most_bytes = None if limit is None else np.full(ranks, limit, np.int64)
    for placement in (Placement.line(ranks), Placement.vee(2), Placement.loop(2, 4)):
        if placement.num_ranks != ranks:
            continue
        splits = Splits(costs, placement, microbatches, most_bytes)
        for split in splits_of(5, placement.num_stages):
            recomputed = tuple(np.flatnonzero(random.integers(2, size=placement.num_stages)).tolist())
            for problem in (splits.problem_of(split), splits.problem_of(split, recomputed if limit else ())):
                setting = list(settings_for(problem))[int(random.integers(10))]
                sequence = list_schedule(problem, setting)
                assert sequence is None or bound.seconds <= run(problem, sequence).makespan_s * ROUNDING


def least_of_assignments(costs, ranks, microbatches):
    """The least seconds of the rank that ends last, over all ways of giving layers to ranks."""
    seconds = np.sum([costs.forward, costs.backward_input, costs.backward_weight], axis=0)
    best_s = math.inf
    for owners in product(range(ranks), repeat=len(seconds)):
        if len(set(owners)) < ranks:
            continue
        firsts = {rank: owners.index(rank) for rank in range(ranks)}
        begins = [sum(costs.forward[: firsts[rank]]) + costs.latency_s * order_of(firsts, rank) for rank in firsts]
        loads = [sum(s for s, owner in zip(seconds, owners, strict=True) if owner == rank) for rank in firsts]
        best_s = min(best_s, max(b + microbatches * load for b, load in zip(begins, loads, strict=True)))
    return best_s


def order_of(firsts, rank):
    return sorted(firsts, key=firsts.get).index(rank)


@pytest.mark.parametrize("seed", range(20))
def test_packing_is_not_above_the_best_way_of_giving_layers_to_ranks(seed):
    costs = random_layers(seed, 7, bandwidth_bytes_per_s=1e12)
    ranks, microbatches = 2 + seed % 2, 1 + seed % 7

    assert (
        packing_bound(costs, ranks, microbatches).seconds <= least_of_assignments(costs, ranks, microbatches) * ROUNDING
    )


def equal_layers(num_layers, head):
    """Layers of 3 s, of which one is F, and a head of so many times as much behind them."""
    seconds = [1.0] * num_layers + [float(head)]
    return LayerCosts(forward=seconds, backward_input=seconds, backward_weight=seconds)


@pytest.mark.parametrize(
    ("num_layers", "head", "ranks", "heaviest"),
    [
        (8, 1.0, 4, 9.0),  # nine layers on four ranks: one has three
        (32, 1.3, 8, 15.0),  # five layers, or three and the head; four everywhere leave no place for it
        (32, 5.5, 8, 16.5),  # the head alone: seven ranks take 32 layers, five at most
        (7, 0.5, 4, 6.0),
    ],
)
def test_packing_counts_whole_layers(num_layers, head, ranks, heaviest):
    bound = packing_bound(equal_layers(num_layers, head), ranks, 1000)

    assert bound.seconds == pytest.approx(1000 * heaviest, rel=0.002)
    assert bound.seconds >= 1000 * heaviest * (1 - 1e-6)


def test_one_rank_takes_all_layers():
    assert packing_bound(equal_layers(7, 1.0), 1, 10).terms == {"begin": 0.0, "work": 240.0}


def test_a_heavy_layer_is_a_bound_with_its_way():
    costs = LayerCosts(forward=[1.0, 20.0], backward_input=[2.0, 20.0], backward_weight=[3.0, 0.0])

    bound = whole_layer_bound(costs, 2, 4)

    assert str(bound) == "layer 1 and its way: begin 1 s + F and I 160 s + end 5 s"


def test_one_microbatch_goes_there_and_back():
    costs = LayerCosts(forward=[1.0] * 4, backward_input=[1.0] * 4, backward_weight=[1.0] * 4, latency_s=0.25)

    assert str(whole_layer_bound(costs, 4, 1)) == "one microbatch: F and I 8 s + W 1 s + ways 1.5 s"


def test_memory_forces_recomputation():
    """Half of what activations take in the time of the work: some have to be freed, whatever the order."""
    seconds = [1.0] * 16
    costs = LayerCosts(
        forward=seconds,
        backward_input=seconds,
        backward_weight=seconds,
        activation_bytes=[100] * 16,
        parameter_bytes=[10] * 16,
    )

    loose, tight = (whole_layer_bound(costs, 4, 64, limit) for limit in (4000, 400))

    assert loose.name == "whole layers"
    assert tight.name == "memory of all ranks"
    assert tight.seconds > 1.05 * loose.seconds


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (LayerCosts(forward=[1.0] * 3, backward_input=[1.0], backward_weight=[1.0]), "has 3 layers|have 3 layers"),
        (LayerCosts(forward=[1.0] * 5, backward=[1.0]), "backward_input: is missing"),
        (LayerCosts(forward=1.0, backward_input=1.0, backward_weight=1.0), "does not say how many"),
    ],
)
def test_costs_that_no_bound_can_be_made_of_are_refused(costs, words):
    with pytest.raises(ConfigError, match=words):
        packing_bound(costs, 4, 2)
