"""Every way in which tensors of ranks may differ from those of the unsplit model."""

from math import inf, nan

import pytest
import torch

from penstock.verifying.comparing import compare, error_between, largest_of, tolerance_of
from penstock.verifying.observation import BUFFER, GRADIENT, OUTPUT, PARAMETER, START, TRAINING, Observation

ONE = torch.ones(2)


def compared(kind, whole, *ranks, start=None):
    observations = [
        Observation(START, 0, {kind: start or {}} if start else {}),
        Observation(TRAINING, 0, {kind: whole}),
    ]
    sides = [[Observation(START, 0, {}), Observation(TRAINING, 0, {kind: rank} if rank else {})] for rank in ranks]
    _, differences = compare(observations, sides, 1e-6)
    return [(item.name, item.error, item.problem) for item in differences if item.mode == TRAINING]


def test_equal_tensors_on_several_ranks():
    assert compared(GRADIENT, {"a.w": ONE, "b.w": None}, {"a.w": ONE.clone()}, {"b.w": None, "a.w": ONE}) == []


def test_a_difference_is_a_share_of_the_largest_of_its_kind():
    [(name, error, problem)] = compared(GRADIENT, {"a.w": ONE, "b.w": 4 * ONE}, {"a.w": ONE + 1, "b.w": 4 * ONE})

    assert (name, error, problem) == ("a.w", 0.25, "")


@pytest.mark.parametrize(
    ("whole", "rank", "problem"),
    [
        ({"a.w": ONE}, {"a.w": None}, "is missing"),
        ({"a.w": None}, {"a.w": ONE}, "is there, and the unsplit model has none"),
        ({"a.w": ONE}, {}, "no rank has the gradient"),
        ({}, {"a.w": ONE}, "the model has no parameter of this name"),
        ({"a.w": ONE}, {"a.w": torch.ones(3)}, "is of shape (3,) float32, in the unsplit model (2,) float32"),
        ({"a.w": ONE}, {"a.w": ONE.double()}, "is of shape (2,) float64, in the unsplit model (2,) float32"),
        ({"a.w": ONE}, {"a.w": ONE * nan}, "is not finite at other places than in the unsplit model"),
        ({"a.w": ONE.int()}, {"a.w": 2 * ONE.int()}, "has other values"),
    ],
)
def test_what_is_no_number(whole, rank, problem):
    assert compared(GRADIENT, whole, rank) == [("a.w", inf, problem)]


def test_the_worst_rank_counts():
    assert compared(GRADIENT, {"a.w": ONE}, {"a.w": ONE}, {"a.w": ONE * 2})[0][1] == 1.0


def test_a_buffer_that_nobody_has_matters_only_where_the_model_changes_it():
    assert compared(BUFFER, {"a.b": ONE}, {}, start={"a.b": ONE}) == []
    assert compared(BUFFER, {"a.b": ONE}, {}, start={"a.b": 2 * ONE}) == [("a.b", inf, "no rank has the buffer")]
    assert compared(BUFFER, {"unsaved": ONE}, {}) == []
    assert compared(BUFFER, {"unsaved": ONE}, {"unsaved": 2 * ONE}) == [("unsaved", 1.0, "")]
    assert compared(BUFFER, {}, {"own": ONE}) == []


def test_owners_are_modules_and_outputs_have_none():
    sides = [Observation(START, 0, {PARAMETER: {"a.b.w": ONE}, OUTPUT: {"output.x": ONE}})]
    other = [Observation(START, 0, {PARAMETER: {"a.b.w": 2 * ONE}, OUTPUT: {"output.x": 2 * ONE}})]

    comparisons, differences = compare(sides, [other], 1e-6)

    assert [item.module for item in differences] == ["a.b", ""]
    assert [(item.num_tensors, item.error) for item in comparisons] == [(1, 1.0), (1, 1.0)]


def test_values_that_are_not_finite_at_the_same_places_are_equal():
    values = torch.tensor([1.0, inf, nan])

    assert error_between(values, values.clone() + torch.tensor([0.5, 0, 0]), 2.0) == (0.25, "")
    assert error_between(torch.zeros(2), ONE, 0.0) == (inf, "")
    assert largest_of(values) == 1.0
    assert largest_of(torch.tensor([nan])) == 0.0
    assert largest_of(torch.tensor([3 + 4j])) == 5.0


def test_the_lowest_precision_decides():
    both = {"a": ONE, "b": ONE.bfloat16()}

    assert tolerance_of(both, is_transformers=False) > tolerance_of({"a": ONE}, is_transformers=False) > 1e-12
    assert tolerance_of({"a": ONE.double()}, is_transformers=False) == 1e-12
    assert tolerance_of({"a": ONE.double()}, is_transformers=True) == 1e-5
    assert tolerance_of({}, is_transformers=False) == 1e-5
