"""Targets of -100: a pipeline's loss is torch's over the whole batch where its loss is known, else it warns."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.errors import PenstockWarning
from tests.support.local_pipelines import on_ranks

ROWS, LENGTH, CLASSES = 8, 6, 5


class PerPosition(nn.Module):
    """Brings classes where cross entropy expects them: [rows, length, classes] to [rows, classes, length]."""

    def forward(self, scores):
        return scores.movedim(-1, 1)


def layers_of():
    torch.manual_seed(0)
    return [nn.Linear(4, 4).double(), nn.Tanh(), nn.Linear(4, CLASSES).double(), PerPosition()]


def batch_of(*shape, ignored=-100):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*shape, 4, dtype=torch.float64, generator=generator)
    target = torch.randint(CLASSES, shape, generator=generator)
    target.view(-1)[1::3] = ignored
    target[:2] = ignored  # nothing counts in the first microbatch
    return inputs, target


def step(loss, inputs, target, num_ranks=1, **options):
    layers = layers_of()

    def run(transport):
        where = {"ranks": 1} if num_ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(layers, "1f1b", 4, loss, **where, **options)
        loss_of_batch = pipeline.step(inputs, target=target).loss
        return loss_of_batch, {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    return on_ranks(num_ranks, run)


def plain(output, target):
    return F.cross_entropy(output, target)


WEIGHTS = torch.tensor([0.2, 3.0, 0.0, 1.0, 0.5], dtype=torch.float64)
"""Of the classes."""


@pytest.mark.parametrize(("shape", "num_ranks"), [((ROWS,), 1), ((ROWS, LENGTH), 2)], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        partial(F.cross_entropy, ignore_index=2),
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        partial(F.cross_entropy, ignore_index=2, weight=WEIGHTS),
        F.nll_loss,
        nn.NLLLoss(weight=WEIGHTS),
    ],
)
def test_the_loss_of_torch_is_that_of_the_whole_batch(loss, shape, num_ranks):
    inputs, target = batch_of(*shape, ignored=2 if isinstance(loss, partial) else -100)
    layers = layers_of()
    wanted = loss(nn.Sequential(*layers)(inputs), target)
    wanted.backward()
    gradients = {
        f"{index}.{name}": parameter.grad
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }

    for found, own in step(loss, inputs, target, num_ranks):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=0)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-14)


def test_slices_of_a_sequence_weigh_by_the_targets_that_count_in_them():
    inputs, target = batch_of(ROWS, LENGTH)
    target[3, :3] = -100
    wanted = F.cross_entropy(nn.Sequential(*layers_of())(inputs), target).detach()
    pipeline = ps.Pipeline(layers_of(), "seq1f1b", 4, F.cross_entropy, ranks=1, slices=2)

    torch.testing.assert_close(pipeline.step(inputs, target=target).loss, wanted, rtol=1e-12, atol=0)


def test_microbatches_that_are_padded_on_their_own_weigh_as_in_one_batch_that_is_padded_to_the_longest():
    inputs, target = batch_of(ROWS, LENGTH)
    lengths = [6, 2, 4, 3]
    for index, length in enumerate(lengths):
        target[2 * index : 2 * index + 2, length:] = -100
    target[0, 0] = 1
    parts = [
        ps.PreSplit([rows[:, :length] for rows, length in zip(each.split(2), lengths, strict=True)])
        for each in (inputs, target)
    ]
    layers = layers_of()
    wanted = F.cross_entropy(nn.Sequential(*layers)(inputs), target)
    wanted.backward()
    pipeline = ps.Pipeline(layers_of(), "1f1b", 4, F.cross_entropy, ranks=1)

    torch.testing.assert_close(pipeline.step(parts[0], target=parts[1]).loss, wanted.detach(), rtol=1e-12, atol=0)
    for parameter, other in zip(pipeline.parameters(), nn.Sequential(*layers).parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_targets_of_eight_bits_weigh_as_those_of_64():
    inputs, target = batch_of(ROWS, ignored=255)
    wanted = F.cross_entropy(nn.Sequential(*layers_of()[:3])(inputs), target, ignore_index=255)
    loss = partial(F.cross_entropy, ignore_index=255)
    pipeline = ps.Pipeline(layers_of()[:3], "1f1b", 4, loss, ranks=1)

    found = pipeline.step(inputs, target=target.to(torch.uint8)).loss

    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"allow_ragged": True}], ids=str)
def test_without_ignored_targets_all_bits_are_those_of_rows(options):
    inputs, target = batch_of(ROWS - len(options), LENGTH)
    target = target.clamp(min=0)
    [(loss, gradients)], [(other_loss, other_gradients)] = (
        step(known, inputs, target, **options) for known in (F.cross_entropy, plain)
    )

    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def warned(loss, target, num_steps=1, schedule="1f1b", *, is_streamed=False, **options):
    """What a pipeline warns of that takes a batch in each step, whole or one microbatch after another."""
    inputs, _ = batch_of(*target.shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = ps.Pipeline(layers_of(), schedule, 4, loss, ranks=1, **options)
        stream = ps.Stream(num_steps * list(zip(inputs.split(2), target.split(2), strict=True)))
        args, keywords = ((stream,), {}) if is_streamed else ((inputs,), {"target": target})
        for _ in range(num_steps):
            pipeline.step(*args, **keywords)
    return [str(each.message) for each in caught if issubclass(each.category, PenstockWarning)]


streamed = partial(warned, is_streamed=True)


def test_another_loss_is_warned_of_once_with_what_differs_and_the_fix():
    target = batch_of(ROWS, LENGTH)[1].clamp(min=0)
    target[2:4, 1:3] = -100

    [text] = warned(plain, target, num_steps=2)

    assert text.startswith("microbatch 0 has 0 targets of -100 and microbatch 1 has 4 targets of -100")
    assert "count=..." in text


def test_there_is_no_warning_where_nothing_is_wrong():
    target = batch_of(ROWS, LENGTH)[1]
    even = target.clamp(min=0)
    even[:, 0] = -100

    assert warned(plain, even) == []
    assert warned(F.cross_entropy, target) == []
    assert warned(plain, target, count=lambda target: (target != -100).sum()) == []
    assert warned(partial(F.cross_entropy, reduction="sum"), target, reduction="sum") == []


@pytest.mark.parametrize("loss", [F.cross_entropy, plain])
def test_a_stream_of_microbatches_with_uneven_targets_is_warned_of_once(loss):
    target = batch_of(ROWS, LENGTH)[1].clamp(min=0)
    target[4:6, 1:3] = -100

    [text] = streamed(loss, target, num_steps=2)

    assert text.startswith("in microbatch 2, slice 0 of a stream another share of the targets is -100 than in micro")
    assert "PreSplit" in text


def test_a_stream_with_uneven_slices_is_warned_of_and_other_streams_are_not():
    target = batch_of(ROWS, LENGTH)[1].clamp(min=0)
    even = target.index_fill(1, torch.tensor([0]), -100)

    assert streamed(F.cross_entropy, target) == []
    assert streamed(F.cross_entropy, even) == []
    assert streamed(partial(F.cross_entropy, ignore_index=9), batch_of(ROWS, LENGTH)[1].clamp(min=0)) == []
    assert streamed(partial(F.cross_entropy, reduction="sum"), batch_of(ROWS, LENGTH)[1], reduction="sum") == []
    assert len(streamed(F.cross_entropy, even, schedule="seq1f1b", slices=2)) == 1


def test_a_stream_whose_targets_are_of_classes_that_weigh_otherwise_is_warned_of():
    weighted = nn.CrossEntropyLoss(weight=WEIGHTS)
    target = torch.ones(ROWS, LENGTH, dtype=torch.int64)

    assert streamed(weighted, target) == []
    target[2:4, 0] = 0
    [text] = streamed(weighted, target)
    assert "in microbatch 1, slice 0 of a stream the targets are of classes that weigh otherwise than in micro" in text
    assert "Since the loss divides by these weights" in text
