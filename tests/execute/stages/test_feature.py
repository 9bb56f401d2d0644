"""Modules are told apart by the methods of their classes, and nothing of a module itself is read."""

import pytest
from torch import nn

from penstock.execute.stages.auxiliary import Auxiliary
from penstock.execute.stages.carried import Carrying
from penstock.execute.stages.feature import has_methods
from penstock.models import AuxiliaryLoss, Carry, Skip
from penstock.pipeline import Pipeline
from penstock.skipping import Skipping
from tests.support.local_pipelines import WIDTH, on_ranks, square_loss

PROTOCOLS = {Auxiliary: AuxiliaryLoss("size", weight=0.1), Skipping: Skip("features"), Carrying: Carry()}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_module_has_the_methods_of_its_own_protocol_alone(protocol):
    assert [kind for kind, module in PROTOCOLS.items() if has_methods(module, protocol)] == [protocol]
    assert not has_methods(nn.Linear(2, 2), protocol)


def test_making_a_pipeline_reads_no_weight_that_is_computed():
    """Whether `isinstance` comes to `weight` depends on the order of a set of names, so other names are there too."""
    reads = []

    class Watched(nn.Module):
        def __getattr__(self, name):
            reads.append(name)
            return super().__getattr__(name)

        weight = property(lambda self: reads.append("weight"))
        name = property(lambda self: reads.append("name"))

        def forward(self, hidden):
            return hidden

    def case(wires):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Watched()) for _ in range(2)]
        Pipeline(layers, "gpipe", 2, square_loss, transport=wires)

    on_ranks(2, case)

    assert {"weight", "name"}.isdisjoint(reads)
