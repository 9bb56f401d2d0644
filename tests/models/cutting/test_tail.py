"""The end of a cut decoder is noted as calls, which make the same of any positions; what is no tail is refused."""

import copy

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.models.cutting.tail import NUM_PROBED, TailSteps, example_of, tail_steps
from tests.hugging_face.families import FAMILIES, model_of
from tests.support.local_pipelines import error_of, values

MODULES = {"head": nn.Linear(4, 6)}
HIDDEN = values(1, 1, NUM_PROBED, 4)


def steps_of(forward, forward_with_batch=None):
    runs = [
        lambda modules, hidden, function=function: function(modules["head"], hidden)
        for function in (forward, forward_with_batch or forward)
    ]
    return tail_steps(*runs, MODULES, HIDDEN)


def within(mode, head, hidden):
    with mode:
        return head(hidden) * 2


@pytest.mark.parametrize(
    "family", [*("llama", "gemma2", "gpt2"), *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES)]
)
def test_the_tail_of_a_model_makes_the_bits_of_its_last_layer_in_one_part_or_several(family):
    pytest.importorskip("transformers")
    layer = ps.from_transformers(model_of(family, "eager" if family == "gemma2" else "sdpa"))[-1]
    hidden = values(2, 1, 12, 32)

    with torch.no_grad():
        whole, parts = layer.tail(hidden), [layer.tail(part) for part in hidden.split([5, 7], dim=1)]
        expected = layer(hidden)

    assert torch.equal(whole, expected)
    assert torch.equal(torch.cat(parts, 1), expected)


def test_only_what_ends_a_decoder_is_a_tail():
    pytest.importorskip("transformers")
    layers = ps.from_transformers(model_of("llama"))

    assert [layer.tail is not None for layer in layers] == [*[False] * (len(layers) - 1), True]


@pytest.mark.parametrize(
    "forward",
    [
        lambda head, hidden: head(hidden),
        lambda head, hidden: (head(hidden) / 30).tanh() * 30,
        lambda head, hidden: head(hidden[:, slice(0, None), :]).float(),
        lambda head, hidden: head(hidden.view(hidden.size())).view(-1, hidden.shape[1], 6),
        lambda head, hidden: head(hidden.clone().mul_(2)),
        lambda head, hidden: head(hidden).split([2, 4], dim=-1)[1],
    ],
    ids=["module", "cap", "slice", "views with the length", "in place", "part of the output"],
)
def test_functions_between_modules_are_called_again_for_any_length(forward):
    steps, hidden = steps_of(forward), values(3, 1, 7, 4)

    torch.testing.assert_close(steps.run(MODULES, hidden), forward(MODULES["head"], hidden))


def test_steps_lead_gradients_to_the_modules_that_they_are_given_and_copies_of_a_layer_share_them():
    steps, other = steps_of(lambda head, hidden: head(hidden) * 2), {"head": nn.Linear(4, 6)}
    hidden = values(3, 1, 7, 4).requires_grad_()

    steps.run(other, hidden).sum().backward()

    assert other["head"].weight.grad is not None
    assert hidden.grad is not None
    assert MODULES["head"].weight.grad is None
    assert copy.deepcopy(steps) is steps


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda head, hidden: head(hidden).cumsum(1), "depends on other ones, on other rows, or on random numbers"),
        (lambda head, hidden: head(hidden - hidden.mean(0, keepdim=True)), "depends on other ones, on other rows"),
        (lambda head, hidden: nn.functional.dropout(head(hidden), 0.5), "other rows, or on random numbers"),
        (lambda head, hidden: nn.functional.dropout(head(hidden), 1e-9), "it draws random numbers by "),
        (lambda head, hidden: within(torch.no_grad(), head, hidden), "within torch.no_grad() or torch.autocast()"),
        (lambda head, hidden: within(torch.autocast("cpu"), head, hidden), "within torch.no_grad() or torch.autocast"),
        (lambda head, hidden: head(hidden) * (hidden.shape[1] * 2), "something else for another number of positions"),
        (lambda head, hidden: head(hidden) if hidden.sum() > 0 else hidden, "decides by values (__bool__)"),
        (lambda head, hidden: head(hidden) @ head.module.weight, "tensor of shape (6, 4) outside of its submodules"),
        (lambda head, hidden: (head(hidden), hidden), "more than one tensor"),
        (lambda head, hidden: torch.zeros(1, 3, 6), "more than one tensor"),
    ],
    ids=[
        "sums",
        "rows",
        "draws",
        "few draws",
        "no gradients",
        "autocast",
        "length",
        "values",
        "a weight",
        "two outputs",
        "no output",
    ],
)
def test_what_is_no_tail_is_refused(forward, told):
    error = error_of(steps_of, forward)

    assert isinstance(error, PenstockError)
    assert told in str(error)
    assert "the end of the model cannot be applied to some positions at a time" in str(error)


def test_an_end_that_does_something_else_with_a_batch_is_refused():
    error = error_of(steps_of, lambda head, hidden: head(hidden), lambda head, hidden: head(hidden) * 2)

    assert "it computes with the mask or the positions of the batch" in str(error)


def test_an_example_has_its_positions_also_where_there_are_fewer():
    assert torch.equal(example_of(HIDDEN[:, :1]), HIDDEN[:, :1].expand(1, NUM_PROBED, 4))
    assert torch.equal(example_of(values(1, 1, 9, 4)), values(1, 1, 9, 4)[:, :NUM_PROBED])
    assert TailSteps((), 0).run({}, HIDDEN) is HIDDEN
