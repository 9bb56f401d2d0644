"""What leaves a stage in the memory of gathered weights is copied; anything else is not."""

import torch
from torch import nn

from penstock.execute.parameters.layout import StageParts
from penstock.execute.parameters.sharded import Sharded
from penstock.execute.replicas.lane import ReplicaLane
from penstock.execute.stages.outliving import OutlivingPart, as_it_is
from penstock.execute.transport import LocalTransport
from penstock.execute.undocumented_backends import mesh_without_groups


def test_views_of_gathered_weights_are_copied_with_their_graph():
    (transport,) = LocalTransport.create(1)
    layer = nn.Linear(3, 3)
    unit = Sharded(
        {0: StageParts(lambda: [], [layer])}, None, None, ReplicaLane(transport), mesh_without_groups("data", 1, 0)
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
    assert as_it_is(view) is view
