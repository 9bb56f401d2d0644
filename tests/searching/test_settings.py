"""Settings: how many microbatches are under way."""

from penstock.placement import Placement
from penstock.searching.settings import ANY_NUMBER, settings_for
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_on_a_line_they_go_from_those_of_1f1b_to_those_of_zb_h2():
    problem = problem_of(Placement.line(3), 4, Costs.uniform())

    found = {tuple(each.most_under_way.tolist()) for each in settings_for(problem)}

    assert {(3, 2, 1), (5, 3, 1), (6, 4, 2), (ANY_NUMBER,) * 3} <= found


def test_with_several_stages_a_rank_memory_decides_and_depth_is_a_choice():
    problem = problem_of(Placement.vee(2), 4, Costs.uniform())

    settings = list(settings_for(problem))

    assert {tuple(each.most_under_way.tolist()) for each in settings} == {(ANY_NUMBER,) * 4}
    assert {tuple(each.deep_first.tolist()) for each in settings} == {(True, True), (False, False)}
