"""Outputs that travel to the ranks that are named arrive on their devices, after whatever was queued before."""

import pytest
import torch
from torch import nn

from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.emulated.pipelines import WIDTH, transport_of

pytestmark = pytest.mark.emulated
NUM_RANKS = 3
MICROBATCHES = 6


def outputs_on_ranks(rank, num_ranks, kind, family, messages):
    """Two evaluations and two steps with outputs on all ranks; their squares, so that something is queued behind."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    generator = torch.Generator().manual_seed(1)
    inputs, target = (torch.randn(2 * MICROBATCHES, WIDTH, generator=generator).to(device) for _ in range(2))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * num_ranks)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
    transport = transport_of(rank, num_ranks, device, coalesces=messages == "coalesced")
    schedule = build(family, ranks=num_ranks, microbatches=MICROBATCHES)
    options = {"transport": transport, "device": device, "messages": messages, "frees_other_stages": False}
    with Pipeline(layers, schedule, loss=nn.functional.mse_loss, **options) as pipeline:
        results = [pipeline.evaluate(inputs, return_outputs=range(num_ranks)) for _ in range(2)]
        results += [pipeline.step(inputs, target=target, return_outputs=range(num_ranks)) for _ in range(2)]
        return [result.outputs.square().tolist() for result in results]


@pytest.mark.feature("X25")
@pytest.mark.parametrize("policy", ["lazy", "random"])
@pytest.mark.parametrize("messages", ["posted", "coalesced", "rendezvous"])
@pytest.mark.parametrize("family", ["1f1b", "dualpipe-v"])
def test_outputs_on_all_ranks_are_the_cpus_to_the_bit(emulated, family, messages, policy):
    expected = emulated.run(outputs_on_ranks, "cpu", family, messages, num_ranks=NUM_RANKS)

    found = emulated.run(outputs_on_ranks, "emu", family, messages, num_ranks=NUM_RANKS, policy=policy, seed=3)

    assert found == expected
    assert all(outputs == expected[0] for outputs in expected)
