"""Ranks and transports that do not agree on how messages travel: refused by name, and not by a deadline."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from tests.emulated.pipelines import WIDTH, transport_of
from tests.support.local_pipelines import error_of

pytestmark = pytest.mark.emulated


def connect_in_two_ways(rank, num_ranks):
    error = error_of(transport_of, rank, num_ranks, torch.device("emu", rank), deadline_s=2, coalesces=rank == 1)
    return type(error), str(error)


def test_ranks_of_which_some_coalesce_are_told_so(emulated):
    text = "messages: rank 1 launches messages in groups, rank 0 does not; give 'coalesced' on all ranks or on none"

    assert emulated.run(connect_in_two_ways, num_ranks=2) == [(ConfigError, text)] * 2


def pipeline_of_another_way(rank, num_ranks, messages):
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device, coalesces=True)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)]
    options = {"transport": transport, "device": device, "messages": messages, "frees_other_stages": False}
    error = error_of(Pipeline, layers, "1f1b", 4, nn.functional.mse_loss, **options)
    transport.close()
    return type(error), error.key, str(error)


@pytest.mark.parametrize("messages", ["posted", "rendezvous"])
def test_a_transport_that_launches_groups_carries_no_other_messages(emulated, messages):
    for kind, key, text in emulated.run(pipeline_of_another_way, messages, num_ranks=2):
        assert (kind, key) == (ConfigError, "messages")
        assert f"{messages!r}, but the transport launches messages in groups" in text
