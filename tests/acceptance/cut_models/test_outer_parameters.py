"""Parameters that a forward gets past the attributes of its modules: other stages have copies, which nobody trains."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from tests.support.cut_cases import WIDTH, Chain, batch
from tests.support.local_pipelines import square_loss


class Scaled(Chain):
    def build(self):
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.keep()


class ByClosure(Scaled):
    def keep(self):
        self.scaled = lambda hidden: hidden * self.scale

    def call(self, block, number, hidden):
        return self.scaled(block(hidden))


class ByReference(Scaled):
    def keep(self):
        self.owner = weakref.ref(self)

    def call(self, block, number, hidden):
        return block(hidden) * self.owner().scale


class ByList(Scaled):
    """Weights of blocks in a list, as for a penalty."""

    def keep(self):
        self.weights = [block.inner.weight for block in self.blocks]

    def call(self, block, number, hidden):
        return block(hidden) + hidden @ self.weights[number]


class OfTorchFunc(Scaled):
    def keep(self): ...

    def call(self, block, number, hidden):
        return block(hidden) + torch.func.grad(lambda value: (value**2).sum())(hidden)


class ByPartial(Scaled):
    """A method that is bound to the model follows a copy of it."""

    def keep(self):
        self.scaled = partial(self.product, 2.0)

    def product(self, factor, hidden):
        return hidden * self.scale * factor

    def call(self, block, number, hidden):
        return self.scaled(block(hidden))


def step_of(kind):
    torch.manual_seed(0)
    model, rows = kind().double(), batch()["rows"]
    square_loss(model(rows), rows).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    pipeline = ps.Pipeline(ps.cut(model, ["blocks.*"]), "1f1b", 1, square_loss, ranks=1)
    pipeline.step(rows=rows, target=rows)
    return dict(pipeline.named_parameters()), wanted


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (ByClosure, "'scale' by a function"),
        (ByReference, "'scale' by"),
        (ByList, "parameter of a"),
        (OfTorchFunc, "func"),
    ],
)
def test_parameters_that_other_stages_would_not_train_are_refused(kind, match):
    with pytest.raises(PenstockError, match=match):
        step_of(kind)


def test_methods_that_are_bound_to_the_model_are_right():
    parameters, wanted = step_of(ByPartial)
    for name, gradient in wanted.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=1e-12, atol=1e-12)
