"""No bound is above what an exact solver has proved, and most are equal to it.

`proved_optima.json` holds random problems that CP-SAT (ortools 9.15) has solved: placements with one to four stages a
rank, uneven stages and microbatches, limits of each rank.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.searching.bounds import MAKESPAN, SPAN, Route, lower_bound
from penstock.searching.problem import Problem
from penstock.simulation import Costs
from tests.searching.cases import problem_of

ROWS = json.loads((Path(__file__).parent / "proved_optima.json").read_text(encoding="utf-8"))
OF_PROBLEM = ("kind", "ranks", "stages", "microbatches", "limit", "span", "makespan", "is_tight")
ROUNDING = 1e-9


def problem_of_row(row):
    ranks, stages = row["ranks"], row["stages"]
    placements = {
        "line": lambda: Placement.line(ranks),
        "v": lambda: Placement.vee(ranks),
        "loop": lambda: Placement.loop(ranks, stages),
        "wave": lambda: Placement.wave(ranks, stages),
    }
    costs = {name: tuple(of) if isinstance(of, list) else of for name, of in row.items() if name not in OF_PROBLEM}
    problem = Problem.of(placements[row["kind"]](), row["microbatches"], Costs(**costs))
    return problem if row["limit"] is None else replace(problem, limit=np.array(row["limit"], np.int64))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['kind']}-{row['ranks']}-{row['microbatches']}")
def test_random_problems(row):
    route = Route(problem_of_row(row))

    for optimum, functions in ((row["span"], SPAN), (row["makespan"], MAKESPAN)):
        bounds = [bound.seconds for function in functions for bound in function(route)]
        assert max(bounds) <= optimum + ROUNDING
        assert (max(bounds) >= optimum - ROUNDING) or not row["is_tight"]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "cap", "span", "makespan"),
    [(2, 4, 4, 24, 25), (3, 6, 4, 41, 41), (3, 6, 6, 36, 38), (4, 8, 4, 59, 59), (4, 8, 6, 53, 53), (4, 8, 8, 48, 51)],
)
def test_the_v_with_parts_of_a_second(ranks, microbatches, cap, span, makespan):
    """Makespans that a solver has proved. No span is longer: so where the bound of the span is as long, it is one."""
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    problem = problem_of(Placement.vee(ranks), microbatches, costs, 2 * cap)

    assert lower_bound(problem, by_span=True).seconds == span
    assert lower_bound(problem).seconds == makespan
