"""The largest bound: published searches, optima that a solver has proved, and no order below it."""

import pytest

from penstock.placement import Placement
from penstock.searching.bounds import lower_bound
from penstock.simulation import Costs
from tests.searching.cases import problem_of, rows

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
