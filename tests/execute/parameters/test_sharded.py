"""The layout of shards: gathered, reduced into the gradients of shards, and dropped, also by a failed step."""

import pytest
import torch
from torch import nn

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.layout import StageParts
from penstock.execute.parameters.sharded import Sharded, ShardGradients
from penstock.execute.replicas.exchanges import ReplicaExchanges
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.execute.values.tensors import is_dtensor, local_part
from tests.support.local_pipelines import on_ranks, settle

STEP = {"is_synced": True, "sums_tied": True, "is_training": True}


class Replica:
    """One replica of a unit."""

    def __init__(self, transport, modules=None):
        self.modules = modules or [settle(nn.Linear(3, 4), 1)]
        self.weight_before = next(self.modules[0].parameters()).detach().clone()
        self.store = GradientStore(lambda: self.layout.unsharded_parameters())
        self.exchanges = ReplicaExchanges(transport)
        mesh = mesh_without_groups("data", transport.num_ranks, transport.rank)
        parts = {0: StageParts(lambda: [], self.modules)}
        self.layout = Sharded(parts, self.store, ShardGradients().add, self.exchanges, mesh)
        self.layout.shard()
        self.shards = [each for module in self.modules for each in module.parameters()]

    def begin(self):
        self.layout.begin_step(**STEP)
        self.store.begin_step()

    def begin_whole(self):
        """Begin a step, and gather the parameters."""
        self.begin()
        self.layout.unshard().wait()

    def backward(self, factor=1.0):
        (self.modules[0](torch.ones(2, 3)).sum() * factor).backward()

    def grads(self):
        return [None if each.grad is None else local_part(each.grad).clone() for each in self.shards]


@pytest.mark.feature("H4")
@pytest.mark.parametrize("waits_for_gather", [False, True])
def test_a_gather_gives_whole_parameters_and_a_reduction_the_rows_of_the_sum(waits_for_gather):
    def case(transport):
        replica = Replica(transport)
        replica.begin_whole()
        weight = replica.modules[0].weight
        assert torch.equal(weight, replica.weight_before)
        replica.backward(transport.rank + 1.0)
        ticket = replica.layout.reduce(0, is_last=True)
        assert weight.grad is None
        replica.layout.reshard()
        assert replica.grads() == [None, None]
        if waits_for_gather:  # which completes the reductions before it
            replica.layout.unshard().wait()
        else:
            ticket.wait()
        return replica.grads()

    for weight, bias in on_ranks(2, case):
        assert weight.tolist() == [[6.0] * 3] * 2
        assert bias.tolist() == [6.0] * 2


@pytest.mark.feature("E5")
def test_reductions_of_a_step_add_up_and_the_last_one_adds_to_what_was_there():
    def case(transport):
        replica = Replica(transport)
        for _ in range(2):
            replica.begin()
            for is_last in (False, True):
                replica.layout.unshard().wait()
                replica.backward()
                ticket = replica.layout.reduce(0, is_last=is_last)
                replica.layout.reshard()
                if not is_last:
                    ticket.wait()
                    before = replica.grads()
            ticket.wait()
            replica.layout.end_step()
            replica.store.end_step()
        return [each.unique().tolist() for each in (*before, *replica.grads())]

    assert on_ranks(2, case) == [[[8.0], [8.0], [16.0], [16.0]]] * 2  # of the first step alone, and of both


def test_a_first_gradient_behind_a_reduction_gets_memory_of_its_own_too():
    """As that of `y = x + p.view(...)`, which is a view of what a backward returns."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(6))

        def forward(self, inputs):
            return inputs + self.shift.view(2, 3)

    def case(transport):
        replica = Replica(transport, [Shift()])
        replica.begin_whole()
        for _ in range(2):
            gradient = torch.ones(2, 3)
            replica.store.begin_backward()
            torch.autograd.backward([replica.modules[0](torch.ones(2, 3))], [gradient])
            replica.store.end_backward((), [gradient])
            shares = replica.modules[0].shift.grad.data_ptr() == gradient.data_ptr()
            replica.layout.reduce(0, is_last=False).wait()
        return shares

    assert on_ranks(2, case) == [False, False]


def test_a_failed_step_leaves_nothing_whole_and_no_part_of_a_sum():
    def case(transport):
        replica = Replica(transport)
        replica.begin_whole()
        replica.backward()
        replica.layout.reduce(0, is_last=False).wait()
        replica.backward()

        replica.layout.end_failed_step()
        replica.store.end_step()

        assert all(map(is_dtensor, replica.modules[0].parameters()))
        assert {each.untyped_storage().nbytes() for each in replica.layout.unsharded_parameters()} == {0}
        assert all(each.grad is None for each in replica.layout.unsharded_parameters())
        replica.begin_whole()
        replica.backward()
        replica.layout.reduce(0, is_last=True).wait()
        return [each.unique().tolist() for each in replica.grads()]

    assert on_ranks(2, case) == [[[4.0], [4.0]]] * 2
