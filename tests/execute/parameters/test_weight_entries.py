"""Late gradients are computed in few calls, large ones by themselves, and all of one parameter in one."""

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


SHARED = {
    "by nothing": ([2, 3], [[0], [1]]),
    "by several, with another between them": ([2, 3], [[0], [1], [0], [0]]),
    "by those around another": ([2, 3], [[1], [0], [1]]),
    "by one that so joins two others": ([400_000, 400_000, 2], [[0], [1], [2], [0, 1]]),
    "by one after two groups have joined": ([400_000] * 3, [[0], [1, 2], [0, 1], [2]]),
}
"""The sizes of parameters, and those of each entry."""


@pytest.mark.parametrize("how", SHARED)
def test_the_hook_of_a_parameter_sees_one_sum(how):
    sizes, entries = SHARED[how]
    held, seen = parameters(*sizes), []
    for number, parameter in enumerate(held):
        parameter.register_hook(lambda gradient, number=number: seen.append((number, gradient.unique().tolist())))

    add([Late(*[held[number] for number in entry]) for entry in entries])

    num_uses = [sum(number in entry for entry in entries) for number in range(len(sizes))]
    assert sorted(seen) == [(number, [float(uses)]) for number, uses in enumerate(num_uses)]


def test_large_gradients_are_added_one_by_one_and_small_ones_together():
    expected = {3: ["finished"] * 2 + ["added"] * 2, 400_000: ["finished", "added"] * 2}

    for size in expected:
        log, both = [], parameters(size, size)
        for parameter in both:
            parameter.register_hook(lambda _, log=log: log.append("added"))
        add([Late(parameter, log=log) for parameter in both])
        assert log == expected[size]


def test_a_weight_to_which_no_gradient_came_has_none():
    first, second, third = parameters(2, 2, 2)

    add([])
    add([Late(first, second, unused=[0]), Late(third, unused=[0])])

    assert (first.grad, second.grad.tolist(), third.grad) == (None, [1.0, 1.0], None)


class Own:
    """An entry that writes by itself."""

    parameters = roots = kept = ()

    def __init__(self, log):
        self.log = log

    def gradients(self):
        self.log.append("own")
        return ()


def test_what_writes_by_itself_does_so_behind_the_others():
    log = []
    [parameter] = parameters(2)
    parameter.register_hook(lambda _: log.append("added"))

    inputs = WeightInputs([Own(log), Late(parameter, log=log), Own(log)])
    GradientStore(list).add(inputs)

    assert log == ["finished", "added", "own", "own"]
    assert inputs.entries == []
