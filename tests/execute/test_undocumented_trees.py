"""Torch's pytrees know the classes that were registered with them, and rebuild their instances."""

from collections import defaultdict, deque

import pytest
import torch
from torch.utils import _pytree

from penstock.execute.undocumented_trees import rebuilt_registered, registered_children


class Unregistered(list):
    """A subclass of what torch knows."""


class Graph:
    """A container that only its registration opens."""

    def __init__(self, nodes, name):
        self.nodes, self.name = nodes, name


_pytree.register_pytree_node(Graph, lambda graph: ([graph.nodes], graph.name), lambda nodes, name: Graph(*nodes, name))


def test_a_registered_class_has_children_and_is_rebuilt_around_others():
    nodes = [torch.ones(2)]

    children, spec = registered_children(Graph(nodes, "first"))
    rebuilt = rebuilt_registered(["other"], spec)

    assert len(children) == 1
    assert children[0] is nodes
    assert (type(rebuilt), rebuilt.nodes, rebuilt.name) == (Graph, "other", "first")
    assert [registered_children(Graph([], name))[1] == spec for name in ("first", "second")] == [True, False]


@pytest.mark.parametrize(
    ("value", "others", "rebuilt"),
    [
        (defaultdict(list, a=1, b=2), [3, 4], defaultdict(list, a=3, b=4)),
        (deque([1, None], maxlen=5), [3, 4], deque([3, 4], maxlen=5)),
    ],
)
def test_torch_has_registered_containers_itself(value, others, rebuilt):
    children, spec = registered_children(value)

    assert children == list(value.values() if isinstance(value, dict) else value)
    assert repr(rebuilt_registered(others, spec)) == repr(rebuilt)


@pytest.mark.parametrize("value", [object(), 1, "text", torch.ones(1), torch.nn.Linear(1, 1), Unregistered([1])])
def test_other_objects_have_no_children(value):
    assert registered_children(value) is None
