"""Parts of one forward hand on what later ones need, with its gradients, whatever the forward does on the way."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.models.cutting.cut import ByName, cut
from penstock.models.cutting.forward import CutForward, Segment
from penstock.models.cutting.frame import Template
from penstock.models.cutting.part import part_class
from penstock.models.cutting.points import cut_model
from tests.support.local_pipelines import on_ranks, square_loss, values

ROWS, TARGET = values(1, 8, 3, 4, dtype=torch.float64), values(2, 8, 3, 4, dtype=torch.float64)


@dataclass
class Output:
    hidden: torch.Tensor
    gate: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden, memory=None):
        update = self.inner(hidden).tanh()
        return Output(hidden + update if memory is None else hidden + update * memory, update.sigmoid())


class Model(nn.Module):
    """A tower of two blocks whose result all blocks of the trunk get, beside gates that go from block to block."""

    def __init__(self):
        super().__init__()
        self.inp, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.tower, self.trunk = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, rows):
        hidden = first = self.inp(rows)
        for block in self.tower:
            hidden = block(hidden).hidden
        memory, gate = hidden, 1
        hidden = first * self.scale
        for block in self.trunk:
            output = block(hidden, memory)
            hidden, gate = output.hidden * gate, output.gate
            hidden += first
        return self.head(hidden * gate * self.scale)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("1f1b", 4), ("interleaved-1f1b", 2), ("zbv", 2)])
def test_several_chains_train_as_in_one_process(schedule, num_ranks):
    torch.manual_seed(0)
    model = Model().double()
    one_process = copy.deepcopy(model)
    loss = square_loss(one_process(ROWS), TARGET)
    loss.backward()

    def train(transport):
        layers = cut(copy.deepcopy(model), ["tower.*", "trunk.*"])
        pipeline = ps.Pipeline(layers, schedule, 4, square_loss, transport=transport)
        for _ in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            result = pipeline.step(rows=ROWS, target=TARGET)
        return result.loss, {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    wanted = {name: parameter.grad for name, parameter in one_process.named_parameters()}
    for found_loss, gradients in on_ranks(num_ranks, train):
        torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return rows


def test_a_part_of_several_submodules_whose_outputs_go_on_as_they_are_runs_all_of_them():
    torch.manual_seed(0)
    model = Plain().double()
    entry = ByName(model)
    forward = CutForward(Template(model, cut_model(model, ["blocks.*"])), entry)
    names = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    segments = (Segment(None, "blocks.1", names[:1]), Segment("blocks.1", "blocks.3", names[1:3]))
    segments = (*segments, Segment("blocks.3", None, names[3:]))
    first, middle, last = (
        part_class(entry.batch_signature)(
            forward, segment.modules[0], segment, {name: model.get_submodule(name) for name in segment.modules}, {}
        )
        for segment in segments
    )

    for _ in range(2):
        found = last(middle(first(rows=ROWS), rows=ROWS), rows=ROWS)
        torch.testing.assert_close(found, model(ROWS), rtol=1e-12, atol=0)
