"""Both sides of skips have the methods that the other side calls."""

from penstock.execute.stages.feature import has_methods
from penstock.execute.stages.skips import StageSkipBuffer
from penstock.models.skip import Skip
from penstock.skipping import SkipBuffer, Skipping


def test_a_skip_can_be_begun_with_the_buffer_of_a_stage():
    skip, buffer = Skip("features"), StageSkipBuffer({}, "stage 1")
    assert has_methods(skip, Skipping)
    assert has_methods(buffer, SkipBuffer)

    skip.begin_skips(buffer)
    skip.put(3)
    assert (skip.get(), buffer.get("features")) == (3, 3)
    skip.end_skips()
