"""What waits for W is found behind products, in closures and in queues, and nothing else is."""

from functools import partial
from queue import Queue

import torch
from torch import nn

from penstock.execute.observing.held_tensors import queued, reached_by
from tests.support.own_weight_gradients import Fused

FEATURES, GRADIENT = torch.ones(3), torch.ones(4)
GLOBAL = torch.ones(5)


def is_same(found, expected):
    return sorted(map(id, found)) == sorted(map(id, expected))


class Entry:
    """Holds a tensor in a slot."""

    __slots__ = ("features",)

    def __init__(self, features):
        self.features = features


def test_a_function_holds_what_it_closes_over_its_arguments_and_what_these_lead_to():
    layer, queue = nn.Linear(2, 2), Queue()
    queue.put({"gradient": GRADIENT})

    def add(scale=torch.ones(6), *, entry=Entry(FEATURES)):  # noqa: B008
        return layer(queue.get()["gradient"]) * scale * entry.features + GLOBAL

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            ctx.kept = FEATURES
            return features * 2

    weight, node = nn.Parameter(torch.ones(2)), Own.apply(torch.ones(3, requires_grad=True)).grad_fn
    found, of_partial = reached_by(add), reached_by(partial(torch.add, FEATURES, weight))

    assert is_same(found.tensors, [GRADIENT, *add.__defaults__, FEATURES])
    assert found.owners == [layer]
    assert is_same(of_partial.tensors, [FEATURES])
    assert is_same(of_partial.owners, [weight])
    assert is_same(reached_by(lambda: node.kept).tensors, [FEATURES])


def test_a_queue_holds_its_entries_and_no_parameters_or_buffers():
    layer = Fused()
    layer.register_buffer("table", torch.ones(2))
    layer.inner = nn.Module()
    layer.inner.left = [GLOBAL]
    layer.queue.append((GRADIENT, FEATURES))

    assert is_same(queued([layer]), [GRADIENT, FEATURES, GLOBAL])
    assert queued([]) == []
