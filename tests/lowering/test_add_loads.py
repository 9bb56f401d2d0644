"""LOAD rows of the stages at both ends of a route, each right in front of the forward that needs it."""

import pytest

from penstock.lowering import lower
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import drawn, lines


@pytest.mark.feature("B14")
def test_a_load_is_right_before_its_forward_or_its_pair():
    program = lower(build("dualpipe-v", ranks=1, microbatches=2), loads=True)

    assert drawn(program) == lines(
        """
        0LOAD0 0F0 1LOAD0 1F0 0LOAD1 0F1 1B0 1LOAD1 (1F1;0B0) 1B1 1REDUCE_GRAD 0I1 0W1 0REDUCE_GRAD
        """
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_ends_with_loads_of_its_end_stages(name):
    schedule = build(name, ranks=4, microbatches=8)
    program = lower(schedule, loads=True, barriers=True)

    check(program, transport="all")
    loads = [row for order in map(program.__getitem__, range(4)) for row in order if "LOAD" in str(row)]
    ends = {stage for route in schedule.placement.routes for stage in (route[0], route[-1])}
    assert {row.stage for row in loads} == ends
    num_of_stage = schedule.num_microbatches // len(schedule.placement.routes)
    assert len(loads) == len(set(loads)) == len(ends) * num_of_stage
