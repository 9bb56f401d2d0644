"""What one rank does with the gradients of its parameters, around and within a step."""

import pytest
import torch
from torch import nn

from penstock.execute.control.collectives import Control
from penstock.execute.options import PipelineOptions
from penstock.execute.rank_parameters import RankParameters
from penstock.execute.stages.assemble import assemble
from penstock.execute.transport import LocalTransport
from penstock.pipeline import Pipeline
from penstock.placement import Placement

CPU = torch.device("cpu")


def test_modules_are_walked_only_after_they_have_changed(monkeypatch):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]
    pipeline = Pipeline(layers, "gpipe", 2, nn.functional.mse_loss)
    walked, walk = [], nn.Module.named_modules

    def counted(self, *args, **kwargs):
        walked.append(self)
        return walk(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)

    def walks_in_step():
        walked.clear()
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
        return len(walked)

    walks_in_step()
    unchanged = walks_in_step()
    layers[0][0] = nn.Linear(4, 4)
    changed = walks_in_step()

    assert unchanged == 0
    assert changed > 0
    assert walks_in_step() == 0
    assert layers[0][0].weight.grad is not None


@pytest.mark.parametrize(("init_scale", "expected"), [(None, 0.0), (8.0, 8.0)])
def test_the_scale_of_a_step_is_that_of_the_scaler_and_0_without_one(init_scale, expected):
    scale = None if init_scale is None else torch.amp.GradScaler("cpu", init_scale=init_scale).scale
    [transport] = LocalTransport.create(1, 20.0)
    assembly = assemble([nn.Linear(2, 2)], Placement.line(1), [range(1)], 0, device=CPU)

    parameters = RankParameters(Control(transport), CPU, assembly, PipelineOptions(scale_loss=scale))

    assert parameters.proposed(is_training=True)["scale"] == expected
