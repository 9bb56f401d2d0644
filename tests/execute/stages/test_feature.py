"""Modules are told apart by the methods of their classes, and nothing of a module itself is read."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from penstock.execute.parameters.layout import StageParts
from penstock.execute.parameters.sharded import Sharded
from penstock.execute.replicas.exchanges import ReplicaExchanges
from penstock.execute.stages.auxiliary import Auxiliary
from penstock.execute.stages.carried import Carrying
from penstock.execute.stages.feature import OutlivingPart, has_methods
from penstock.execute.transport import LocalTransport
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.models import AuxiliaryLoss, Carry, Skip
from penstock.pipeline import Pipeline
from penstock.skipping import Skipping
from tests.local_pipelines import WIDTH, on_ranks, square_loss

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


def test_a_layer_with_spectral_norm_begins_as_without_a_pipeline():
    torch.manual_seed(0)
    layer = spectral_norm(nn.Linear(WIDTH, WIDTH))
    before = layer.parametrizations.weight[0]._u.clone()

    Pipeline([layer], "gpipe", 2, square_loss)

    assert torch.equal(layer.parametrizations.weight[0]._u, before)


def test_views_of_gathered_weights_are_copied_with_their_graph():
    (transport,) = LocalTransport.create(1)
    layer = nn.Linear(3, 3)
    unit = Sharded(
        {0: StageParts(lambda: [], [layer])}, None, None, ReplicaExchanges(transport), mesh_without_groups("data", 1, 0)
    )
    unit.shard()
    unit.unshard().wait()
    other, view = torch.ones(2), layer.weight[:2]

    outputs = OutlivingPart(unit.copied).leave({"other": other, "view": view, "name": "x"})

    assert outputs["other"] is other
    assert torch.equal(outputs["view"], view)
    assert outputs["view"].untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr()
    outputs["view"].sum().backward()
    assert layer.weight.grad.sum() == 6
