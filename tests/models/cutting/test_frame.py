"""A forward runs between two points, with stand-ins for the rest: values, modes, and what it refuses."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.course import Course
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.points import cut_model, tensor_of


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.place = nn.Parameter(torch.randn(4))
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)
        self.modes = []

    def forward(self, words):
        hidden = self.words(words) + self.place
        self.modes.append(self.drop.training)
        for block in self.blocks:
            assert block.in_features == 4  # a stand-in has the attributes of its module
            hidden = block(hidden) * 3
        return self.head(self.drop(hidden))


def frame_of(model, points=("blocks.*",)):
    return Frame(Template(model, cut_model(model, points)), torch.device("cpu"))


def course_of(frame, start, stop, lent, arrived=None, points=("blocks.0", "blocks.1", "blocks.2", "head")):
    places = {name: place for place, name in enumerate(points)}
    return Course(places, frame.device, start, stop, lent, arrived)


WORDS = torch.arange(5)


def run(model, start, stop, names, arrived=None, tensors=(), is_training=False):
    frame = frame_of(model)
    course = course_of(frame, start, stop, {name: model.get_submodule(name) for name in names}, arrived)
    held = {name: tensor_of(model, name) for name in tensors}
    output = frame.run(lambda copied: copied(WORDS), course, held, is_training=is_training)
    return output, course, frame


def test_modules_around_the_points_are_in_the_mode_of_the_part_and_draw_nothing_before_it():
    model = Model()
    torch.manual_seed(0)
    before = torch.get_rng_state()

    run(model, "blocks.0", "blocks.1", ["blocks.0"], torch.ones(5, 4), is_training=True)
    assert torch.equal(before, torch.get_rng_state()), "a dropout of another part has drawn"
    output, _, frame = run(model, "head", None, ["head"], torch.ones(5, 4), is_training=True)
    assert not frame.model.drop.training
    assert output.shape == (5, 5)
    run(model, None, "blocks.0", ["words"], tensors=["place"], is_training=True)
    assert model.drop.training, "the model itself stays as it is"


def test_a_stand_in_is_of_the_class_of_its_module_without_values_and_runs_in_a_forward_alone():
    frame = frame_of(Model())

    block = frame.model.blocks[0]
    assert isinstance(block, nn.Linear)
    assert next(frame.model.words.parameters()).device.type == "cpu"
    assert block.weight.shape == (4, 4)
    assert block.weight.isnan().all()
    assert block.weight.device.type == "cpu"
    with pytest.raises(PenstockError, match="outside of a forward"):
        frame.model.blocks[0](torch.ones(5, 4))
