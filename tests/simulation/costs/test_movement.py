"""What rings and optimizers move."""

import pytest

from penstock.simulation.costs.movement import adam_moved_bytes, ring_s


def test_a_ring_moves_the_parts_of_the_others_after_its_latency():
    assert ring_s(800, 4, 100) == 6
    assert ring_s(800, 4, 100, latency_s=1) == 7


def test_a_ring_of_one_needs_no_time():
    assert ring_s(800, 1, 100, latency_s=1) == 0


@pytest.mark.parametrize(("has_master_copy", "moved"), [(True, 2 + 2 + 24), (False, 2 + 4 + 24)])
def test_adam_reads_parameters_only_where_no_master_copy_stands_for_them(has_master_copy, moved):
    assert adam_moved_bytes(2, 2, 12, has_master_copy=has_master_copy) == moved
