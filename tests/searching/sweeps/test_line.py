"""Sweeps on a line: the eight schedules of the zero-bubble scheduler."""

import numpy as np

from penstock.placement import Placement
from penstock.searching.sweeps.line import line_sweeps
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_ranks_run_fewer_forwards_ahead_than_those_before_them():
    problem = problem_of(Placement.line(4), 12, Costs.uniform(activation_bytes=10, weight_context_bytes=5), 70)

    first, *_ = line_sweeps(problem)

    ahead = []
    for rank in range(4):
        own = first[problem.rank[first] == rank]
        ahead.append(int(np.flatnonzero(own >= 4 * 12)[0]))
    assert ahead == sorted(ahead, reverse=True)
    assert len(set(ahead)) == 4
