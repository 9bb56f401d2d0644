"""Autograd functions written for torch's `dw_builder` run as they are, as those for DualPipe's `WeightGradStore` do.

The latter are tested with the other layers that compute their weight gradients later.
"""

import torch
from torch import nn

from penstock.moving.torch_pipelining import PipelineStage, Schedule
from tests.support.local_pipelines import on_ranks, settle, square_loss, values
from tests.support.own_weight_gradients import Building, Plain

NUM_ROWS = 8


def stage_of(kind, index):
    return settle(kind(torch.float64), index)


def expected():
    model = nn.Sequential(*(stage_of(Plain, index) for index in range(4)))
    losses = [
        square_loss(model(part), target) / 4 for part, target in zip(inputs().chunk(4), targets().chunk(4), strict=True)
    ]
    torch.stack(losses).sum().backward()
    return [layer.weight.grad for layer in model]


def inputs():
    return values(1, NUM_ROWS, 6, dtype=torch.float64)


def targets():
    return values(2, NUM_ROWS, 6, dtype=torch.float64)


def gradients(transport, make_stage):
    """Run one step of ZBV as on two ranks; return each stage's gradient."""
    stages = [make_stage(index) for index in (transport.rank, 3 - transport.rank)]
    schedule = Schedule("ZBVZeroBubble", stages, 4, square_loss, transport=transport)
    is_end = transport.rank == 0
    schedule.step(*((inputs(),) if is_end else ()), target=targets() if is_end else None)
    schedule.close()
    return {stage.stage_index: stage.submod.weight.grad for stage in stages}


def test_a_dw_builder_is_called_after_each_backward():
    builds = []

    def make_stage(index):
        module = stage_of(Building, index)
        build = module.dw_builder
        return PipelineStage(module, index, 4, dw_builder=lambda: builds.append(index) or build())

    first, second = on_ranks(2, gradients, make_stage)

    found = first | second
    for index, gradient in enumerate(expected()):
        assert torch.allclose(found[index], gradient, rtol=0, atol=1e-12)
    assert sorted(builds) == sorted(list(range(4)) * 4)
