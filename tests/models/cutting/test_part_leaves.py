"""A part hands on what it got and made, unchanged by what its own forward does to it."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.part_leaves import PartLeaves


def test_what_arrived_and_what_was_made_goes_on_and_a_leaf_that_is_changed_is_copied():
    arrived, made = torch.zeros(2), torch.ones(2)
    leaves = PartLeaves({"a#0.0": arrived, "b#0.0": arrived}, ("a#0.0", "c#0.1"), frozenset(["a#0.0"]))
    leaves.keep_output("c#0", (arrived, made))
    leaves.arrived["a#0.0"].add_(1)

    assert leaves.outgoing() == {"a#0.0": arrived, "c#0.1": made}
    assert arrived.sum() == 0
    assert leaves.arrived["b#0.0"] is arrived


def test_parameters_of_a_part_and_of_its_submodules_go_on_by_their_names():
    layer, place = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    leaves = PartLeaves({}, ("inner.0.weight", "place"), frozenset())
    leaves.keep_held({"place": place, "unused": place}, {"inner": nn.Sequential(layer)})

    assert leaves.outgoing() == {"inner.0.weight": layer.weight, "place": place}


def test_a_leaf_that_was_not_made_is_refused_by_name():
    with pytest.raises(PenstockError, match=r"has not made 'a#0.0', which a later layer needs"):
        PartLeaves({}, ("a#0.0",), frozenset()).outgoing()


def test_a_leaf_that_begins_a_graph_has_a_grad_fn_as_in_one_process():
    arrived = torch.zeros(2, requires_grad=True)
    leaves = PartLeaves({"a#0.0": arrived}, ("a#0.0",), frozenset())
    assert leaves.arrived["a#0.0"].grad_fn is not None
    assert leaves.outgoing()["a#0.0"] is arrived
    with torch.no_grad():
        assert PartLeaves({"a#0.0": arrived}, (), frozenset()).arrived["a#0.0"] is arrived
