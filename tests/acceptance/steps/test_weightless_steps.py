"""A step whose losses weigh nothing, as a batch whose labels are all ignored, moves all of a model or none of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.local_pipelines import (
    IGNORED,
    LENGTH,
    VOCABULARY,
    Task,
    block,
    count_tokens,
    gradients_of,
    named,
    on_pipelines,
    token_layers,
)
from tests.support.mesh_pipelines import Job, on_mesh, pipeline_of

FLOAT64 = torch.float64
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "zbv", "dualpipe", "interleaved-1f1b"]


def mean_of_labels(output, target):
    """The mean of torch, which is not a number where no label counts."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def layers():
    return token_layers(FLOAT64, 8)


def batch(rows=8, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)


def mean_or_zero(output, target):
    """The mean over labels, and a loss of 0 where no label counts."""
    total = F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / max(count_tokens(target), 1)


def train_alone(targets, tokens):
    """Step AdamW in one process; return the weights."""
    model = nn.Sequential(*layers())
    optimizer = adamw(model.parameters())
    for target in targets:
        optimizer.zero_grad()
        mean_or_zero(model(tokens), target).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def targets_of(target):
    """A usual batch, one without a label, and a usual one again."""
    return [target, torch.full_like(target, IGNORED), target]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in SCHEDULES), ("1f1b", {"recompute": True})], ids=str
)
def test_adamw_moves_every_weight_as_in_one_process(name, options):
    tokens, target = batch()
    expected = train_alone(targets_of(target), tokens)

    def case(pipeline):
        optimizer = adamw(pipeline.parameters())
        for labels in targets_of(target):
            optimizer.zero_grad()
            pipeline.step(tokens, target=labels)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}

    task = Task(layers, (tokens,), target, mean_of_labels, {"count": count_tokens})
    found = on_pipelines(2, task, case, name, **options)

    assert {name for weights in found for name in weights} == expected.keys()
    for weights in found:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)


class LearnedTemperature(nn.Module):
    """A loss function with a parameter."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=FLOAT64))

    def forward(self, output, target):
        return mean_of_labels(output * self.temperature, target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_parameter_of_the_loss_function_gets_zeros_too(name):
    tokens, target = batch()
    loss = LearnedTemperature()
    task = Task(layers, (tokens,), target, loss, {"count": count_tokens})

    on_pipelines(2, task, lambda pipeline: pipeline.step(tokens, target=torch.full_like(target, IGNORED)), name)

    assert loss.temperature.grad.item() == 0.0


class MaskedAttention(nn.Module):
    """Attention among tokens that are no padding; that of padding alone is not a number."""

    def __init__(self):
        super().__init__()
        self.inner = block(7, FLOAT64)

    def forward(self, x, *, mask):
        scores = (x @ x.transpose(-1, -2)).masked_fill(~mask[:, None], -torch.inf)
        return self.inner(scores.softmax(-1) @ x)


def attending_layers():
    return [*layers()[:-1], MaskedAttention(), layers()[-1]]


@pytest.mark.parametrize(("name", "num_replicas"), [("1f1b", 2), ("zb-h1", 1), ("dualpipe", 1)])
def test_outputs_of_padding_alone_that_are_not_numbers_reach_no_gradient(name, num_replicas):
    """All rows of the last microbatches, or of the last replica, are padding."""
    rows = 8 * num_replicas
    tokens, target = batch(rows)
    num_real = 6 if num_replicas == 1 else 8
    mask = torch.arange(rows)[:, None].expand(rows, LENGTH) < num_real
    target[num_real:] = IGNORED
    options = {"count": count_tokens}
    job = Job([8] * num_replicas, attending_layers, lambda _: tokens, lambda _: target, mean_of_labels, options)

    def case(places):
        with pipeline_of(places, job, name) as pipeline:
            inputs, labels = job.of(pipeline.replica)
            pipeline.step(inputs, target=labels, mask=mask.chunk(num_replicas)[pipeline.replica])
            return gradients_of(pipeline.named_parameters())

    model = attending_layers()
    x = tokens[:num_real]
    for layer in model:
        x = layer(x, mask=mask[:num_real]) if isinstance(layer, MaskedAttention) else layer(x)
    mean_of_labels(x, target[:num_real]).backward()
    expected = gradients_of(named(model))

    for gradients in on_mesh(2, num_replicas, case):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shard", "empty"), [("none", (0,)), ("none", (0, 1)), ("optimizer", (0,)), ("full", (0, 1))])
def test_replicas_without_a_label_train_as_one_process(shard, empty):
    """`empty`: the replicas whose batch has no label."""
    generator = torch.Generator().manual_seed(5)
    tokens, target = torch.randint(VOCABULARY, (2, 16, LENGTH), generator=generator)
    for replica in empty:
        target[8 * replica : 8 * replica + 8] = IGNORED
    job = Job([8, 8], layers, lambda rows: tokens, lambda rows: target, mean_of_labels, {"count": count_tokens})

    def case(places):
        with pipeline_of(places, job, "1f1b", shard=shard) as pipeline:
            inputs, labels = job.of(pipeline.replica)
            pipeline.step(inputs, target=labels)
            return pipeline.state_dict(), {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    model = nn.Sequential(*layers())
    mean_or_zero(model(tokens), target).backward()
    expected = gradients_of(model.named_parameters())
    ranks = on_mesh(2, 2, case)

    assert [name for _, gradients in ranks for name, gradient in gradients.items() if gradient is None] == []
    if shard == "none":
        for _, gradients in ranks:
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
