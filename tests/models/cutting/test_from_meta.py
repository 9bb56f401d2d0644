"""A module on the meta device becomes layers that read their own tensors, and make what no file has."""

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.models.cutting.cut import cut
from penstock.models.cutting.from_meta import cut_from_meta
from tests.models.cutting.test_part import run

WORDS = torch.tensor([[1, 2, 3], [4, 0, 1]])


class Places(nn.Module):
    """A table that is not saved, as that of rotary embeddings, and made anew by a reset."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(8, 4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.table = torch.arange(8)[:, None] / torch.arange(1, 5)

    def forward(self, hidden):
        return hidden + self.table[: hidden.shape[1]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.places = nn.Linear(4, 4), Places()
        self.again = self.inner  # tied within the block

    def forward(self, hidden):
        return self.again(self.places(self.inner(hidden)))


class Model(nn.Module):
    """Has a saved buffer before the points, a table between them, and a tied head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5, bias=False)
        self.words = nn.Embedding(5, 4)
        self.words.weight = self.head.weight
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.places = Places()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words):
        hidden = self.words(words) * self.scale
        for block in self.blocks:
            hidden = self.places(block(hidden))
        return self.head(hidden)


POINTS = ["blocks.*", "head"]


def on_meta(kind=Model):
    with torch.device("meta"):
        return kind()


class Reads(dict):
    """The state of a model, which notes the names that are read."""

    def __init__(self, model):
        super().__init__(model.state_dict())
        self.names = []

    def read(self, name):
        self.names.append(name)
        return self[name].double()  # a type that is not the model's


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_layers_compute_what_the_model_does_which_has_their_values(model):
    parts = [spec() for spec in cut_from_meta(on_meta(), POINTS, Reads(model).read)]

    for _ in range(2):
        assert torch.equal(run(parts, words=WORDS), run(cut(model, POINTS), words=WORDS))
    assert {tensor.dtype for part in parts for tensor in part.state_dict().values()} == {torch.float32}


def test_a_layer_reads_its_own_tensors_when_it_is_built_and_shared_ones_once(model):
    stored = Reads(model)
    specs = cut_from_meta(on_meta(), POINTS, stored.read)
    assert stored.names == []

    part = specs[2]()

    assert stored.names == ["blocks.1.inner.weight", "blocks.1.inner.bias"]
    block = part.get_submodule("blocks.1")
    assert block.again is block.inner
    assert [spec.tied for spec in specs] == [()] * 4 + [(("head.weight", "words.weight"),)]
    assert specs[1].weight == 16


def test_a_layer_on_the_meta_device_reads_nothing(model):
    stored = Reads(model)
    with torch.device("meta"):
        part = cut_from_meta(on_meta(), POINTS, stored.read)[1].build()

    assert stored.names == []
    assert all(tensor.is_meta for tensor in part.state_dict().values())


class Forgetful(Places):
    def reset_parameters(self):
        self.table[1:] = 0  # leaves its first row as it is


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool), persistent=False)

    def forward(self, hidden):
        return hidden


@pytest.mark.parametrize(("kind", "name"), [(Forgetful, "table"), (Plain, "mask")])
def test_a_buffer_that_nothing_makes_is_refused_by_its_name(kind, name):
    model = on_meta()
    model.blocks[1].places = on_meta(kind)

    with pytest.raises(
        ConfigError, match=rf"'blocks\.1\.places\.{name}' is on the meta .* {kind.__name__} a reset_par"
    ):
        cut_from_meta(model, POINTS, None)


def test_a_buffer_that_was_made_elsewhere_stays_and_no_random_number_is_drawn(model):
    bare = on_meta()
    bare.blocks[1].places = Plain()  # on the CPU
    before = torch.get_rng_state()

    part = cut_from_meta(bare, POINTS, Reads(model).read)[2]()

    assert torch.equal(torch.get_rng_state(), before)
    assert part.get_submodule("blocks.1.places").mask.all()


class Scaled(nn.Module):
    """Has a saved buffer that torch makes on the CPU, whatever the default device is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.from_numpy(np.ones(4, dtype=np.float32)))

    def forward(self, hidden):
        return hidden * self.scale


def test_a_saved_buffer_that_was_made_elsewhere_takes_its_value_of_the_file(model):
    bare = on_meta()
    model.blocks[1].places, bare.blocks[1].places = Scaled(), on_meta(Scaled)
    model.blocks[1].places.scale.copy_(torch.arange(4))

    part = cut_from_meta(bare, POINTS, Reads(model).read)[2]()

    assert part.get_submodule("blocks.1.places").scale.tolist() == [0, 1, 2, 3]


def test_buffers_that_a_reset_makes_have_the_type_of_the_model(model):
    model.bfloat16()

    parts = [spec() for spec in cut_from_meta(on_meta().bfloat16(), POINTS, Reads(model).read)]

    for name in ("blocks.1.places.table", "blocks.2.places.table"):
        own = next(dict(part.named_buffers())[name] for part in parts if name in dict(part.named_buffers()))
        assert own.dtype is torch.bfloat16
        assert torch.equal(own, model.get_buffer(name))
    assert torch.equal(run(parts, words=WORDS), run(cut(model, POINTS), words=WORDS))


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0)


def test_a_tensor_that_is_neither_a_parameter_nor_a_buffer_is_refused_by_its_name():
    model = on_meta()
    model.blocks[1].places = on_meta(Attribute)

    with pytest.raises(
        ConfigError, match=r"'blocks\.1\.places\.scale' is on the meta .*persistent=False.* Attribute f"
    ):
        cut_from_meta(model, POINTS, None)
