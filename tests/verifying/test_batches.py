"""Batches are taken in every form that a pipeline takes them in; the default loss has a gradient for each element."""

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.errors import ConfigError
from penstock.verifying.batches import default_loss, read_batches

CPU = torch.device("cpu")
TOKENS, LABELS = torch.zeros(2, 3), torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "has_target"),
    [
        (TOKENS, 1, [], False),
        ((TOKENS, LABELS), 2, [], False),
        ([TOKENS], 1, [], False),
        ({"x": TOKENS}, 0, ["x"], False),
        ({"x": TOKENS, "target": LABELS}, 0, ["x"], True),
        ({"x": TOKENS, "labels": LABELS}, 0, ["x", "labels"], False),
        (ps.Part(TOKENS, mask=TOKENS, target=LABELS), 1, ["mask"], True),
    ],
)
def test_a_batch_in_each_form(batch, args, kwargs, has_target):
    [part] = read_batches([batch], CPU, labels=False)

    assert len(part.args) == args
    assert list(part.kwargs) == kwargs
    assert (part.target is not None) == has_target


def test_labels_of_transformers_are_the_target():
    [part] = read_batches([{"input_ids": TOKENS, "labels": LABELS}], CPU, labels=True)

    assert part.target is LABELS
    assert list(part.kwargs) == ["input_ids"]


@pytest.mark.parametrize(
    ("batches", "message"),
    [([], "there is none"), (["text"], "batch 0 is 'text'"), ([TOKENS, None], "batch 1 is None")],
)
def test_what_is_no_batch_is_refused(batches, message):
    with pytest.raises(ConfigError, match=message):
        read_batches(batches, CPU, labels=False)


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ConfigError, match="batch 0 has a tensor on meta, but the model is on cpu"):
        read_batches([{"x": {"y": TOKENS.to("meta")}}], CPU, labels=False)


def test_the_default_loss_has_a_gradient_behind_a_norm_and_for_all_outputs():
    hidden = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    other = torch.randn(4, requires_grad=True)

    default_loss(
        (F.layer_norm(hidden, (8,)), {"other": other, "index": torch.ones(1, dtype=torch.int64)}), 0.0
    ).backward()

    assert hidden.grad.abs().min() > 1e-6
    assert other.grad.abs().min() > 1e-6


def test_an_output_that_nothing_can_be_trained_on_is_refused():
    with pytest.raises(ConfigError, match="no floating-point tensor"):
        default_loss(torch.ones(1, dtype=torch.int64), 0.0)
