"""Sweeps on a V: the schedules of ZB-V."""

from penstock.placement import Placement
from penstock.searching.sweeps.vee import vee_sweeps
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_each_setting_runs_again_while_ranks_idle_less():
    problem = problem_of(Placement.vee(8), 16, Costs.uniform(transfer=0.001))

    assert len(list(vee_sweeps(problem))) >= 8
