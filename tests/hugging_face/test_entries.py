"""Further kinds of models train in a pipeline as they do by themselves, with the loss of labels that they compute."""

import copy

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.hugging_face.entries import BatchEntry, DecoderEntry, output_of
from penstock.models.cutting.entry import PartCall
from tests.hugging_face import tiny_further
from tests.hugging_face.families import furthest
from tests.support.local_pipelines import on_ranks

pytest.importorskip("transformers")

LARGEST = 1e-6
WAYS = ((1, "1f1b"), (2, "1f1b"), (4, "1f1b"), (2, "interleaved-1f1b"), (2, "zbv"))
QUICK = {"t5": 1, "bert": 2, "vit": 4, "llama-rows": 3, "qwen3_vl": 1, "gemma4": 4}
"""One way by default for each kind of model."""
CELLS = [
    pytest.param(name, *way, marks=() if QUICK.get(name) == index else pytest.mark.slow)
    for name in tiny_further.ALL
    for index, way in enumerate(WAYS)
]


def trained(layers, name, ranks, schedule):
    """Return, per rank, the loss of a step and the gradients of the second of two, with the short way of blocks."""

    batch, labels = tiny_further.batch_of(name)
    batch, specs = tiny_further.split_batch(name, batch)

    def train(transport):
        where = {"ranks": 1} if ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(layers, schedule, tiny_further.NUM_MICROBATCHES, specs=specs, **where)
        losses = []
        for _ in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            losses.append(pipeline.step(**batch, target=labels).loss.item())
        return losses[0], {key: each.grad.clone() for key, each in pipeline.named_parameters() if each.grad is not None}

    return on_ranks(ranks, train)


@pytest.mark.filterwarnings("ignore:2 microbatches")
@pytest.mark.parametrize(("name", "ranks", "schedule"), CELLS)
def test_gradients_are_those_of_the_model_itself(name, ranks, schedule):
    model = tiny_further.model_of(name)
    batch, labels = tiny_further.batch_of(name)
    loss, gradients = tiny_further.reference(copy.deepcopy(model), name, batch, labels)
    layers = ps.from_transformers(model, example=batch if name in tiny_further.VISION_LANGUAGE else None)

    found = trained(layers, name, ranks, schedule)

    for found_loss, found_gradients in found:
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert furthest(found_gradients, gradients, model.all_tied_weights_keys) < LARGEST
    names = {model.all_tied_weights_keys.get(key, key) for _, part in found for key in part}
    assert gradients.keys() <= names


class Own(nn.Module):
    def can_generate(self):
        return True

    def forward(
        self, input_ids=None, attention_mask=None, pixel_values=None, inputs_embeds=None, labels=None, **others
    ):
        return {"logits": (input_ids, attention_mask, pixel_values, inputs_embeds), "others": others}


class Leaves:
    """A run that has no values of the batch."""

    def batch_leaf(self, name, tensor):
        return name, tuple(tensor.shape), tensor.is_meta


def test_a_decoder_takes_tokens_on_the_first_stage_and_their_shape_on_others():
    entry, tokens, mask = DecoderEntry(Own()), torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5)

    first = entry.call(Own(), PartCall((tokens,), {"attention_mask": mask}, is_first=True))
    later = entry.call(Own(), PartCall((torch.ones(2, 5, 7),), {"attention_mask": mask}, is_first=False, run=Leaves()))

    assert first[0] is tokens
    assert first[1] is later[1] is mask
    assert later[0] == ("input_ids", (2, 5), True)


def test_all_other_models_take_the_batch_by_name_on_every_stage_and_no_settings():
    entry, tokens = BatchEntry(Own()), torch.ones(2, 5, dtype=torch.int64)

    assert list(entry.batch_signature.parameters) == ["input_ids", "attention_mask", "pixel_values", "inputs_embeds"]
    for is_first in (True, False):
        call = PartCall(() if is_first else (torch.ones(2),), {"pixel_values": tokens}, is_first=is_first)
        assert entry.call(Own(), call)[2] is tokens


def test_an_output_is_its_logits_or_its_last_state_or_all_of_it():
    assert output_of({"loss": 1, "logits": 2, "last_hidden_state": 3}) == 2
    assert output_of({"last_hidden_state": 3, "pooler_output": 4}) == 3
    assert output_of({"start_logits": 3}) == {"start_logits": 3}
    assert output_of((1, 2)) == (1, 2)
