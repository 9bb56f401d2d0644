"""The forward calls the points of a cut in their order, or is refused."""

import pytest
import torch

from penstock.errors import PenstockError
from tests.models.cutting.test_frame import WORDS, Model, course_of, frame_of


def test_points_out_of_order_are_refused_by_both_names():
    model = Model()
    frame = frame_of(model)
    course = course_of(frame, "head", None, {}, None, ("blocks.0", "blocks.2", "blocks.1", "head"))

    with pytest.raises(PenstockError, match=r"calls 'blocks.1' where 'blocks.2' was expected"):
        frame.run(lambda copied: copied(WORDS), course, {}, is_training=False)


class Late(Model):
    """Calls what is defined first behind the first block, too."""

    def forward(self, words):
        hidden = self.blocks[0](self.words(words) + self.place)
        return self.head(hidden + self.words(words))


def test_a_module_of_another_part_that_is_called_behind_the_start_is_refused():
    frame = frame_of(Late())
    course = course_of(frame, "blocks.0", None, {}, torch.ones(5, 4))

    with pytest.raises(
        PenstockError, match=r"calls 'words' behind 'blocks.0', though it is defined before; name it as"
    ):
        frame.run(lambda copied: copied(WORDS), course, {}, is_training=False)


class Short(Model):
    """Ends before its last point."""

    def forward(self, words):
        return self.blocks[0](self.words(words) + self.place)


def test_a_forward_that_ends_before_the_point_at_which_a_part_ends_is_refused():
    frame = frame_of(Short())
    course = course_of(frame, None, "blocks.1", {})

    with pytest.raises(
        PenstockError, match=r"has ended and has not called 'blocks.1'; give the points of the cut in the"
    ):
        frame.run(lambda copied: copied(WORDS), course, {}, is_training=False)
