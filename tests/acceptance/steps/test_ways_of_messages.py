"""Messages that are posted, coalesced, or wait for their receive: the same bits in every step, also in the first."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, block, error_of, on_ranks, settle
from tests.support.ranks import run_ranks

FAMILIES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved-1f1b": {"stages_per_rank": 2},
    "looped-bfs": {"stages_per_rank": 2},
    "zbv": {},
    "dualpipe-v": {},
}
NUM_STEPS = 3
WAYS = ["posted", "coalesced", "rendezvous"]


def trained(transport, family, messages, **options):
    """Take some steps; return the losses, and the gradients of this rank by name."""
    ends = [settle(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), seed) for seed in (8, 9)]
    layers = [ends[0], *(block(index, torch.float64) for index in range(6)), ends[1]]
    options |= {"transport": transport, "messages": messages, **FAMILIES[family]}
    pipeline = Pipeline(layers, family, 8, nn.functional.mse_loss, **options)
    losses = []
    for number in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(number)
        inputs, target = torch.randn(2, 16, WIDTH, generator=generator, dtype=torch.float64)
        losses.append(pipeline.step(inputs, target=target).loss.item())
    losses.append(pipeline.evaluate(inputs, target=target).loss.item())
    gradients = {name: parameter.grad.tolist() for name, parameter in pipeline.named_parameters()}
    pipeline.close()
    return losses, gradients


@pytest.mark.feature("C1", "C15")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_messages_gives_the_same_bits(family):
    posted, coalesced, rendezvous = (on_ranks(4, trained, family, messages) for messages in WAYS)

    assert coalesced == posted
    assert rendezvous == posted


def trained_in_process(rank, family, messages):
    return trained(None, family, messages)


@pytest.mark.slow
@pytest.mark.parametrize("messages", WAYS[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_processes_give_the_bits_of_threads(family, messages):
    assert run_ranks(2, trained_in_process, family, messages) == on_ranks(2, trained, family, "posted")


@pytest.mark.parametrize("family", ["1f1b", "zbv"])
def test_tied_layers_and_an_optimizer_step_change_nothing_of_it(family):
    options = {"tied": [("0.weight", "7.weight")], "optimizer_step": lambda: None}

    posted, coalesced, rendezvous = (
        on_ranks(4, lambda wires, way=way: trained(wires, family, way, **options)) for way in WAYS
    )

    assert coalesced == posted
    assert rendezvous == posted


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"messages": "batched"}, "messages: 'batched' of type str; expected one of posted, coalesced, rendezvous"),
        ({"messages": "rendezvous", "variable_shapes": True}, "a message of unknown shape has no receive"),
        ({"messages": "coalesced", "debug": "messages"}, "sends a header with each message"),
    ],
)
def test_what_does_not_go_together_is_refused(options, told):
    error = error_of(Pipeline, [nn.Linear(2, 2)], "1f1b", 2, nn.functional.mse_loss, **options)

    assert type(error) is ConfigError
    assert error.key == "messages"
    assert told in str(error)
