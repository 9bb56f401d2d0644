"""Which sends have surely arrived when a message comes back."""

import pytest
import torch

from penstock.execute.arrivals import arrived_before
from penstock.ir.deps import predecessors
from penstock.lower import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.local_pipelines import on_ranks


def arrivals(program, rank):
    """Per receive of a rank, by its text: how many sends to the peer have arrived."""
    found = arrived_before(program, predecessors(program), rank)
    return {str(program.instruction(row)): count for row, (_, count) in found.items()}


def test_a_gradient_proves_that_its_own_activation_has_arrived():
    program = lower(build("1f1b", ranks=2, microbatches=4))

    assert arrivals(program, 0) == {"0RECV_B0": 1, "0RECV_B1": 2, "0RECV_B2": 3, "0RECV_B3": 4}


def test_an_activation_proves_that_the_gradients_used_before_it_have_arrived():
    program = lower(build("1f1b", ranks=2, microbatches=4))

    assert arrivals(program, 1) == {"1RECV_F0": 0, "1RECV_F1": 0, "1RECV_F2": 1, "1RECV_F3": 2}


def test_under_gpipe_activations_prove_nothing():
    program = lower(build("gpipe", ranks=2, microbatches=3))

    assert arrivals(program, 0) == {"0RECV_B0": 3, "0RECV_B1": 3, "0RECV_B2": 3}
    assert set(arrivals(program, 1).values()) == {0}


class MostOpen:
    """Passes everything on to a transport and keeps the most sends that were open at once."""

    def __init__(self, transport):
        self._transport = transport
        self.open, self.most = set(), 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_send(self, peer, tensor):
        ticket = self._transport.post_send(peer, tensor)
        self.open.add(ticket)
        self.most = max(self.most, len(self.open))
        return ticket

    def wait(self, ticket):
        self._transport.wait(ticket)
        self.open.discard(ticket)


def most_open_sends(wires, num_microbatches):
    transport = MostOpen(wires)
    layers = [torch.nn.Linear(3, 3) for _ in range(2)]
    pipeline = Pipeline(layers, "1f1b", num_microbatches, torch.nn.functional.mse_loss, transport=transport)
    batch = torch.ones(num_microbatches, 3)
    pipeline.step(batch, target=batch)
    transport.most = 0
    pipeline.step(batch, target=batch)
    pipeline.close()
    return transport.most


@pytest.mark.parametrize("num_microbatches", [4, 16])
def test_the_sent_tensors_that_a_step_holds_do_not_grow_with_its_microbatches(num_microbatches):
    assert max(on_ranks(2, most_open_sends, num_microbatches)) <= 3
