"""The last layer of a model is left to a loss that applies it; one that may need all positions is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.errors import ConfigError
from tests.support.local_pipelines import (
    IGNORED,
    assert_errors,
    count_tokens,
    error_of,
    gradients_of,
    on_ranks,
    token_loss,
    token_task,
)
from tests.support.mesh_pipelines import on_mesh
from tests.support.replicas import mesh, pipeline_of

CHUNKED = partial(ps.losses.chunked_cross_entropy, chunk=4)


def trained(options, task, loss, schedule="1f1b"):
    """Return loss, gradients, outputs and an evaluation of a pipeline of a task of tokens."""
    with ps.Pipeline(task.make_layers(), schedule, 4, loss, allow_ragged=True, **options) as pipeline:
        result = pipeline.step(*task.inputs, target=task.target, return_outputs=True)
        evaluated = pipeline.evaluate(*task.inputs, target=task.target)
        outputs = pipeline.evaluate(*task.inputs, return_outputs=True).outputs
        return result, gradients_of(pipeline.named_parameters()), evaluated.loss, outputs


@pytest.mark.feature("X56")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "zb-h1", "interleaved-1f1b"])
def test_a_chunked_loss_trains_as_the_whole_one_and_outputs_are_what_the_last_layer_makes(schedule):
    task = token_task(8, torch.float64)

    def case(transport, loss, **further):
        return trained({"transport": transport, **further}, task, loss, schedule)

    found = on_ranks(2, case, CHUNKED)
    expected = on_ranks(2, lambda transport: case(transport, token_loss, count=count_tokens))

    for (result, gradients, evaluated, outputs), (wanted, wanted_gradients, *further) in zip(
        found, expected, strict=True
    ):
        torch.testing.assert_close(result.loss, wanted.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(evaluated, further[0], rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-12, atol=1e-14)
        for own, theirs in ((result.outputs, wanted.outputs), (outputs, further[1])):
            assert (own is None) == (theirs is None)
            assert own is None or torch.allclose(own, theirs, rtol=1e-12)


@pytest.mark.parametrize("options", [{"recompute": True}, {"shard": "full"}, {"compile": "aot_eager"}], ids=str)
def test_it_also_trains_so_with_recomputation_with_shards_and_compiled(options):
    task = token_task(8, torch.float64)
    result, wanted = task.reference(4)

    def case(places):
        with ps.Pipeline(task.make_layers(), "1f1b", 4, CHUNKED, mesh=places, allow_ragged=True, **options) as pipeline:
            losses = [pipeline.step(*task.inputs, target=task.target).loss for _ in range(2)]
            return losses, {
                name: getattr(g, "full_shape", g) for name, g in gradients_of(pipeline.named_parameters()).items()
            }

    replicas = 2 if "shard" in options else 1
    for losses, gradients in on_mesh(2, replicas, case):
        for loss in losses:
            torch.testing.assert_close(loss, result.loss, rtol=1e-12, atol=0)
        for name, gradient in gradients.items() if replicas == 1 else ():
            torch.testing.assert_close(gradient, 2 * wanted[name], rtol=1e-12, atol=1e-14)


def test_a_batch_without_labels_gives_gradients_of_zeros():
    task = token_task(8)
    task.target = torch.full_like(task.target, IGNORED)
    result, gradients, *_ = trained({"ranks": 1}, task, CHUNKED)

    assert result.loss == 0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


class Mixing(nn.Module):
    def forward(self, hidden):
        return hidden.cumsum(1)


def test_a_last_layer_that_does_not_say_so_is_refused_on_all_ranks():
    def case(transport):
        return error_of(ps.Pipeline, [nn.Linear(2, 2), Mixing()], "1f1b", 4, CHUNKED, transport=transport)

    errors = on_ranks(2, case)

    assert_errors(errors, ConfigError, "layer 1 (Mixing) does not say that it treats each position alone")
    assert_errors(errors, ConfigError, "have a method tail(hidden)")


class Said(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 11)

    def forward(self, hidden):
        return self.tail(hidden)

    def tail(self, hidden):
        return self.inner(F.layer_norm(hidden, (6,)))


def test_a_layer_of_ones_own_may_have_a_tail():
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 6), Said()]
    tokens = torch.randint(11, (4, 5))
    with ps.Pipeline(layers, "1f1b", 2, CHUNKED, ranks=1) as pipeline:
        found = pipeline.step(tokens, target=tokens).loss

    torch.testing.assert_close(found, F.cross_entropy(nn.Sequential(*layers)(tokens).flatten(0, 1), tokens.flatten()))


def refused_under_wrappers(rank):
    own_mesh = mesh()
    texts = []
    for wrap in (
        lambda layer: fully_shard(layer, mesh=own_mesh["replica"]),
        lambda layer: (fully_shard(layer.inner, mesh=own_mesh["replica"]), layer)[1],
        lambda layer: DistributedDataParallel(layer, process_group=own_mesh["replica"].get_group()),
    ):
        layers = [nn.Embedding(11, 6), wrap(Said())]
        texts.append(str(error_of(pipeline_of, layers, "1f1b", own_mesh, loss=CHUNKED)))
    return texts


@pytest.mark.slow
def test_a_last_layer_in_a_wrapper_that_works_with_other_ranks_is_refused(four_ranks):
    for texts in four_ranks.run(refused_under_wrappers):
        for text, wrapper in zip(texts, ("fully_shard", "fully_shard", "DistributedDataParallel"), strict=True):
            assert f"is in {wrapper}, which works with other ranks once per forward" in text
            assert "shard='full'" in text
