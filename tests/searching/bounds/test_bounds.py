"""The largest bound: published searches, optima that a solver has proved, and no order below it."""

import math

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.searching.bounds import MAKESPAN, SPAN, Route, lower_bound
from penstock.searching.candidates import of_constructions, of_families
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs, rows, searched_case

AT_1F1B = [
    row
    for row in rows("searched_published.json")
    if row["source"] == "table 5" and row["limit"] == row["ranks"] * row["memory"][0]
]


@pytest.mark.parametrize("row", AT_1F1B, ids=lambda row: f"{row['ranks']}-{row['microbatches']}")
def test_what_the_zero_bubble_search_found_at_the_memory_of_1f1b_is_optimal(row):
    names = "forward", "backward_input", "backward_weight", "transfer"
    sizes = {"activation_bytes": row["memory"][0], "weight_context_bytes": row["memory"][1]}
    costs = Costs.uniform(**dict(zip(names, row["seconds"], strict=True)), **sizes)

    problem = problem_of(Placement.line(row["ranks"]), row["microbatches"], costs, row["limit"])
    bound = lower_bound(problem, by_span=True)

    work = row["microbatches"] * sum(row["seconds"][:3])
    assert round(1 - work / bound.seconds, 4) == row["bubble_rate"]


def test_there_are_nine_of_them():
    assert len(AT_1F1B) == 9


@pytest.mark.parametrize("row", rows("certified_optima.json"), ids=lambda row: "-".join(map(str, row.values())))
def test_no_bound_is_above_an_optimum_and_most_are_equal(row):
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    problem = problem_of(Placement.line(row["ranks"]), row["microbatches"], costs, round(2 * row["cap_microbatches"]))

    span, makespan = lower_bound(problem, by_span=True).seconds, lower_bound(problem).seconds

    is_tight = (row["ranks"], row["cap_microbatches"]) != (4, 2)
    assert span == row["span"] if is_tight else span < row["span"]
    assert makespan == row["makespan"] if is_tight else makespan < row["makespan"]


@pytest.mark.parametrize("row", rows("searched_zero_bubble.json"), ids=lambda row: row["name"])
def test_no_bound_is_above_what_was_found(row):
    problem = problem_of(*searched_case(row))

    assert lower_bound(problem, by_span=True).seconds <= row["span"] * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_is_below_any_bound(seed):
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 5))
    placement = [Placement.line(ranks), Placement.vee(ranks), Placement.loop(ranks, 3 * ranks)][seed % 3]
    others = {"is_exclusive": bool(seed % 2), "launch_s": 0.01 * (seed % 4)}
    costs = random_costs(seed, placement.num_stages, **others)
    limit = int(10 * len(placement.stages_of_rank[0]) * random.integers(2, ranks + 3))
    problem = problem_of(placement, 7, costs, limit)
    route = Route(problem)
    for by_span, functions in ((True, SPAN), (False, MAKESPAN)):
        candidates = [*of_constructions(problem, by_span=by_span, is_over=lambda: False)]
        candidates += of_families(problem, by_span=by_span)
        least = min(each.objective_s for each in candidates)
        assert least < math.inf
        for function in functions:
            for bound in function(route):
                assert bound.seconds <= least * (1 + 1e-12), bound
