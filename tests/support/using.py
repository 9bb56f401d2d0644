"""Layers whose forward is a function of themselves and their input."""

import torch
from torch import nn

from penstock.execute.split.wanted import wants_input_gradient, wants_weight_gradient
from tests.support.local_pipelines import WIDTH


class Using(nn.Module):
    """Has parts by name, and calls a function of itself and its input."""

    def __init__(self, use, **parts):
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, hidden):
        return self.use(self, hidden)


def weights(use, **parts):
    """Return a layer that uses matrices and a vector of its own; `settle` gives them values."""
    matrices = {name: nn.Parameter(torch.zeros(WIDTH, WIDTH)) for name in ("first", "second", "third")}
    return Using(use, **matrices, vector=nn.Parameter(torch.zeros(WIDTH)), **parts)


def between(use):
    """Return a layer that uses such weights between two linear layers."""

    def run(self, hidden):
        return self.after(torch.tanh(use(self, self.before(hidden))))

    return weights(run, before=nn.Linear(WIDTH, WIDTH), after=nn.Linear(WIDTH, WIDTH))


class Product(torch.autograd.Function):
    """hidden @ weight, as a function of the user's own."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        return products(gradient, *ctx.saved_tensors)


class AskingProduct(Product):
    """Asks which half is wanted."""

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = products(gradient, *ctx.saved_tensors)
        return of_hidden if wants_input_gradient(ctx) else None, of_weight if wants_weight_gradient(ctx) else None


def products(gradient, hidden, weight):
    """Return the gradients of a product."""
    return gradient @ weight.t(), hidden.flatten(0, -2).t() @ gradient.flatten(0, -2)


def function_of(forward, backward):
    """Return a function of the user's own with these two halves, as autograd takes it."""
    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), halves)
