"""Gradients that functions return get the shape and type that autograd gives them."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.execute.split.deferred_node import fitted
from tests.support.local_pipelines import is_same


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.ones(4, 2, 3), torch.full((2, 3), 4.0)),
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3)),
        (None, None),
    ],
)
def test_a_gradient_fits_the_edge_that_it_belongs_to(gradient, expected):
    edge = get_gradient_edge(nn.Parameter(torch.zeros(2, 3)))

    found = fitted(gradient, edge)

    assert is_same(found, expected)
