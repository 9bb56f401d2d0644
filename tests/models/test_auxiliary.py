"""An auxiliary loss collects what layers add, once, and adds nothing to what a layer has and saves."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError, PenstockError
from penstock.models import AuxiliaryLoss


class Router(nn.Module):
    """The example of `AuxiliaryLoss`."""

    def __init__(self, width=3, num_experts=2):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.z_loss = AuxiliaryLoss("z_loss", weight=1e-3)

    def forward(self, features):
        scores = self.router(features)
        self.z_loss.add(scores.logsumexp(-1).square().mean())
        return scores


def test_alone_on_one_device_the_caller_takes_what_was_added_and_trains_it():
    layer, features = Router(), torch.randn(2, 5, 3)
    scores = layer(features)

    added = layer.z_loss.take()
    (scores.mean() + layer.z_loss.weight * added).backward()

    same = copy.deepcopy(layer)
    same.zero_grad()
    plain = same.router(features)
    (plain.mean() + 1e-3 * plain.logsumexp(-1).square().mean()).backward()
    assert torch.equal(layer.router.weight.grad, same.router.weight.grad)


def test_what_is_added_twice_is_added_up_and_taken_once():
    loss = AuxiliaryLoss("balance")
    loss.add(torch.tensor(1.0))
    loss.add(torch.tensor([2.0]))

    assert loss.take().shape == ()
    assert loss.take() is None

    loss.add(torch.tensor(3.0))
    loss.add(torch.tensor(4.0))
    assert float(loss.take()) == 7.0


def test_what_is_added_between_take_and_begin_does_not_count():
    layer, features = Router(), torch.randn(2, 5, 3, requires_grad=True)

    def run(features):
        return layer(features).sigmoid()  # needed by the backward, so that a recomputation passes the loss

    layer.z_loss.begin()
    output = checkpoint(run, features, use_reentrant=False)
    added = layer.z_loss.take()
    (output.sum() + added).backward()
    assert layer.z_loss.take() is None

    layer.z_loss.end()
    checkpoint(run, features, use_reentrant=False).sum().backward()
    torch.testing.assert_close(layer.z_loss.take(), 2 * added)  # whoever does not begin has it twice


def test_a_thread_that_comes_by_meanwhile_adds_nothing_anywhere():
    loss = AuxiliaryLoss("balance")
    loss.begin()
    loss.add(torch.tensor(1.0))

    with ThreadPoolExecutor(1) as threads:
        for value in (torch.tensor(2.0), "not even looked at"):
            threads.submit(loss.add, value).result()

    assert float(loss.take()) == 1.0


def test_threads_that_each_begin_collect_apart():
    loss = AuxiliaryLoss("balance")

    def run(value):
        loss.begin()
        loss.add(torch.tensor(value))
        added = float(loss.take())
        loss.end()
        return added

    loss.begin()
    loss.add(torch.tensor(1.0))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run, 2.0).result() == 2.0
    assert float(loss.take()) == 1.0


def test_begin_and_end_forget_what_was_added():
    loss = AuxiliaryLoss("balance")
    loss.add(torch.tensor(1.0))

    loss.begin()
    assert loss.take() is None

    loss.begin()
    loss.add(torch.tensor(1.0))
    loss.end()
    assert loss.take() is None

    loss.add(torch.tensor(2.0))
    assert float(loss.take()) == 2.0


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.5, "a float"),
        (torch.ones(2), r"a tensor of shape \(2,\) and type float32"),
        (torch.tensor(1), r"a tensor of shape \(\) and type int64"),
    ],
)
def test_what_is_no_loss_is_refused_by_name(value, found):
    with pytest.raises(PenstockError, match=f"auxiliary loss 'balance' was given {found}; expected a floating-point"):
        AuxiliaryLoss("balance").add(value)


def test_a_value_without_gradients_is_refused_only_where_gradients_are_recorded():
    loss = AuxiliaryLoss("balance")
    with torch.no_grad():
        loss.begin()
        loss.add(torch.tensor(1.0))
        assert float(loss.take()) == 1.0

    loss.begin()
    with torch.no_grad(), pytest.raises(PenstockError, match="'balance' was added to where gradients are off"):
        loss.add(torch.tensor(1.0))


def test_a_name_and_a_finite_weight_are_needed():
    with pytest.raises(ConfigError, match="name: an auxiliary loss has no name"):
        AuxiliaryLoss("")
    with pytest.raises(ConfigError, match="weight: auxiliary loss 'balance' weighs nan"):
        AuxiliaryLoss("balance", float("nan"))


def test_it_adds_nothing_to_what_a_layer_has_and_saves():
    layer = Router()
    layer.z_loss.add(nn.Parameter(torch.tensor(1.0)))

    assert [name for name, _ in layer.named_parameters()] == ["router.weight", "router.bias"]
    assert list(layer.state_dict()) == ["router.weight", "router.bias"]
