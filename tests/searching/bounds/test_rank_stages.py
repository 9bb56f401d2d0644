"""The knowledge of bounds about a rank."""

from penstock.placement import Placement
from penstock.searching.bounds import Route
from penstock.searching.bounds.rank_stages import RankStages
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_seconds_are_those_of_the_slowest_microbatch_and_bytes_of_the_smallest():
    costs = Costs(
        forward_s=(1.0, 2.0, 3.0, 4.0),
        backward_input_s=(5.0,),
        backward_weight_s=(0.5,),
        activation_bytes=(10, 20, 30, 40),
        weight_context_bytes=(4, 6, 8, 10),
        microbatch_compute_factor=(2.0, 1.0),
        microbatch_bytes_factor=(1.0, 1.5),
    )
    own = RankStages.of(Route(problem_of(Placement.vee(2), 2, costs, 90)), 0)

    assert own == RankStages((0, 3), 2, 90, (10, 40), (4, 10), (2.0, 8.0), (10.0, 10.0), (1.0, 1.0))
    assert (own.room(0), own.room(1)) == (80, 40)
    assert (own.most_activations(0), own.most_activations(1)) == (9, 9)
    assert own.all_of([1]) == 8.0 + 10.0 + 1.0
