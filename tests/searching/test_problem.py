"""The columns of a problem are what the simulator and the model of memory have of every action."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.operations import Kind
from penstock.placement import Placement
from penstock.searching.problem import FORWARD, INPUT, WEIGHT, numbers_of_rows
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs


def test_an_action_takes_its_seconds_with_the_factor_of_its_microbatch_and_a_launch():
    costs = random_costs(0, 4, microbatch_compute_factor=(1.0, 2.0), launch_s=0.5)
    problem = problem_of(Placement.line(4), 2, costs)

    for plane, seconds in (
        (FORWARD, costs.forward_s),
        (INPUT, costs.backward_input_s),
        (WEIGHT, costs.backward_weight_s),
    ):
        found = problem.plane(problem.seconds, plane)
        np.testing.assert_allclose(found, np.outer(seconds, (1.0, 2.0)) + 0.5)


def test_what_an_action_waits_for_is_its_source_and_what_its_rank_has_saved():
    problem = problem_of(Placement.line(2), 3, Costs.uniform())

    assert problem.plane(problem.source, FORWARD).tolist() == [[-1, -1, -1], [0, 1, 2]]
    assert problem.plane(problem.source, INPUT).tolist() == [[9, 10, 11], [-1, -1, -1]]
    assert problem.plane(problem.activation_source, INPUT).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert problem.plane(problem.source, WEIGHT).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_memory_is_taken_by_a_forward_and_freed_by_i_and_w():
    costs = Costs.uniform(activation_bytes=10, weight_context_bytes=6)
    problem = problem_of(Placement.line(2), 1, costs)

    net = problem.taken_bytes - problem.freed_bytes
    assert [problem.plane(net, plane)[0, 0] for plane in (FORWARD, INPUT, WEIGHT)] == [10, -4, -6]


def test_messages_between_ranks_have_lags_and_those_on_serialized_links_a_link():
    free = problem_of(Placement.vee(2), 1, random_costs(0, 4))
    serialized = problem_of(Placement.vee(2), 1, random_costs(0, 4, is_exclusive=True))

    # Stages 1 and 2 are on one rank.
    assert free.plane(free.lag_s, FORWARD)[:, 0].tolist() == pytest.approx([0.0, 0.35, 0.0, 0.35])
    assert serialized.plane(serialized.lag_s, FORWARD)[:, 0].tolist() == pytest.approx([0.0, 0.1, 0.0, 0.1])
    assert serialized.plane(serialized.link, FORWARD)[:, 0].tolist() == [1, -1, 2, -1]
    assert serialized.plane(serialized.link, WEIGHT).max() == -1
    assert free.link.max() == -1


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
