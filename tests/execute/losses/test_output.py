"""Whatever form a loss function returns its losses in, they are read the same or refused with the fix."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import LossOutput
from penstock.errors import PipelineError
from penstock.execute.losses.output import read_loss, scalar_loss, takes_weight


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (torch.ones(4), r"shape \(4,\)"),
        (torch.ones(1, 1), r"shape \(1, 1\)"),
        (torch.ones(0), r"shape \(0,\)"),
        (torch.tensor(1), "type int64"),
        (1.5, "a float"),
        (None, "NoneType"),
        ((torch.tensor(1.0),), "a tuple"),
        ([torch.tensor(1.0), 2], "a list"),
    ],
)
def test_a_loss_is_one_number_in_a_tensor(loss, found):
    with pytest.raises(PipelineError, match=f"microbatch 2: the loss function returned .*{found}"):
        read_loss(loss, 2)


@pytest.mark.feature("0.12")
def test_a_loss_of_shape_1_is_taken_as_a_scalar_with_its_gradient():
    weight = torch.tensor([3.0], requires_grad=True)

    scalar = torch.tensor(1.0)
    assert scalar_loss(scalar, 0) is read_loss(scalar, 0).loss is scalar
    loss = read_loss(weight * 2.0, 0).loss
    loss.backward()

    assert loss.shape == ()
    assert weight.grad.tolist() == [2.0]


def test_the_sum_of_named_losses_is_trained_and_each_is_reported():
    weight = torch.tensor(3.0, requires_grad=True)

    parts = read_loss({"a": weight * 2.0, "b": (weight * weight).reshape(1)}, 0)
    parts.loss.backward()

    assert parts.loss.item() == 15.0
    assert {name: float(loss) for name, loss in parts.named_losses.items()} == {"a": 6.0, "b": 9.0}
    assert float(weight.grad) == 8.0
    reported = read_loss(LossOutput(weight * 2.0, reported={"loss": weight * 6.0, "texts": ["x", 1, None]}), 0).reported
    assert reported == {"loss": torch.tensor(18.0), "texts": ["x", 1, None]}
    assert not reported["loss"].requires_grad


@pytest.mark.feature("X20")
@pytest.mark.parametrize("weight", [4, 4.0, torch.tensor(4), torch.tensor([4])])
def test_a_sum_with_its_weight_is_a_mean(weight):
    total = torch.tensor(6.0, requires_grad=True)

    for parts in (read_loss((total, weight), 0, 4.0), read_loss(LossOutput(total, weight), 0, 4.0)):
        assert parts.loss.item() == 1.5
        assert parts.loss.requires_grad
    named = read_loss(LossOutput({"a": torch.tensor(6.0), "b": torch.tensor(2.0)}, weight), 0, 4.0)
    assert all(float(read_loss((torch.tensor(number), 0), 0, 0.0).loss) == 0.0 for number in (0.0, math.nan, math.inf))
    assert float(named.loss) == 2.0
    assert {name: float(loss) for name, loss in named.named_losses.items()} == {"a": 1.5, "b": 0.5}


def test_a_weight_needs_a_count_that_says_the_same():
    total = torch.tensor(6.0)

    with pytest.raises(PipelineError, match=r"microbatch 3: .* weight 4, but the weights of all .* Pipeline count="):
        read_loss((total, 4), 3)
    with pytest.raises(PipelineError, match=r"microbatch 3: .* weight 4, but count returned 5 for its target"):
        read_loss((total, torch.tensor(4)), 3, 5.0)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({"lm loss": 1.0}, r"weight {'lm loss': 1.0}; .* return penstock.LossOutput\(loss, reported=...\)"),
        ("4", "weight '4'; expected a number"),
        (torch.ones(2), r"weight tensor\(\[1., 1.\]\); expected a number, or a tensor that holds one"),
    ],
)
def test_a_pair_whose_second_part_is_no_weight_is_refused(weight, message):
    with pytest.raises(PipelineError, match=message):
        read_loss((torch.tensor(6.0), weight), 0, 4.0)


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({}, r"the names \[\]; expected one or more"),
        ({"": torch.tensor(1.0)}, r"the names \[.*\]; expected one or more"),
        ({1: torch.tensor(1.0)}, r"the names \[.*\]; expected one or more"),
        ({"a": torch.tensor(1.0), "b": torch.ones(2)}, r"a tensor of shape \(2,\) and type float32 as 'b'"),
    ],
)
def test_named_losses_have_names_and_are_losses(named, text):
    with pytest.raises(PipelineError, match=f"microbatch 0: .* {text}"):
        read_loss(named, 0)


class Asking(nn.Module):
    def forward(self, output, target, *, weight):
        return output * weight


class Telling(nn.Module):
    def forward(self, output, target, weight=None):
        return output


WEIGHTED = partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0]))
PLAIN = [lambda o, t: o, lambda o, t, **rest: o, F.cross_entropy, nn.CrossEntropyLoss(), Telling(), max, torch.add]
PLAIN += [WEIGHTED, partial(WEIGHTED, ignore_index=1)]  # whose class weights stay


@pytest.mark.feature("E3")
def test_a_loss_asks_for_its_factor_by_a_keyword_that_cannot_be_given_by_position():
    asking = [lambda o, t, *, weight: o, lambda o, t, *, weight=1.0: o, Asking()]
    asking += [partial(asking[0], weight=1.0)]

    assert [takes_weight(loss) for loss in (*asking, *PLAIN)] == [True] * len(asking) + [False] * len(PLAIN)


def test_named_losses_that_have_counts_add_up_without_those_that_count_nothing():
    parts = read_loss({"a": torch.tensor(2.0), "b": torch.tensor(math.nan)}, 3, {"a": 4.0, "b": 0.0})
    nothing = read_loss({"a": torch.tensor(math.nan)}, 3, {"a": 0.0})

    assert (float(parts.loss), float(nothing.loss)) == (2.0, 0.0)
    assert list(parts.named_losses) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(1.0), "a Tensor, but count a dict with the names"),
        ((torch.tensor(1.0), 2), "a tuple, but count a dict"),
        ({"a": torch.tensor(1.0)}, r"losses named \['a'\], but count a dict with the names \['a', 'b'\]"),
        (LossOutput({"a": torch.tensor(1.0), "b": torch.tensor(1.0)}, 4.0), r"losses named \['a', 'b'\] with a weight"),
        ({"a": torch.ones(2), "b": torch.tensor(1.0)}, r"a tensor of shape \(2,\) and type float32 as 'a'"),
    ],
)
def test_losses_that_do_not_fit_the_names_of_their_counts_are_refused(value, text):
    with pytest.raises(PipelineError, match=f"microbatch 3: the loss function returned {text}"):
        read_loss(value, 3, {"a": 4.0, "b": 0.0})
