"""The forward calls the points of a cut in their order, or is refused."""

import pytest

from penstock.errors import PenstockError
from tests.models.cutting.test_frame import WORDS, Model, course_of, frame_of


def test_points_out_of_order_are_refused_by_both_names():
    model = Model()
    frame = frame_of(model)
    course = course_of(frame, "head", None, {}, None, ("blocks.0", "blocks.2", "blocks.1", "head"))

    with pytest.raises(PenstockError, match=r"calls 'blocks.1' where 'blocks.2' was expected"):
        frame.run(lambda copied: copied(WORDS), course, {}, is_training=False)
