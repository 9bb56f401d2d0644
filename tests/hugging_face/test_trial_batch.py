"""Batches of a trial are made of the config, or are the caller's."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import ConfigError
from penstock.hugging_face.trial_batch import trial_batch
from penstock.models.cutting.batch_signature import BatchSignature


class Model(torch.nn.Module):
    def __init__(self, main_input_name, **config):
        super().__init__()
        self.main_input_name, self.dtype = main_input_name, torch.bfloat16
        self.config = SimpleNamespace(**{"is_encoder_decoder": False, **config})

    def forward(self, input_ids=None, pixel_values=None):
        pass


def made(model, example=None):
    batch = trial_batch(model, example, BatchSignature(model))
    return {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}


def test_tokens_and_images_are_made_of_the_config():
    tokens, image = ((1, 8), torch.int64), ((1, 3, 16, 16), torch.bfloat16)
    vision = SimpleNamespace(image_size=(16, 16), num_channels=3)

    assert made(Model("input_ids")) == {"input_ids": tokens}
    assert made(Model("input_ids", is_encoder_decoder=True)) == {"input_ids": tokens, "decoder_input_ids": tokens}
    assert made(Model("pixel_values", image_size=16, num_channels=3)) == {"pixel_values": image}
    assert made(Model("pixel_values", vision_config=vision)) == {"pixel_values": image}


def test_an_example_is_taken_as_far_as_the_forward_takes_it_in_the_type_of_the_model():
    example = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "pixel_values": torch.ones(2, 4), "labels": "x"}

    assert made(Model("input_ids"), example) == {
        "input_ids": ((2, 3), torch.int64),
        "pixel_values": ((2, 4), torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("name", "example", "told"),
    [
        ("input_values", None, "takes 'input_values', of which its config does not say the shape; pass example="),
        ("pixel_values", None, "takes 'pixel_values', of which its config"),
        ("input_ids", [1], "expected a dict, one batch as the processor makes it"),
        ("input_ids", {"words": torch.ones(1)}, "example: has 'words', of which the forward of Model takes no tensor"),
    ],
)
def test_what_no_batch_can_be_made_of_is_refused(name, example, told):
    with pytest.raises(ConfigError, match=told):
        made(Model(name), example)
