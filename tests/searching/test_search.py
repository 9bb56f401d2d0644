"""The search: never worse than what others found, its certificate, its limit, its determinism, and bad input."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.operations import Kind
from penstock.lowering import lower
from penstock.planning import plan
from penstock.proofs import check
from penstock.schedules import build
from penstock.searching import search as searching
from penstock.searching.improving import Improvement
from penstock.searching.question import place
from penstock.searching.search import search
from penstock.searching.split_orders import one_at_a_time
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.costs.costs import Spread
from tests.searching.cases import random_costs, rows, searched_case


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row["name"], marks=pytest.mark.slow if number % 3 or "m16/default/mem3p" in row["name"] else ()
        )
        for number, row in enumerate(rows("searched_zero_bubble.json")[::12])
    ],
)
def test_what_the_zero_bubble_schedulers_found_is_found(row):
    placement, microbatches, costs, limit = searched_case(row)

    found = search(
        costs,
        placement.num_ranks,
        microbatches,
        memory_limit=limit,
        placement="v" if placement.num_stages > placement.num_ranks else "line",
        per_action=True,
        objective="span",
        evaluations=2_000,
    )

    assert found.span_s <= row["span"] * (1 + 1e-9)
    assert found.gap >= 0


@pytest.mark.parametrize("row", rows("certified_optima.json"), ids=lambda row: "-".join(map(str, row.values())))
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_optima_that_a_solver_has_proved_are_found(row, objective):
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    limit = round(2 * row["cap_microbatches"])

    found = search(
        costs, row["ranks"], row["microbatches"], memory_limit=limit, objective=objective, evaluations=150_000
    )

    assert (found.span_s if objective == "span" else found.makespan_s) == row[objective]
    assert found.is_optimal == (found.lower_bound_s == row[objective])


@pytest.mark.parametrize("seed", [1, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 5))])
def test_it_is_at_least_as_good_as_every_family_that_fits_and_its_program_fits(seed):
    random = np.random.default_rng(seed)
    ranks = int(random.integers(3, 6))
    placement = "line" if seed % 2 else "v"
    num_stages = ranks * (1 if placement == "line" else 2)
    costs = random_costs(seed, num_stages, is_exclusive=seed % 3 == 0, parameter_bytes=(7,), launch_s=0.01 * (seed % 2))
    limit = int(num_stages // ranks * random.integers(14, 16) * ranks) + 30

    options = {"memory_limit": limit, "per_action": True, "evaluations": 5_000, "seed": seed}
    found = search(costs, ranks, 8, placement=placement, **options)

    check(found.plan.program, memory_limit=limit, costs=costs)
    assert max(found.peak_bytes) <= limit
    assert found.gap > -1e-9
    for family in ("1f1b", "zb-h1", "gpipe", "zb-h2", "zbv", "v-min", "v-half", "v-zb", "1f1b-v"):
        try:
            schedule = build(family, ranks=ranks, microbatches=8, stages=num_stages)
            planned = plan(schedule, costs, memory_limit=limit)
        except (ConfigError, ScheduleError):
            continue
        if schedule.placement == found.schedule.placement:
            assert found.makespan_s <= planned.timeline.makespan_s * (1 + 1e-12)


def test_messages_are_within_the_limit():
    sizes = {"activation_bytes": 10, "weight_context_bytes": 5}

    without = search(Costs.uniform(**sizes), 4, 8, memory_limit=40, evaluations=5_000)
    found = search(Costs.uniform(**sizes, message_bytes=10), 4, 8, memory_limit=40, evaluations=5_000)

    assert max(found.peak_bytes) <= 40
    assert without.makespan_s < found.makespan_s


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize(("placement", "num_stages"), [("line", 3), ("v", 6), ("loop", 6), ("wave", 12)])
def test_what_is_found_within_a_limit_has_room_for_every_workspace(placement, num_stages, seed):
    random = np.random.default_rng(seed)
    workspaces = {"forward_workspace_bytes": 15, "backward_workspace_bytes": 40}
    sizes = {name: random.integers(0, most, num_stages) for name, most in workspaces.items()}
    costs = random_costs(seed, num_stages, **sizes)
    program = lower(one_at_a_time(place(placement, 3, num_stages), 6))
    least = max(simulate(program, costs).peak_bytes)
    options = {"placement": placement, "per_action": True, "evaluations": 1_000}

    for limit in (least, least + 12, least + 30):
        found = search(costs, 3, 6, memory_limit=limit, **options)

        replayed = simulate(lower(found.schedule), costs)
        assert max(replayed.peak_bytes) <= limit
        assert found.lower_bound_s * (1 - 1e-9) <= found.makespan_s == replayed.makespan_s
    without = replace(costs, **dict.fromkeys(workspaces, 0))
    assert max(search(without, 3, 6, memory_limit=least - 1, **options).peak_bytes) < least
    with pytest.raises(ScheduleError, match=f"no order was found that fits a limit of {least - 1}"):
        search(costs, 3, 6, memory_limit=least - 1, **options)


def test_equal_seeds_and_evaluations_find_the_same():
    costs = random_costs(5, 4)
    one, other = (search(costs, 4, 8, memory_limit=40, evaluations=4_000, seed=3) for _ in range(2))

    assert one.schedule.digest() == other.schedule.digest()
    assert one.makespan_s.hex() == other.makespan_s.hex()
    assert one.evaluations == other.evaluations


def costs_of_any_kind(seed, ranks):
    """Costs with an entry for all, per rank, per stage of two on each rank, or per layer."""
    random = np.random.default_rng(seed)
    if seed % 4 == 3:
        num_layers = int(random.integers(2 * ranks, 4 * ranks))
        names = ("forward", "backward_input", "backward_weight")
        sizes = {"activation_bytes": random.integers(5, 20, num_layers).tolist(), "message_bytes": 3}
        return LayerCosts(**{name: random.uniform(0.2, 3.0, num_layers).tolist() for name in names}, **sizes)
    return random_costs(seed, (1, ranks, 2 * ranks)[seed % 4])


def searched(costs, ranks, placement, **options):
    """The result, or None where the placement cannot be had or nothing fits."""
    try:
        return search(costs, ranks, 5, placement=placement, evaluations=100, **options)
    except (ConfigError, ScheduleError):
        return None


@pytest.mark.parametrize("limit", [None, "2 microbatches", 90])
@pytest.mark.parametrize("seed", [0, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 5, 6, 7))])
def test_any_placement_is_the_best_of_all(seed, limit):
    ranks = 2 + seed // 4
    costs, options = costs_of_any_kind(seed, ranks), {"memory_limit": limit, "seed": seed}

    every = searched(costs, ranks, "any", **options)
    results = [searched(costs, ranks, placement, **options) for placement in ("line", "loop", "v", "wave")]

    fitting = [result for result in results if result is not None]
    if fitting:
        assert every.makespan_s == pytest.approx(min(result.makespan_s for result in fitting), rel=1e-9)
        assert every.lower_bound_s <= min(result.lower_bound_s for result in fitting)
    else:
        assert every is None


def test_an_interrupt_leaves_the_best_of_the_placements_before(monkeypatch):
    starts, start = [], searching._Search._first_candidates

    def start_or_interrupt(search_of_placement):
        starts.append(search_of_placement)
        if len(starts) == 2:
            raise KeyboardInterrupt
        return start(search_of_placement)

    monkeypatch.setattr(searching._Search, "_first_candidates", start_or_interrupt)
    found = search(random_costs(8, 4), 4, 8, placement="any", memory_limit=45, evaluations=100)

    assert found.was_interrupted
    assert found.schedule.placement == starts[0].problem.placement


def test_an_interrupt_of_the_last_look_leaves_the_result(monkeypatch):
    def interrupt(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "certify", interrupt)

    found = search(Costs.uniform(), 4, 8, evaluations=100)

    assert found.was_interrupted
    assert found.makespan_s == 27.0


def test_progress_is_that_of_all_placements():
    told = []
    options = {"memory_limit": "3 microbatches", "evaluations": 1_500}

    found = search(random_costs(3, 1), 3, 6, placement="any", progress=told.append, **options)

    assert [each.best_s for each in told] == sorted((each.best_s for each in told), reverse=True)
    assert [each.seconds for each in told] == sorted(each.seconds for each in told)
    assert all(each.bound_s <= found.lower_bound_s * (1 + 1e-9) for each in told)


def test_one_entry_is_what_a_rank_does_whatever_the_placement():
    work = Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0)
    half = Costs.uniform(forward=0.5, backward_input=0.5, backward_weight=0.5)

    line, vee = (search(work, 4, 8, placement=placement, evaluations=500) for placement in ("line", "v"))
    per_action = search(half, 4, 8, placement="v", per_action=True, evaluations=500)

    assert (line.makespan_s, vee.makespan_s) == (27.0, 25.5)
    assert (line.is_optimal, line.gap, line.lower_bound_s, line.bound.seconds) == (True, 0.0, 27.0, 27.0)
    assert (per_action.makespan_s, per_action.costs) == (25.5, vee.costs)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(("placement", "num_stages"), [("line", 3), ("v", 6), ("loop", 6), ("wave", 12)])
def test_what_one_microbatch_at_a_time_needs_is_the_least_limit_within_which_an_order_is_found(
    placement, num_stages, seed
):
    random = np.random.default_rng(seed)
    names = "forward_s", "backward_input_s", "backward_weight_s"
    sizes = {name: random.integers(20, 60, num_stages) for name in ("activation_bytes", "message_bytes")}
    seconds = {name: random.uniform(0.5, 2.0, num_stages) for name in names}
    costs = Costs(**seconds, **sizes, weight_context_bytes=(10,), parameter_bytes=(7,))
    program = lower(one_at_a_time(place(placement, 3, num_stages), 4))
    timeline = simulate(program, costs)
    least = max(map(sum, zip(timeline.peak_bytes, timeline.static_bytes, strict=True)))
    options = {"placement": placement, "per_action": True, "evaluations": 300}

    assert max(search(costs, 3, 4, memory_limit=least, **options).peak_bytes) == least
    with pytest.raises(ScheduleError, match=rf"which needs least, rank \d holds {least} bytes\. Raise the limit"):
        search(costs, 3, 4, memory_limit=least - 1, **options)


def test_what_only_the_exact_method_finds_is_the_result(monkeypatch):
    pytest.importorskip("ortools")
    monkeypatch.setattr(Improvement, "run", lambda *_: None)
    options = {"memory_limit": "3 microbatches", "seconds": 8.0}

    without = search(Costs.uniform(), 4, 16, **(options | {"evaluations": 500}))
    found = search(Costs.uniform(), 4, 16, **options)

    assert found.method == "exact"
    assert found.makespan_s < without.makespan_s
    assert max(found.timeline.peak_activations) <= 3
    assert found.is_optimal


def test_the_exact_method_raises_the_bound():
    pytest.importorskip("ortools")
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    options = {"memory_limit": 4, "placement": "line"}

    without = search(costs, 4, 8, evaluations=20_000, **options)
    found = search(costs, 4, 8, seconds=8.0, **options)

    assert without.makespan_s == found.makespan_s == 41.0
    assert not without.is_optimal
    assert without.solver_bound_s is None
    assert found.bound.name == "exact"
    assert found.lower_bound_s == found.solver_bound_s > without.lower_bound_s


def test_without_the_solver_the_rest_works(monkeypatch):
    monkeypatch.setattr("penstock.searching.search.is_installed", lambda: False)

    found = search(Costs.uniform(activation_bytes=2, weight_context_bytes=1), 4, 8, memory_limit=4, seconds=0.5)

    assert found.makespan_s == 41.0
    assert found.bound.name != "exact"


@pytest.mark.parametrize("noise", [0.05, "measured"])
def test_noise_chooses_what_is_shortest_on_average(noise):
    spreads = tuple(Spread(kind, 0, 1.0, 0.07) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    costs = random_costs(7, 4, spreads=spreads)

    plain = search(costs, 4, 8, memory_limit=60, evaluations=3_000)
    found = search(costs, 4, 8, memory_limit=60, evaluations=3_000, noise=noise)

    assert plain.noise is None
    assert found.makespan_s >= plain.makespan_s
    assert found.noise.mean_s <= found.noise.family_mean_s
    assert found.noise.family_s >= plain.makespan_s
    assert found.noise.family


def test_without_time_the_best_construction_is_returned():
    found = search(random_costs(7, 4), 4, 8, seconds=0)

    assert found.method in ("family", "list")


def test_an_interrupt_ends_the_search_with_the_best_so_far():
    def interrupt(progress):
        raise KeyboardInterrupt

    found = search(random_costs(8, 4), 4, 8, memory_limit=30, seconds=60.0, progress=interrupt)

    assert found.was_interrupted
    assert found.seconds < 30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "time"}, "objective: 'time' of type str; expected one of makespan, span"),
        ({"seconds": -1.0}, "seconds: -1.0"),
        ({"evaluations": 0}, "evaluations: 0"),
        ({"ranks": 0}, "ranks: 0"),
        ({"microbatches": 0}, "microbatches: 0"),
    ],
)
def test_bad_input_is_one_message(options, words):
    given = {"ranks": 4, "microbatches": 8, "seconds": 1.0} | options

    with pytest.raises(ConfigError) as caught:
        search(random_costs(0, 4), given.pop("ranks"), given.pop("microbatches"), **given)

    assert words in str(caught.value)


def test_progress_is_told():
    told = []
    search(random_costs(8, 4), 4, 8, memory_limit=30, evaluations=5_000, progress=told.append)

    assert len(told) >= 3
    best_s = [each.best_s for each in told]
    assert best_s == sorted(best_s, reverse=True)
    assert all(each.gap >= 0 for each in told)
