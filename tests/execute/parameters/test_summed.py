"""The layout of replicas: one reduction per stage, which takes each parameter once, when its gradient is whole."""

import torch
from torch import nn

from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.layout import StageParts
from penstock.execute.parameters.summed import Summed
from penstock.execute.replicas.exchanges import ReplicaExchanges
from tests.support.local_pipelines import on_ranks, settle


def linear():
    return settle(nn.Linear(3, 2), 1)


def begun(transport, modules_of_stage):
    """A unit of stages with these modules in a training step, and a list of what its exchanges launch."""
    exchanges, launched = ReplicaExchanges(transport), []
    launch = exchanges.sum

    def noting(buffers, then):
        launched.append(buffers)
        return launch(buffers, then)

    exchanges.sum = noting
    parts = {
        stage: StageParts(lambda own=own: [each for module in own for each in module.parameters()], own)
        for stage, own in modules_of_stage.items()
    }
    every = [each for part in parts.values() for each in part.parameters()]
    store = GradientStore(lambda: dict.fromkeys(every))
    layout = Summed(parts, store, set(), exchanges)
    layout.begin_step(is_synced=True, sums_tied=True, is_training=True)
    return layout, launched


def test_what_two_stages_share_is_reduced_with_the_second_and_a_copy_of_a_stage_counts_once():
    def case(transport):
        shared, first, second, frozen = *(linear() for _ in range(3)), linear().requires_grad_(False)
        stages = {0: [shared, first], 3: [shared, second], 5: [shared, second], 7: [frozen]}
        layout, launched = begun(transport, stages)
        for module in (shared, first, second):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
        assert layout.reduce(7, is_last=True) is None  # without gradients to train there is no reduction
        layout.reduce(0, is_last=True).wait()
        shared.weight.grad += 1  # of the backward of the second stage
        layout.reduce(5, is_last=True).wait()  # stages 3 and 5 are the same modules: the later one reduces
        return len(launched), [module.weight.grad.unique().tolist() for module in (shared, first, second)]

    for num_launched, gradients in on_ranks(2, case):
        assert num_launched == 2
        assert gradients == [[4.0], [2.0], [2.0]]


def test_a_sum_belongs_to_the_first_replica_until_the_next_one_and_an_evaluation_leaves_it():
    def case(transport):
        own = linear()
        layout, _ = begun(transport, {0: [own]})
        found = []
        for is_synced, is_training in ((True, True), (True, False), (False, True), (False, True), (True, True)):
            layout.begin_step(is_synced=is_synced, sums_tied=True, is_training=is_training)
            if is_training:
                for each in own.parameters():
                    each.grad = torch.ones_like(each) if each.grad is None else each.grad.add_(1)
                ticket = layout.reduce(0, is_last=True)
                if ticket is not None:
                    ticket.wait()
            found.append(own.weight.grad.unique().item())
        return found

    assert on_ranks(3, case) == [[3, 3, 4, 5, 12], [3, 3, 1, 2, 12], [3, 3, 1, 2, 12]]
