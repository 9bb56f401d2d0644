"""The least times along the route, added up by hand."""

from penstock.placement import Placement
from penstock.searching.bounds import Bound, Route
from penstock.simulation import Costs
from tests.searching.cases import problem_of

COSTS = Costs(
    forward_s=(1.0, 2.0, 4.0),
    backward_input_s=(8.0, 16.0, 32.0),
    backward_weight_s=(1.0,),
    latency_s=0.5,
    microbatch_compute_factor=(2.0, 1.0),
)


def test_times_along_the_route_are_those_of_the_fastest_microbatch_with_the_ways_between():
    route = Route(problem_of(Placement.line(3), 2, COSTS))

    assert route.forwards_between(0, 0) == 0.0
    assert route.forwards_between(0, 2) == 1.0 + 0.5 + 2.0 + 0.5
    assert route.inputs_between(0, 2) == 0.5 + 16.0 + 0.5 + 8.0
    assert route.there_and_back(0) == 0.5 + 2.0 + 0.5 + 4.0 + 32.0 + 0.5 + 16.0 + 0.5
    assert route.there_and_back(2) == 0.0
    assert route.forwards_between(1, 2) == 2.0 + 0.5
    assert route.inputs_between(1, 2) == 0.5 + 16.0
    assert route.inputs_between(1, 1) == route.forwards_between(1, 1) == 0.0


def test_the_time_on_a_serialized_link_is_a_part_of_the_way():
    costs = Costs.uniform(transfer=0.5, message_bytes=10, bandwidth_bytes_per_s=10.0, is_exclusive=True)
    route = Route(problem_of(Placement.line(2), 1, costs))

    assert route.forwards_between(0, 1) == 1.0 + 1.5


def test_the_terms_of_a_bound_add_up():
    bound = Bound("work", 2, {"begin": 1.5, "work": 3.0})

    assert bound.seconds == 4.5
    assert str(bound) == "work of rank 2: begin 1.5 s + work 3 s"
