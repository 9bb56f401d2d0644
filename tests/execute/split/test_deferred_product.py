"""A product keeps its activations and the gradient of its output between I and W, and sees what changes them."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.split.products import NODES
from tests.local_pipelines import values


def read(output):
    """The product that has made an output."""
    return NODES[type(output.grad_fn).__name__](output.grad_fn)


def test_a_product_after_nothing_but_its_weights_is_an_end():
    weight = nn.Parameter(values(2, 5, 4))

    ends = [read(hidden @ weight).end() for hidden in (values(1, 3, 5), values(1, 3, 5).requires_grad_())]

    assert [end is None for end in ends] == [False, True]


@pytest.mark.parametrize("is_changed", [False, True])
def test_activations_that_are_changed_in_place_before_the_weight_part_are_told(is_changed):
    activations, weight = values(1, 3, 5), values(2, 5, 4).requires_grad_()
    output = activations @ weight
    product = read(output)
    product.watch([])
    output.backward(values(3, 3, 4), inputs=[product.end()])
    product.release()
    expected = activations.t() @ values(3, 3, 4)
    if is_changed:
        activations[0] = 0.0
        with pytest.raises(PipelineError, match=r"\(3, 5\).* were changed in place .* at version 1, expected 0"):
            product.gradients()
    else:
        assert torch.equal(product.gradients()[0], expected)
