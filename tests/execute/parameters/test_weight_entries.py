"""Late gradients are computed in few calls, large ones by themselves, and all of one parameter in one."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from penstock.execute.parameters.gradient_store import GradientStore, WeightInputs


class Late:
    """Gradients of ones that note when they are computed."""

    def __init__(self, *parameters, log=None, unused=()):
        self.roots = self.parameters = parameters
        self.log = [] if log is None else log
        self.unused = unused

    def gradients(self):
        self.log.append("finished")
        return [None if each in self.unused else torch.ones_like(own) for each, own in enumerate(self.parameters)]


def add(entries):
    GradientStore(list).add(WeightInputs(entries))


def parameters(*sizes):
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 0, 0), (1, 0, 1)])
def test_the_hook_of_a_parameter_sees_one_sum(order):
    both, seen = parameters(2, 3), []
    for parameter in both:
        parameter.register_hook(lambda gradient: seen.append(gradient.tolist()))

    add([Late(both[index]) for index in order])

    assert sorted(seen) == sorted([[float(order.count(index))] * len(both[index]) for index in (0, 1)])


def test_what_shares_a_parameter_with_two_others_joins_them():
    first, second, third = parameters(400_000, 400_000, 2)
    seen = []
    for parameter in (first, second):
        parameter.register_hook(lambda gradient: seen.append(gradient[0].item()))

    add([Late(first), Late(second), Late(third), Late(first, second)])

    assert seen == [2.0, 2.0]


def test_what_comes_after_two_groups_have_joined_joins_them_too():
    first, second, third = parameters(400_000, 400_000, 400_000)
    seen = []
    for parameter in (first, second, third):
        parameter.register_hook(lambda gradient: seen.append(gradient[0].item()))

    add([Late(first), Late(second, third), Late(first, second), Late(third)])

    assert seen == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("size", "expected"), [(3, ["finished"] * 2 + ["added"] * 2), (400_000, ["finished", "added"] * 2)]
)
def test_large_gradients_are_added_one_by_one_and_small_ones_together(size, expected):
    log = []
    both = parameters(size, size)
    for parameter in both:
        parameter.register_hook(lambda _: log.append("added"))

    add([Late(parameter, log=log) for parameter in both])

    assert log == expected


def test_a_weight_to_which_no_gradient_came_has_none():
    first, second, third = parameters(2, 2, 2)

    add([Late(first, second, unused=[0]), Late(third, unused=[0])])

    assert (first.grad, second.grad.tolist(), third.grad) == (None, [1.0, 1.0], None)


def test_nothing_is_nothing():
    add([])


class Own:
    """An entry that writes by itself."""

    parameters = roots = kept = ()

    def __init__(self, log):
        self.log = log

    def gradients(self):
        self.log.append("own")
        return ()


def test_what_writes_by_itself_does_so_behind_the_others_and_outside_of_their_context():
    log = []
    [parameter] = parameters(2)
    parameter.register_hook(lambda _: log.append("added"))

    @contextmanager
    def around():
        log.append("begin")
        yield
        log.append("end")

    inputs = WeightInputs([Own(log), Late(parameter, log=log), Own(log)], around)
    GradientStore(list).add(inputs)

    assert log == ["begin", "finished", "added", "end", "own", "own"]
    assert inputs.entries == []
