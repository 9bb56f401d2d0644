"""A part of a model: its names, its keywords, the short way of blocks, and threads side by side."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.execute.stages.keywords import layer_place
from penstock.execute.stages.signatures import taken_keywords
from penstock.models.cutting.cut import cut


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, hidden, scale, *, shift):
        return self.inner(hidden) * scale + shift * self.own


@functools.cache
def forwards_run():
    """An item for each forward of a `Model`, where a cut does not look for state."""
    return []


class Model(nn.Module):
    """Counts its forwards, to see which layers go the short way."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, words, mask=None):
        forwards_run().append(None)
        hidden = self.words(words)
        scale = torch.arange(1, words.shape[-1] + 1, dtype=hidden.dtype)[:, None]
        shift = 1.0 if mask is None else mask[..., None].to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, scale, shift=shift)
        return self.head(hidden).tanh()


def run(parts, **batch):
    hidden = parts[0](**batch)
    for part in parts[1:]:
        hidden = part(hidden, **batch)
    return hidden


WORDS = torch.tensor([[1, 2, 3], [4, 0, 1]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_parameters_have_the_names_and_are_the_objects_of_the_whole_model():
    model = Model()
    parts = cut(model, ["blocks.*"])

    found = {name: parameter for part in parts for name, parameter in part.named_parameters()}

    assert [part.layer_name for part in parts] == ["words", *(f"blocks.{number}" for number in range(4)), "head"]
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(found[name] is parameter for name, parameter in model.named_parameters())
    assert {name for part in parts for name in part.state_dict()} == model.state_dict().keys()


def test_a_part_takes_the_keywords_that_the_forward_of_the_model_names():
    part = cut(Model(), ["blocks.*"])[2]

    assert taken_keywords(part).names() == {"words", "mask"}
    assert "blocks.1 .. blocks.2" in repr(part)


def test_messages_name_the_class_of_the_block():
    parts = cut(Model(), ["blocks.*"])

    assert [part.shown_class for part in parts] == ["Embedding", "Block", "Block", "Block", "Block", "Linear"]
    parts[0].layer_name = "all before"
    assert parts[0].shown_class == "CutPart"
    assert layer_place("blocks.0", parts[1]) == "layer 'blocks.0' (Block)"


def test_blocks_go_the_short_way_from_the_second_forward_on_and_masks_stay_those_of_their_batch():
    model = Model().double()
    parts = cut(model, ["blocks.*"])
    batches = [(WORDS, MASK), (WORDS, 1 - MASK), (WORDS[:1], MASK[:1]), (WORDS, MASK)]

    for words, mask in batches:
        forwards_run().clear()
        found = run(parts, words=words, mask=mask)
        count = len(forwards_run())
        assert torch.equal(found, model(words, mask))
    assert count == 3, "one run without values, words, and head"
    for _ in range(2):
        forwards_run().clear()
        found = run(parts, words=WORDS)
        assert torch.equal(found, model(WORDS))


def test_threads_run_parts_of_one_model_side_by_side():
    model = Model().double()
    parts = cut(model, ["blocks.*"])
    copies = [copy.deepcopy(parts) for _ in range(4)]
    expected = {number: model(WORDS, MASK * number) for number in range(4)}

    def is_right(number):
        outputs = [run(copies[number], words=WORDS, mask=MASK * number) for _ in range(30)]
        return all(torch.equal(output, expected[number]) for output in outputs)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(4)))


def test_a_keyword_may_be_called_as_the_positional_arguments_are():
    class Named(Model):
        def forward(self, inputs, mask=None):
            return super().forward(inputs, mask)

    model = Named()
    assert torch.equal(run(cut(model, ["blocks.*"]), inputs=WORDS, mask=MASK), model(WORDS, MASK))


class Varied(Model):
    """Calls its blocks in a way of its own."""

    def forward(self, words, mask=None):
        hidden = first = self.words(words)
        for number, block in enumerate(self.blocks):
            hidden = self.call(block, number, hidden, first)
        return self.end(hidden)

    def call(self, block, number, hidden, first):
        return block(hidden, 1.0, shift=0.0)

    def end(self, hidden):
        return self.head(hidden)


class Scaled(Varied):
    def call(self, block, number, hidden, first):
        return block(hidden, first, shift=0.0)


class Later(Varied):
    def call(self, block, number, hidden, first):
        return block(hidden, first.detach() if number == 2 else 1.0, shift=0.0)


class Looking(Varied):
    def call(self, block, number, hidden, first):
        if number == 2 and hidden.mean() > 0:
            raise IndexError("nothing here")
        return block(hidden, 1.0, shift=0.0)


class Failing(Varied):
    def end(self, hidden):
        raise IndexError("behind all")


@pytest.mark.parametrize("kind", [Scaled, Later])
def test_arguments_of_earlier_layers_come_with_their_gradients(kind):
    model = kind().double()
    model(WORDS).sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    parts = cut(model, ["blocks.*"])
    for _ in range(2):
        model.zero_grad()
        run(parts, words=WORDS).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Looking, r"decides by the value of a tensor \(__bool__\).*'blocks.1'"),
        (Failing, r"fails where it runs without what its submodules compute: IndexError: behind all"),
    ],
)
def test_a_forward_that_no_part_can_run_is_refused(kind, words):
    with pytest.raises(PenstockError, match=words):
        run(cut(kind(), ["blocks.*"]), words=WORDS)


def test_leaves_that_another_run_left_behind_are_refused():
    parts = cut(Later(), ["blocks.*"])
    with pytest.raises(PenstockError, match=r"'blocks.1' gets \[\] of earlier layers; expected \['words#0.0'\]"):
        parts[2](torch.ones(2, 3, 4), words=WORDS)
