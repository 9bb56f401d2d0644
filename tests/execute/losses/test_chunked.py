"""Log-probabilities in chunks have the bits of all at once, their gradients are equal, and a chunk is what is held."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import ConfigError, PenstockError
from penstock.execute.losses.chunked import LogProbsLoss, label_log_probs, next_labels
from penstock.execute.losses.tails import TailedOutput
from tests.support.local_pipelines import error_of, values
from tests.support.memory import MALLOC

VOCABULARY, WIDTH, ROWS, LENGTH = 50, 16, 3, 40


def head(dtype=torch.float32, *, bias=False):
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)


def labels_of(ignored=0):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[:, :ignored] = -100
    return labels


def whole(logits, labels):
    """Compute what a chunked loss must be equal to."""
    log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return torch.where(labels != -100, log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2, 7, 119, 120, "auto"])
def test_log_probs_have_the_bits_of_all_positions_at_once_and_the_same_gradients(dtype, chunk):
    layer, hidden, labels = head(dtype, bias=True), values(2, ROWS, LENGTH, WIDTH).to(dtype), labels_of(ignored=3)
    factors = values(3, ROWS, LENGTH)
    found, expected = [hidden.clone().requires_grad_() for _ in range(2)]

    log_probs = label_log_probs(TailedOutput(found, layer), labels, chunk=chunk)
    (log_probs * factors).sum().backward()
    gradients = [layer.weight.grad.clone(), layer.bias.grad.clone(), found.grad]
    layer.zero_grad()
    reference = whole(layer(expected), labels)
    (reference * factors).sum().backward()

    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if chunk != 2:  # so few rows take other kernels of the BLAS
        assert torch.equal(log_probs, reference)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    assert (log_probs - reference).abs().max() <= 1e-6
    for gradient, wanted in zip(gradients, [layer.weight.grad, layer.bias.grad, expected.grad], strict=True):
        assert (gradient - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_a_second_backward_of_the_same_graph_adds_the_same_gradients_and_without_gradients_nothing_is_saved():
    layer, hidden, labels = head(), values(2, ROWS, LENGTH, WIDTH), labels_of()
    output = TailedOutput(hidden, layer)
    for _ in range(2):
        label_log_probs(output, labels, chunk=50).sum().backward()
    twice = layer.weight.grad.clone()
    layer.zero_grad()
    label_log_probs(output, labels, chunk=50).sum().backward()

    torch.testing.assert_close(twice, 2 * layer.weight.grad)
    with torch.no_grad():
        assert label_log_probs(output, labels, chunk=50).grad_fn is None


@pytest.mark.parametrize("shift", [False, True])
def test_the_chunked_cross_entropy_is_the_mean_over_the_labels_that_count(shift):
    layer, hidden, labels = head(), values(2, ROWS, LENGTH, WIDTH), labels_of(ignored=4)
    logits = layer(hidden)
    pair = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)

    found = ps.losses.chunked_cross_entropy(TailedOutput(hidden, layer), labels, chunk=11, shift=shift)

    torch.testing.assert_close(found, F.cross_entropy(pair[0].flatten(0, 1), pair[1].flatten(), ignore_index=-100))
    ignored = torch.full_like(labels, -100)
    assert ps.losses.chunked_cross_entropy(TailedOutput(hidden, layer), ignored, shift=shift) == 0


def test_next_labels_end_with_one_that_does_not_count():
    assert next_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


def test_a_loss_of_log_probs_gets_those_of_next_tokens_and_the_target_as_it_is():
    layer, hidden, labels = head(), values(2, ROWS, LENGTH, WIDTH), labels_of()
    target = {"labels": labels, "advantages": torch.ones(ROWS)}
    seen = []

    def function(log_probs, target, *, weight):
        seen.append((log_probs, target, weight))
        return log_probs.mean()

    loss = LogProbsLoss(function, chunk=13)

    loss(TailedOutput(hidden, layer), target, weight=0.5)
    (log_probs, found, weight) = seen[0]
    assert torch.equal(log_probs, whole(layer(hidden), next_labels(labels))[:, :-1])
    assert found is target
    assert weight == 0.5
    assert ps.losses.chunked_cross_entropy.takes_tail
    assert loss.takes_tail


@pytest.mark.parametrize(
    ("output", "target", "told"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), "got a Tensor as the output of the model"),
        (TailedOutput(("two",), None), torch.zeros(2, 3, dtype=torch.int64), "the last layer gets a tuple and not"),
        (
            TailedOutput(torch.zeros(2, 3, 4), None),
            torch.ones(2, 4).long(),
            "need labels of shape (2, 3), one for each",
        ),
        (TailedOutput(torch.zeros(2, 3, 4), None), (1, 2), "the target is a tuple without a tensor of labels; pass"),
        (TailedOutput(torch.zeros(2, 3, 4), None), {"tokens": 1}, "or a dict that has them under 'labels'"),
    ],
    ids=["logits", "two inputs", "a longer target", "a tuple", "a dict without labels"],
)
def test_what_no_loss_can_be_made_of_is_refused(output, target, told):
    error = error_of(LogProbsLoss(lambda log_probs, target: log_probs.mean()), output, target)

    assert isinstance(error, PenstockError)
    assert told in str(error)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_labels_of_another_type_are_refused(dtype):
    output = TailedOutput(torch.zeros(2, 3, 4), torch.nn.Linear(4, 200))
    error = error_of(ps.losses.chunked_cross_entropy, output, torch.ones(2, 3, dtype=dtype), shift=True)

    assert isinstance(error, PenstockError)
    assert f"labels are of {dtype}; expected torch.int64" in str(error)


def test_a_label_that_the_vocabulary_does_not_have_is_refused_with_both():
    labels = labels_of()
    labels[1, 2] = VOCABULARY + 7

    with pytest.raises(PenstockError, match=r"label 57, but the model has a vocabulary of 50.*tokenizer"):
        label_log_probs(TailedOutput(values(2, ROWS, LENGTH, WIDTH), head()), labels, chunk=30)


def test_a_negative_label_that_is_no_mark_is_refused_with_what_marks_one():
    labels = labels_of()
    labels[1, 2] = -7

    with pytest.raises(PenstockError, match=r"label -7; expected one from 0 to 49, or -100 where nothing is to be"):
        label_log_probs(TailedOutput(values(2, ROWS, LENGTH, WIDTH), head()), labels, chunk=30)


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True, "all"])
def test_a_chunk_that_is_no_size_is_refused(chunk):
    with pytest.raises(ConfigError, match=r"expected a number of positions of at least 1, or 'auto'"):
        LogProbsLoss(lambda log_probs, target: log_probs.mean(), chunk=chunk)
    with pytest.raises(ConfigError, match=r"expected a number of positions of at least 1, or 'auto'"):
        ps.losses.chunked_cross_entropy(TailedOutput(values(1, 1, 2, WIDTH), head()), labels_of()[:1, :2], chunk=chunk)


def test_a_function_that_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="a str; expected a function of log_probs and target"):
        LogProbsLoss("mean")


def peak_of_a_step(schedule, length, chunk):
    """Return the most bytes that a step of tests/support/tail_memory.py takes, in a process of its own."""
    command = [sys.executable, "-m", "tests.support.tail_memory", schedule, str(length), str(chunk)]
    return int(subprocess.run(command, env=os.environ | MALLOC, capture_output=True, check=True, timeout=120).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.full)])
def test_the_last_stage_holds_its_hidden_states_and_one_chunk(schedule):
    chunk, hidden_bytes = 256, 4096 * 64 * 4

    of_one_chunk = peak_of_a_step(schedule, chunk, chunk)
    of_all = peak_of_a_step(schedule, 4096, "auto")

    assert of_all < 1.2 * (of_one_chunk + hidden_bytes)
