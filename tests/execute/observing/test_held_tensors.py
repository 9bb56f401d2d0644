"""What waits for W is found behind products, in closures and in queues, and nothing else is."""

from collections import deque
from functools import partial
from queue import Queue

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.execute.observing.held_tensors import held_by, queued, reached_by, saved_behind
from penstock.execute.split.own_weight_gradients import WEIGHT_GRADIENTS, OwnWeightGradients
from penstock.execute.split.planner import SplitPlanner
from tests.one_stage import run_input_part
from tests.own_weight_gradients import Building, Fused

FEATURES, GRADIENT = torch.ones(3), torch.ones(4)
GLOBAL = torch.ones(5)


def is_same(found, expected):
    return sorted(map(id, found)) == sorted(map(id, expected))


def test_the_graph_from_a_product_to_its_parameters_has_saved_tensors():
    weight = nn.Parameter(torch.zeros(2, 3))
    first = torch.sigmoid(weight)
    second = torch.tanh(first * weight)

    found = saved_behind([get_gradient_edge(second.t())])

    # Of tanh and sigmoid their results; the product has saved `first` too, and the parameter, which is there anyway.
    assert [each.data_ptr() for each in found] == [second.data_ptr(), first.data_ptr(), first.data_ptr()]
    assert saved_behind([get_gradient_edge(weight)]) == []


class Entry:
    """Holds a tensor in a slot."""

    __slots__ = ("features",)

    def __init__(self, features):
        self.features = features


def test_a_function_holds_what_it_closes_over_and_what_that_leads_to():
    layer, queue = nn.Linear(2, 2), Queue()
    queue.put({"gradient": GRADIENT})

    def add(scale=torch.ones(6), *, entry=Entry(FEATURES)):  # noqa: B008
        return layer(queue.get()["gradient"]) * scale * entry.features + GLOBAL

    found = reached_by(add)

    assert is_same(found.tensors, [GRADIENT, *add.__defaults__, FEATURES])
    assert found.owners == [layer]


def test_arguments_of_a_partial_and_parameters_are_told_apart():
    weight = nn.Parameter(torch.ones(2))

    found = reached_by(partial(torch.add, FEATURES, weight))

    assert is_same(found.tensors, [FEATURES])
    assert is_same(found.owners, [weight])


def test_attributes_of_a_context_are_followed():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            ctx.kept = FEATURES
            return features * 2

    output = Own.apply(torch.ones(3, requires_grad=True))
    node = output.grad_fn

    assert is_same(reached_by(lambda: node.kept).tensors, [FEATURES])


def test_a_queue_holds_its_entries_and_no_parameters_or_buffers():
    layer = Fused()
    layer.register_buffer("table", torch.ones(2))
    layer.inner = nn.Module()
    layer.inner.left = [GLOBAL]
    layer.queue.append((GRADIENT, FEATURES))

    assert is_same(queued([layer]), [GRADIENT, FEATURES, GLOBAL])
    assert queued([]) == []


def test_what_takes_from_a_queue_holds_that_of_its_own_layer():
    layers = [Fused(), Fused()]
    for layer in layers:
        layer.queue = deque([(torch.ones(1), torch.ones(2))])
    own, waiting = OwnWeightGradients(layers), []
    with own.around_backward(waiting):
        pass

    found = [reached_by(entry.run) for entry in waiting]

    assert [each.owners for each in found] == [[layer] for layer in layers]
    assert all(is_same(each.tensors, layer.queue[0]) for each, layer in zip(found, layers, strict=True))


def test_what_a_builder_returns_is_a_function_like_others():
    layer, waiting = Building(), []
    layer.keep(GRADIENT, FEATURES)
    with OwnWeightGradients([layer]).around_backward(waiting):
        pass

    assert is_same(reached_by(waiting[0].run).tensors, [GRADIENT, FEATURES])


def test_held_is_what_products_keep_what_is_behind_them_and_what_functions_hold():
    weight, features = nn.Parameter(torch.zeros(3, 3)), torch.ones(2, 3, requires_grad=True)
    plan = SplitPlanner(small=0)
    deferred = plan.start(6)
    made = torch.tanh(weight)
    output = features @ made
    gradient = torch.ones_like(output)

    run_input_part(deferred, [get_gradient_edge(output)], [gradient])
    with WEIGHT_GRADIENTS.waiting_in(deferred.entries):
        WEIGHT_GRADIENTS.put(partial(torch.add, GRADIENT, FEATURES))

    expected = [features, gradient, made, GRADIENT, FEATURES]
    found = [each for entry in deferred.take_weight_inputs().entries for each in held_by(entry).tensors]
    assert sorted(each.data_ptr() for each in found) == sorted(each.data_ptr() for each in expected)
