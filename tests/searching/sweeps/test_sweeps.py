"""Which placements have sweeps."""

import pytest

from penstock.placement import Placement
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.simulation import Costs
from tests.searching.cases import problem_of


@pytest.mark.parametrize(
    ("placement", "has_some"),
    [
        (Placement.line(4), True),
        (Placement.line(1), True),
        (Placement.vee(4), True),
        (Placement.vee(1), False),
        (Placement.loop(2, 4), False),
        (Placement.wave(2, 8), False),
    ],
)
def test_lines_and_vees_have_some(placement, has_some):
    found = [*sequences_of_sweeps(problem_of(placement, 8, Costs.uniform()))]

    assert bool(found) == has_some
    assert all(each is not None for each in found)
