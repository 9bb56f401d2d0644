"""What a memory report counts is what the device's allocator has given out, and its prediction the allocator's peak."""

import pytest

from penstock.execute.observing.rank_memory import Moment
from tests.emulated.held_memory import NUM_MICROBATCHES, Held, look_at_memory

pytestmark = pytest.mark.emulated

CELLS = [
    Held("1f1b", 3, 2),
    Held("zb-h1", 2, 1),
    *(pytest.param(held, marks=pytest.mark.slow) for held in (Held("gpipe", 2), Held("zbv", 2, 2))),
]
LEAST_SHARE = 0.98


@pytest.mark.feature("H8")
@pytest.mark.parametrize("held", CELLS, ids=str)
def test_a_report_has_every_byte_of_the_allocator_and_predicts_its_peak(emulated, held):
    """But for the batch, which is the caller's, the losses, and what the allocator rounds up.

    The prediction lacks what a layer takes and gives back within one instruction.
    """
    found = emulated.run(look_at_memory, held, num_ranks=held.num_ranks, timeout_s=60)

    for looked in found:
        batch_bytes = looked.input_bytes + looked.target_bytes
        # Autograd keeps views of the batch, and what it keeps is counted.
        partly = {0, looked.input_bytes, looked.target_bytes, batch_bytes}
        assert set(looked.differences) <= partly
        assert [looked.differences[0], looked.differences[-1]] == [batch_bytes] * 2
        begin, own = looked.own.points[0], looked.own
        assert begin.name == Moment.BEGIN
        assert begin.allocated_bytes == begin.counted_bytes + own.optimizer_bytes + batch_bytes
        predicted = looked.predicted_bytes + batch_bytes
        assert LEAST_SHARE * looked.peak_bytes <= predicted <= looked.peak_bytes
        assert len(looked.differences) > 2 * NUM_MICROBATCHES
