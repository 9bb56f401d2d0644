"""Each way in which weight gradients wait has one finder, which is asked about the kinds of nodes that it knows."""

from torch import nn

from penstock.execute.split import finders
from penstock.execute.undocumented import kind_of
from tests.support.local_pipelines import WIDTH, values


def test_nodes_of_linear_layers_are_asked_about_by_their_kind_and_no_kind_has_two_finders():
    hidden = values(1, 2, WIDTH).requires_grad_()
    outputs = nn.Linear(WIDTH, WIDTH)(hidden), nn.Linear(WIDTH, WIDTH, bias=False)(hidden)

    assert all(kind_of(output.grad_fn) in finders.BY_KIND for output in outputs)
    assert finders.OF_OWN_NODES.keys().isdisjoint(finders.BY_KIND)
