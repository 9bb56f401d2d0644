"""The largest bound: published searches, optima that a solver has proved, and no order below it."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.searching.bounds import lower_bound
from penstock.simulation import Costs
from penstock.simulation.costs.costs import WORKSPACE_BYTES
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


def orders_of(num_microbatches):
    """Every order of F, I and W of one stage: microbatches in turn, F before I before W."""
    pending = [((0, 0, 0), ())]
    for _ in range(3 * num_microbatches):
        pending = [
            (tuple(count + (plane == kind) for plane, count in enumerate(counts)), (*order, kind))
            for counts, order in pending
            for kind in range(3)
            if counts[kind] < (num_microbatches if kind == 0 else counts[kind - 1])
        ]
    return [order for _, order in pending]


def holds(order, activation, context, workspaces):
    """The most bytes of a rank with an order, one action after the other."""
    held, most = 0, 0
    for kind in order:
        most = max(most, held + workspaces[kind] + (activation if kind == 0 else 0))
        held += (activation, context - activation, -context)[kind]
    return most


def makespan(first, second, seconds):
    """The seconds of two ranks with such orders, by running whatever can run."""
    end, free, places = {}, [0.0, 0.0], [0, 0]
    while True:
        waiting = list(places)
        for rank, order in enumerate((first, second)):
            while places[rank] < len(order):
                kind = order[places[rank]]
                number = order[: places[rank]].count(kind)
                source = {(0, 1): (0, 0, number), (1, 0): (1, 1, number)}.get((kind, rank))
                if source is not None and source not in end:
                    break
                start = max(free[rank], end.get(source, 0.0))
                end[kind, rank, number] = free[rank] = start + seconds[kind][rank]
                places[rank] += 1
        if places == waiting:
            return max(free) if places == [len(first)] * 2 else float("inf")


@pytest.mark.parametrize("seed", range(12))
def test_under_a_limit_that_counts_workspaces_no_order_is_below_a_bound(seed):
    random = np.random.default_rng(seed)
    seconds, num_microbatches = random.integers(1, 5, (3, 2)).astype(float), 3
    activation, context = int(random.integers(6, 12)), int(random.integers(1, 6))
    of_forward, of_backward = random.integers(0, 20, 2).tolist()
    workspaces = (of_forward, of_backward, of_backward)
    limit = activation + max(workspaces) + int(random.integers(0, 2 * activation))
    costs = Costs(
        **dict(zip(("forward_s", "backward_input_s", "backward_weight_s"), seconds, strict=True)),
        activation_bytes=activation, weight_context_bytes=context,
        forward_workspace_bytes=of_forward, backward_workspace_bytes=of_backward,
    )  # fmt: skip
    fitting = [order for order in orders_of(3) if holds(order, activation, context, workspaces) <= limit]

    bound = lower_bound(problem_of(Placement.line(2), num_microbatches, costs, limit)).seconds

    best = min(makespan(first, second, seconds) for first in fitting for second in fitting)
    assert len(orders_of(3)) == 42
    assert fitting
    assert bound <= best


def test_a_workspace_that_leaves_no_room_raises_the_bound():
    costs = Costs.uniform(
        activation_bytes=2, weight_context_bytes=1, forward_workspace_bytes=3, backward_workspace_bytes=3
    )
    line = Placement.line(4)

    without, beside = (
        lower_bound(problem_of(line, 8, replace(costs, **dict.fromkeys(WORKSPACE_BYTES, 0)), limit)) for limit in (7, 4)
    )

    assert lower_bound(problem_of(line, 8, costs, 7)).seconds == beside.seconds > without.seconds


@pytest.mark.parametrize("row", rows("certified_optima.json"), ids=lambda row: "-".join(map(str, row.values())))
def test_no_bound_is_above_an_optimum_and_most_are_equal(row):
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    problem = problem_of(Placement.line(row["ranks"]), row["microbatches"], costs, round(2 * row["cap_microbatches"]))

    span, makespan = lower_bound(problem, by_span=True).seconds, lower_bound(problem).seconds

    is_tight = (row["ranks"], row["cap_microbatches"]) != (4, 2)
    assert span == row["span"] if is_tight else span < row["span"]
    assert makespan == row["makespan"] if is_tight else makespan < row["makespan"]
