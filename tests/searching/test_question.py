"""The question of a search: placements, stages, limits, and what any order could pay at least."""

import numpy as np
import pytest

from penstock.errors import ConfigError, PartitionError
from penstock.placement import Placement
from penstock.searching.problem import NO_LIMIT
from penstock.searching.question import cheapest, problems_of
from penstock.simulation import Costs, LayerCosts
from tests.searching.cases import problem_of


def asked(costs=None, ranks=4, placement="line", stages_per_rank=None, memory_limit=None):
    costs = costs or Costs.uniform()
    return [problem for problem, _ in problems_of(costs, ranks, 8, placement, stages_per_rank, memory_limit)]


def test_there_are_as_many_stages_as_costs_or_as_the_placement_has():
    assert [each.num_stages for each in asked()] == [4]
    assert [each.num_stages for each in asked(placement="v")] == [8]
    assert [each.num_stages for each in asked(placement="loop", stages_per_rank=3)] == [12]
    assert [each.num_stages for each in asked(Costs.uniform(forward=1.0), placement="wave")] == [8]
    eight = Costs(forward_s=(1.0,) * 8, backward_input_s=(1.0,), backward_weight_s=(1.0,))
    assert [each.placement.style for each in asked(eight, placement="any")] == ["loop", "v"]


def test_an_entry_per_rank_or_per_layer_leaves_the_number_of_stages_to_the_placement():
    for costs in (
        Costs(forward_s=(1.0, 2.0, 3.0, 4.0), backward_input_s=(1.0,), backward_weight_s=(1.0,)),
        LayerCosts(forward=(1.0,) * 9, backward_input=(1.0,) * 9, backward_weight=(1.0,) * 9),
    ):
        placements = [problem.placement for problem in asked(costs, placement="any")]
        assert [(each.style, each.num_stages) for each in placements] == [("line", 4), ("loop", 8), ("v", 8)]


def test_entries_of_single_actions_are_those_of_stages_also_where_there_are_as_many_ranks():
    costs = Costs(forward_s=(1.0, 2.0, 1.0, 1.0), backward_input_s=(1.0,), backward_weight_s=(1.0,))

    for placement in ("any", "line", "loop"):
        ((problem, of_stages),) = problems_of(costs, 4, 6, placement, None, per_action=True)
        assert (problem.num_stages, of_stages) == (4, costs)


def test_any_leaves_out_placements_that_cannot_have_such_costs():
    layers = LayerCosts(forward=(1.0,) * 6, backward_input=(1.0,) * 6, backward_weight=(1.0,) * 6)

    ((problem, _),) = problems_of(layers, 4, 6, "any", None)
    assert problem.placement == Placement.line(4)
    with pytest.raises(PartitionError, match="has 8 stages, but the model has only 6 layers"):
        problems_of(layers, 4, 6, "v", None)


def test_a_limit_in_bytes_leaves_what_is_always_there():
    costs = Costs.uniform(activation_bytes=10, parameter_bytes=7, gradient_bytes=5)

    (problem,) = asked(costs, memory_limit=100)
    assert problem.limit.tolist() == [88] * 4
    (free,) = asked(costs)
    assert free.limit.tolist() == [NO_LIMIT] * 4


def test_a_limit_in_activations_counts_them():
    (problem,) = asked(Costs.uniform(), placement="v", memory_limit="3 microbatches")

    assert problem.limit.tolist() == [6] * 4
    assert problem.taken_bytes.max() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "lines"}, "expected one of line, loop, v, wave, any. Did you mean 'line'"),
        ({"placement": "line", "stages_per_rank": 2}, "line takes one stage a rank, got 8 stages on 4 ranks"),
        ({"placement": "v", "stages_per_rank": 3}, "v takes two, got 12 stages on 4 ranks"),
        ({"memory_limit": 100}, "the costs have no activation_bytes"),
        ({"memory_limit": "3 bananas"}, "has no known unit"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        asked(**options)


def test_bounds_count_the_least_that_an_action_may_take():
    costs = Costs.uniform(forward=3.0, backward_input=2.0, backward_weight=4.0, backward=5.0, overlap_factor=0.5)
    problem = problem_of(Placement.line(2), 1, costs)

    found = cheapest(problem, costs)

    assert np.unique(found.seconds).tolist() == [1.0, 1.5]
    assert found.seconds.sum() == 0.5 * (3.0 + 5.0) * 2
