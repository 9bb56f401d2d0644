"""A forward runs between two points, with stand-ins for the rest: values, modes, and what it refuses."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.points import cut_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.place = nn.Parameter(torch.randn(4))
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, words):
        hidden = self.words(words) + self.place
        for block in self.blocks:
            assert block.in_features == 4  # a stand-in has the attributes of its module
            hidden = block(hidden) * 3
        return self.head(self.drop(hidden))


WORDS = torch.arange(5)


def test_a_stand_in_is_of_the_class_of_its_module_without_values_and_runs_in_a_forward_alone():
    model = Model()
    frame = Frame(Template(model, cut_model(model, ["blocks.*"])), torch.device("cpu"))

    block = frame.model.blocks[0]
    assert isinstance(block, nn.Linear)
    assert block.weight.shape == (4, 4)
    assert block.weight.is_meta
    with pytest.raises(PenstockError, match="outside of a forward"):
        frame.model.blocks[0](torch.ones(5, 4))


def test_modules_around_the_points_are_in_the_mode_of_the_part_and_draw_nothing_before_it():
    model = Model()
    parts = cut(model, ["blocks.*"])
    for part in parts:
        part.train()
    torch.manual_seed(0)
    before = torch.get_rng_state()

    hidden = parts[0](words=WORDS)
    for part in parts[1:-2]:
        hidden = part(hidden, words=WORDS)
    assert torch.equal(before, torch.get_rng_state()), "a dropout of another part has drawn"
    parts[-2](hidden, words=WORDS)
    assert not torch.equal(before, torch.get_rng_state())
    assert model.drop.training, "the model itself stays as it is"


def test_a_module_that_its_owner_puts_into_evaluation_mode_stays_in_it():
    model = Model()
    model.drop.eval()
    hidden = cut(model, ["blocks.*"])[-2](torch.ones(5, 4), words=WORDS)
    assert (hidden != 0).all()


def test_what_the_owner_changes_around_the_points_holds_from_the_next_forward_on():
    model = Model()
    part = cut(model, ["blocks.*"])[-2]
    part(torch.ones(5, 4), words=WORDS)
    model.drop.p = 0.0
    assert (part(torch.ones(5, 4), words=WORDS) != 0).all()
    model.drop = nn.Identity()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"words": kwargs["words"][:2]}), with_kwargs=True
    )
    assert part(torch.ones(2, 4), words=WORDS).shape == (2, 4)
