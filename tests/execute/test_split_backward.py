"""Where a stage cannot be split, its input part does the whole backward and its weight part nothing."""

import torch

from penstock.execute.split_backward import backward_input, backward_weight
from penstock.execute.stage import Stage
from tests.local_pipelines import WIDTH, block, values


def run(parts):
    stage = Stage(0, {"0": block(0)})
    hidden = values(1, 3, WIDTH).requires_grad_()
    saved = stage.save((hidden,), stage.forward((hidden,), {}))
    gradients = parts(stage, saved, [values(2, 3, WIDTH)])
    return [*gradients, *(parameter.grad for _, parameter in stage.named_parameters())]


def in_two_parts(stage, saved, gradients):
    found = backward_input(stage, saved, gradients)
    backward_weight(stage, saved)
    return found


def test_input_part_and_weight_part_together_are_the_whole_backward():
    assert all(map(torch.equal, run(in_two_parts), run(Stage.backward)))


def test_the_input_gradient_is_there_after_the_input_part():
    assert torch.equal(run(backward_input)[0], run(Stage.backward)[0])
