"""Splits and orders found together: never above a family or below a bound, and limits hold with messages."""

import re
from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, ScheduleError
from penstock.partition.balance import balance
from penstock.planning import plan
from penstock.schedules import FAMILIES, build
from penstock.searching.bounds import Bound
from penstock.searching.joint import search_joint as searching
from penstock.searching.search import search
from penstock.simulation import Costs, LayerCosts

GIB = 1 << 30
SIZES = {
    "activation_bytes": [GIB // 8, *[GIB // 2] * 14, 2 * GIB],
    "weight_context_bytes": [0, *[GIB // 4] * 14, GIB // 2],
    "message_bytes": [GIB // 16],
    "parameter_bytes": [2 * GIB, *[GIB // 2] * 14, 2 * GIB],
}


def layers(seed=0, **others):
    """An embedding, blocks of two kinds, and a heavy head."""
    random = np.random.default_rng(seed)
    seconds = [0.2, *random.choice([1.0, 1.6], 14), 3.4]
    options = {"backward_input": seconds, "backward_weight": seconds, "latency_s": 0.02}
    return LayerCosts(forward=seconds, **(options | SIZES | others))


def joint(costs=None, limit=None, *, ranks=4, microbatches=6, evaluations=1500, **options):
    return ps.search_joint(
        costs or layers(), ranks, microbatches, memory_limit=limit, evaluations=evaluations, **options
    )


def best_family_s(costs, ranks, microbatches, num_stages, limit):
    best_s = np.inf
    for name in FAMILIES:
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches, stages=num_stages)
            if schedule.is_forward_only or len(schedule.placement.routes) > 1:
                continue
            split = balance(costs.seconds_of_layers.sum(axis=0).tolist(), num_stages)
            stage_costs = costs.of_stages(split)
            best_s = min(best_s, plan(schedule, stage_costs, memory_limit=limit).timeline.makespan_s)
        except (ConfigError, ScheduleError):
            continue
    return best_s


@pytest.mark.parametrize("limit", [None, "12GiB"])
def test_a_split_and_an_order_are_found_that_no_family_or_order_alone_reaches(limit):
    costs = layers()

    result = joint(costs, limit)

    assert sum(result.split) == 16
    assert len(result.split) == result.placement.num_stages
    assert result.makespan_s >= result.bound.seconds
    assert result.bound.rank is None
    again = plan(result.schedule, costs.of_stages(result.split), memory_limit=limit)
    assert again.timeline.makespan_s == result.makespan_s
    for per_rank in (1, 2):
        assert result.makespan_s <= best_family_s(costs, 4, 6, 4 * per_rank, limit)
    alone = search(costs, 4, 6, memory_limit=limit, evaluations=1500)
    assert result.makespan_s < alone.makespan_s


def test_the_limit_holds_with_messages_and_is_kept_by_recomputation_where_nothing_else_fits():
    limit = 8 * GIB
    with_it, without = joint(limit=limit), joint(limit=limit, recompute=False)

    for result in (with_it, without):
        assert max(result.peak_bytes) <= limit
    assert with_it.recomputed_stages
    assert with_it.makespan_s < without.makespan_s
    assert without.recomputed_stages == ()


def test_equal_seeds_find_the_same_to_the_bit():
    first, second, other = (joint(seed=seed, evaluations=800) for seed in (3, 3, 4))

    assert first.makespan_s == second.makespan_s
    assert (first.split, first.schedule.digest()) == (second.split, second.schedule.digest())
    assert first.schedule.digest() != other.schedule.digest()


def test_equal_layers_are_packed_up_to_their_bound():
    """34 layers on 8 ranks: one rank has 5 blocks. No order of the even split comes close to the bound of its work."""
    seconds = [0.01, *[1.0] * 32, 1.3]
    costs = LayerCosts(forward=seconds, backward_input=seconds, backward_weight=seconds)

    result = joint(costs, ranks=8, microbatches=32, evaluations=2000)

    assert result.bound.name == "whole layers"
    assert result.gap < 0.01


@pytest.mark.parametrize("style", ["line", "loop", "v", "wave"])
def test_a_placement_is_kept(style):
    result = joint(placement=style, evaluations=300)

    assert result.placement in {ps.Placement.line(4), ps.Placement.vee(4), ps.Placement.wave(4, 16)} | {
        ps.Placement.loop(4, 4 * number) for number in (1, 2, 3, 4)
    }
    assert (result.placement.style == style) or result.placement.num_stages in (4, 8)


def test_stages_of_a_rank_are_kept():
    assert joint(stages_per_rank=2, evaluations=300).placement.num_stages == 8


def test_progress_is_told():
    reports = []
    joint(evaluations=400, progress=reports.append)

    assert reports[-1].best_s <= reports[0].best_s
    assert all(report.bound_s > 0 for report in reports)


def test_ctrl_c_returns_the_best_so_far():
    def interrupt(progress):
        if progress.best_s < np.inf:
            raise KeyboardInterrupt

    result = joint(progress=interrupt)

    assert result.was_interrupted
    assert result.makespan_s >= result.bound.seconds


def test_a_result_below_its_bound_is_a_bug(monkeypatch):
    monkeypatch.setattr(searching, "whole_layer_bound", lambda *_: Bound("made up", None, {"work": 1e9}))

    with pytest.raises(AssertionError, match="lies above the result"):
        joint(evaluations=300)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {"ranks": 17},
            ConfigError,
            "ranks: 17; the costs have 16 layers, and each rank needs at least one; use at most 16",
        ),
        ({"microbatches": 0}, ConfigError, "microbatches: 0 of type int; expected a whole number, 1 or larger"),
        ({"costs": Costs.uniform()}, ConfigError, "layer_costs: .*expected LayerCosts"),
        (
            {"costs": LayerCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)},
            ConfigError,
            "does not say how many there are",
        ),
        ({"costs": LayerCosts(forward=[1.0] * 8, backward=[2.0] * 8)}, ConfigError, "backward_input: is missing"),
        ({"placement": "ring"}, ConfigError, "placement: 'ring' of type str; expected one of line, loop, v, wave, any"),
        ({"placement": "v", "ranks": 9}, ConfigError, "placement: v"),
        ({"stages_per_rank": 5}, ConfigError, "stages_per_rank: 5; 20 stages need as many layers"),
        ({"placement": "line", "stages_per_rank": 2}, ConfigError, "line takes one stage a rank"),
        (
            {"limit": "4 microbatches"},
            ConfigError,
            "memory_limit: 4 microbatches does not say how large a layer may be",
        ),
        ({"limit": "3GiB"}, ScheduleError, re.escape("layer 15 alone needs 4.00 GiB: 2.00 GiB of parameters")),
        ({"limit": "5GiB"}, ScheduleError, "no order was found that fits"),
        (
            {"costs": replace(layers(), activation_bytes=(0,)), "limit": "3GiB"},
            ConfigError,
            "the costs have no activation_bytes",
        ),
        ({"evaluations": 0}, ConfigError, "evaluations: 0 of type int"),
    ],
)
def test_bad_input_is_refused_by_name(given, error, words):
    with pytest.raises(error, match=words):
        joint(**{"evaluations": 200, **given})
