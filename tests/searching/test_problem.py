"""The columns of a problem are what the simulator and the model of memory have of every action."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.operations import Kind
from penstock.placement import Placement
from penstock.searching.problem import FORWARD, INPUT, WEIGHT, numbers_of_rows
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_what_an_action_waits_for_is_its_source_and_what_its_rank_has_saved():
    problem = problem_of(Placement.line(2), 3, Costs.uniform())

    assert problem.plane(problem.source, FORWARD).tolist() == [[-1, -1, -1], [0, 1, 2]]
    assert problem.plane(problem.source, INPUT).tolist() == [[9, 10, 11], [-1, -1, -1]]
    assert problem.plane(problem.activation_source, INPUT).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert problem.plane(problem.source, WEIGHT).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_schedule_has_the_actions_of_a_sequence_by_rank():
    problem = problem_of(Placement.line(2), 1, Costs.uniform())
    sequence = np.array([0, 1, 3, 5, 2, 4], np.int32)

    schedule = problem.schedule(sequence, "mine")

    assert [str(schedule.row(row)) for row in range(6)] == ["0F0", "0I0", "0W0", "1F0", "1I0", "1W0"]
    assert sorted(numbers_of_rows(schedule)) == list(range(6))
    assert Kind.BACKWARD not in schedule.op


def test_costs_without_i_and_w_are_refused():
    with pytest.raises(ConfigError, match="backward_input_s: is missing"):
        problem_of(Placement.line(2), 1, Costs(forward_s=(1.0,), backward_s=(2.0,)))
