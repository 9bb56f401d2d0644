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
from penstock.searching.bounds import MAKESPAN, SPAN, Route
from penstock.searching.problem import Problem
from penstock.simulation import Costs

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
