"""All layers run their forwards, stage by stage, and one of each kind its backwards."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.models import LayerSpec
from penstock.sizing import walk
from penstock.sizing.layer_work import layer_work
from tests.sizing.models import FIELDS, Block, differences, plain_layers, reported, small_layers

SIZES = {"sequence_length": 128, "microbatch": 2}


def loss_of(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def named(works):
    return {work.name: work for work in works}


@pytest.mark.parametrize("split", [[2, 4], [6]], ids=["two stages", "one stage"])
def test_every_byte_of_a_layer_is_the_one_that_a_pipeline_reports(split):
    layers = small_layers()

    works = layer_work(layers, split=split, loss=loss_of, **SIZES)

    assert differences(works, reported(layers, split, loss=loss_of)) == []
    assert all(work.weight_context_bytes > 0 for work in works[1:-2])


def test_modules_are_counted_as_specs_are():
    layers = plain_layers()
    split = [2, 2]

    assert (
        differences(layer_work(layers, split=split, loss=loss_of, **SIZES), reported(layers, split, loss=loss_of)) == []
    )


def test_a_tied_head_on_the_stage_of_its_table_holds_no_parameters():
    layers = small_layers(tied_head=True)

    together, apart = (layer_work(layers, split=split, **SIZES) for split in ([6], [2, 4]))

    table_bytes = 4 * 512 * 64
    assert (together[-1].parameter_bytes, apart[-1].parameter_bytes) == (0, table_bytes)
    assert (together[-1].gradient_bytes, apart[-1].gradient_bytes) == (0, table_bytes)


def test_layers_of_one_kind_run_their_backwards_once():
    with patch.object(walk, "work_of", side_effect=walk.work_of) as run:
        works = layer_work(plain_layers(num_blocks=5), **SIZES)

    assert run.call_count == 3
    assert len(set(works[1].forward.products)) == 2
    assert works[1].backward_input == works[5].backward_input


class Scaled(nn.Module):
    """Two kinds of one class with equal parameters."""

    def __init__(self, is_wide):
        super().__init__()
        self.linear, self.is_wide = nn.Linear(64, 256), is_wide

    def forward(self, hidden):
        return (
            self.linear(torch.cat([hidden, hidden]))[: len(hidden), :, :64]
            if self.is_wide
            else self.linear(hidden)[..., :64]
        )


def test_layers_of_equal_parameters_that_do_something_else_are_another_kind():
    embedding, *_, head = plain_layers()

    works = layer_work([embedding, Scaled(False), Scaled(True), head], **SIZES)

    assert works[2].forward.flops == 2 * works[1].forward.flops
    assert works[2].backward_weight.flops == 2 * works[1].backward_weight.flops


@pytest.mark.parametrize("split", [[2, 3], [5]], ids=["two stages", "one stage"])
def test_a_module_that_is_several_layers_is_counted_in_each(split):
    embedding, block, head = plain_layers(num_blocks=1)
    layers = [embedding, block, block, block, head]

    works = layer_work(layers, split=split, loss=loss_of, **SIZES)

    layer_bytes = reported(layers, split, loss=loss_of)
    # A report counts what waits for a weight in the first layer that has the weight.
    assert [field for field, *_ in differences(works, layer_bytes)] == ["weight_context_bytes"]
    assert sum(layer_bytes["weight_context_bytes"]) == sum(work.weight_context_bytes for work in works)
    assert min(layer_bytes["backward_workspace_bytes"][1:]) > 0
    assert works[3].parameter_bytes == 0 < works[1].activation_bytes == works[3].activation_bytes


class Branches(nn.Module):
    """Two kinds that call the same operations on other results."""

    def __init__(self, is_chain):
        super().__init__()
        self.up, self.left, self.right, self.down = (
            nn.Linear(*shape) for shape in ((64, 256), (256, 256), (256, 256), (256, 64))
        )
        self.is_chain = is_chain

    def forward(self, hidden):
        wide = self.up(hidden)
        left = self.left(wide)
        return self.down(left + self.right(left if self.is_chain else wide))


def test_layers_with_other_ways_through_the_same_operations_are_another_kind():
    layers = [plain_layers()[0], Branches(True), Branches(False), plain_layers()[-1]]
    split = [2, 2]

    works = layer_work(layers, split=split, loss=loss_of, **SIZES)

    assert differences(works, reported(layers, split, loss=loss_of)) == []
    assert works[1].weight_context_bytes > works[2].weight_context_bytes


class Puts(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.skip = nn.Embedding(100, 64), ps.Skip("tokens")

    def forward(self, tokens):
        hidden = self.table(tokens)
        self.skip.put(hidden)
        return hidden


class Gets(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.skip = nn.Linear(64, 64), ps.Skip("tokens")

    def forward(self, hidden):
        return self.linear(hidden) * self.skip.get()


def test_layers_with_skips_are_counted():
    works = layer_work([Puts(), Block(), Gets()], **SIZES)

    assert works[2].activation_bytes == 4 * 2 * 128 * 64 * 3  # both factors, and the input of the product


class Decides(nn.Module):
    def forward(self, hidden):
        return hidden * 2 if hidden.sum() > 0 else hidden


class Fails(nn.Module):
    def forward(self, hidden):
        return hidden @ torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Decides(), "layer '1' decides by values, which are not there"),
        (Fails(), "layer '1' cannot be counted without values: RuntimeError"),
        (LayerSpec("odd", Decides), "layer 'odd' decides by values"),
    ],
)
def test_a_layer_that_cannot_be_counted_is_refused_by_name(layer, words):
    with pytest.raises(ConfigError, match=words):
        layer_work([nn.Embedding(100, 64), layer], **SIZES)


def test_a_count_changes_neither_the_layers_nor_the_generator():
    layers = plain_layers()
    before = [parameter.clone() for layer in layers for parameter in layer.parameters()]
    state = torch.get_rng_state()

    layer_work(layers, **SIZES)

    after = [parameter for layer in layers for parameter in layer.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)
    assert torch.equal(torch.get_rng_state(), state)


def test_bytes_are_linear_in_the_microbatch():
    one, three = (layer_work(small_layers(), sequence_length=128, microbatch=size) for size in (1, 3))

    for field in ("activation_bytes", "message_bytes", "checkpoint_bytes"):
        shared = {work.name: getattr(work, field) for work in one}
        assert field in FIELDS
        assert all(getattr(work, field) <= 3 * shared[work.name] for work in three)
    assert three[0].message_bytes == 3 * one[0].message_bytes
