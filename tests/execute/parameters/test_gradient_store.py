"""No backward changes what another has left: the first gradient of a parameter has memory of its own."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.execute.parameters.gradient_store import MAIN_GRAD, GradientStore
from penstock.execute.split.planner import SplitPlanner
from penstock.execute.stages.stage import Stage
from tests.support.local_pipelines import WIDTH, settle, values
from tests.support.one_stage import Again, OneStage

LENGTH = 3


class Positions(nn.Module):
    """Adds a table to a single sequence: its gradient is a view of that of the output."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(LENGTH, WIDTH))

    def forward(self, hidden):
        return hidden + self.table.unsqueeze(0)


def stage_of(*layers, is_split):
    layer = settle(nn.Sequential(*layers), 0)
    stage = Stage(0, {"0": layer})
    stage.split_planner = SplitPlanner(small=0)
    return OneStage(stage, is_split=is_split)


def begun(*parameters):
    """Return the gradients of some parameters in a backward of a step."""
    store = GradientStore(lambda: parameters)
    store.begin_step()
    store.begin_backward()
    return store


def forward(stage, seed):
    return stage.saved(values(seed, 1, LENGTH, WIDTH).requires_grad_())


def gradients_of(stage):
    return [parameter.grad for _, parameter in stage.stage.named_parameters()]


def test_weight_parts_that_wait_get_the_gradients_of_their_own_microbatch():
    stage, plain = (stage_of(nn.Linear(WIDTH, WIDTH), Positions(), is_split=is_split) for is_split in (True, False))

    waiting = [forward(stage, seed) for seed in range(3)]
    for saved in waiting:
        stage.backward_input(saved, values(9, 1, LENGTH, WIDTH))
    for saved in waiting:
        stage.backward_weight(saved)
    for seed in range(3):
        plain.backward(forward(plain, seed), values(9, 1, LENGTH, WIDTH))

    assert all(map(torch.equal, gradients_of(stage), gradients_of(plain)))


class Sum(nn.Module):
    """Multiplies by the sum of two parameters, whose gradients autograd begins in one memory."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(WIDTH * WIDTH)) for _ in range(2))

    def forward(self, hidden):
        return hidden @ (self.first.view(WIDTH, WIDTH) + self.second.view(WIDTH, WIDTH))


@pytest.mark.parametrize("is_split", [False, True])
def test_two_gradients_that_begin_in_one_memory_are_added_to_apart(is_split):
    stage, whole = stage_of(Sum(), is_split=is_split), stage_of(Sum(), is_split=False)

    for seed in range(2):
        saved = forward(stage, seed)
        stage.backward_input(saved, values(9, 1, LENGTH, WIDTH))
        if is_split:
            stage.backward_weight(saved)
    both = whole.saved(torch.cat([values(seed, 1, LENGTH, WIDTH) for seed in range(2)]).requires_grad_())
    whole.backward(both, values(9, 1, LENGTH, WIDTH).expand(2, -1, -1))

    torch.testing.assert_close(gradients_of(stage), gradients_of(whole))


class Recurrent(nn.Module):
    """Uses a layer three times."""

    def __init__(self, layer, first, last):
        super().__init__()
        self.layer, self.first, self.last = layer, first, last

    def forward(self, hidden):
        return self.last(self.layer, self.first(self.layer, self.first(self.layer, hidden)))


def reentrant(layer, hidden):
    return checkpoint(layer, hidden, use_reentrant=True)


@pytest.mark.parametrize("last", [reentrant, nn.Module.__call__])
@pytest.mark.parametrize("first", [reentrant, Again.apply])
def test_a_backward_within_a_backward_changes_nothing_that_waits(first, last):
    """It adds to the gradient of the table, which had begun in the memory of one that a product keeps."""

    def gradients(is_split):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Positions())
        stage = stage_of(nn.Linear(WIDTH, WIDTH), Recurrent(layer, first, last), is_split=is_split)
        stage.stage.layers["0"].double()
        for seed in range(2):
            saved = stage.saved(values(seed, 1, LENGTH, WIDTH, dtype=torch.float64).requires_grad_())
            stage.backward_input(saved, values(9, 1, LENGTH, WIDTH, dtype=torch.float64))
            if is_split:
                stage.backward_weight(saved)
        return gradients_of(stage)

    for split, whole in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_split", [False, True])
def test_what_was_returned_and_what_came_in_stay_as_they_were(is_split):
    """The stage begins with the table, so all three are the same values."""
    stage, incoming = stage_of(Positions(), is_split=is_split), values(9, 1, LENGTH, WIDTH)

    (returned,) = stage.backward_input(forward(stage, 0), incoming)
    stage.backward_input(forward(stage, 1), values(8, 1, LENGTH, WIDTH))

    assert torch.equal(incoming, values(9, 1, LENGTH, WIDTH))
    assert torch.equal(returned, values(9, 1, LENGTH, WIDTH))


def test_main_gradients_have_memory_of_their_own():
    stage, incoming = stage_of(Positions(), is_split=False), values(9, 1, LENGTH, WIDTH, dtype=torch.float32)
    stage.stage.layers["0"].float()
    hidden = values(0, 1, LENGTH, WIDTH, dtype=torch.float32).requires_grad_()

    store = stage.passes.gradients = GradientStore(stage.stage.parameters, MAIN_GRAD)
    store.begin_step()
    for _ in range(2):
        stage.backward_input(stage.saved(hidden), incoming)
    store.end_step()

    assert torch.equal(incoming, values(9, 1, LENGTH, WIDTH, dtype=torch.float32))


def test_only_what_is_new_dense_and_shared_is_copied():
    first, second, third, table = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    needed, third.grad = torch.ones(4), torch.ones(2)
    gradients = begun(first, second, third, table)

    first.grad, second.grad, table.grad = needed[:2], torch.ones(2), torch.ones(2).to_sparse()
    others = second.grad, third.grad, table.grad
    gradients.end_backward((), [needed])
    needed += 1

    assert first.grad.tolist() == [1.0, 1.0]
    assert all(each.grad is own for each, own in zip((second, third, table), others, strict=True))


def test_a_split_backward_finds_leaves_that_the_stage_does_not_list():
    prompt = values(5, 2).requires_grad_()
    gradients = begun(nn.Parameter(torch.zeros(2)))
    dy = torch.ones(1, 2)

    torch.autograd.backward(prompt[None], dy)
    gradients.end_backward((), [dy])
    assert prompt.grad.data_ptr() == dy.data_ptr()
    gradients.end_backward([prompt], [dy])
    torch.autograd.backward(prompt[None], dy)

    assert dy.tolist() == [[1.0, 1.0]]
    assert prompt.grad.tolist() == [2.0, 2.0]
