"""Plain numbers keep their type, to the bit, and may change; all else that is plain must stay equal."""

import math
from dataclasses import replace

import pytest
import torch

from penstock.execute.plain_numbers import PlainNumbers, is_alike
from penstock.execute.tree import Layout, TensorInfo, flatten

INFO = TensorInfo((2, 3), torch.float32, requires_grad=False)


def layout_of(*leaves):
    return Layout(flatten(tuple(range(len(leaves))))[1], tuple(leaves))


def test_numbers_come_back_with_their_types_and_everything_else_as_agreed():
    agreed = layout_of(True, INFO, 7, "text", 0.5, 2**63)
    leaves = [False, torch.zeros(2, 3), -(2**63), "text", math.nan, 2**63]
    numbers = PlainNumbers.of(agreed)

    written = numbers.written(leaves)
    found = numbers.read(agreed, written).leaves

    assert written.numel() == numbers.num_bytes
    assert found[:4] == (False, INFO, -(2**63), "text")
    assert math.isnan(found[4])
    assert found[5] == 2**63
    assert [type(leaf) for leaf in found] == [bool, TensorInfo, int, str, float, int]


@pytest.mark.parametrize("number", [0.1, -0.0, math.inf, 5e-324])
def test_a_float_arrives_bit_for_bit(number):
    agreed = layout_of(1.0)
    numbers = PlainNumbers.of(agreed)

    (found,) = numbers.read(agreed, numbers.written([number])).leaves

    assert found.hex() == number.hex()


def test_a_tree_without_numbers_has_none():
    assert PlainNumbers.of(layout_of(INFO, "text", 2**64)) is None


@pytest.mark.parametrize(
    ("leaf", "agreed", "is_right"),
    [
        (2, 1, True),
        (math.nan, 0.5, True),
        (math.nan, math.nan, True),
        (False, True, True),
        (1, True, False),
        (1.0, 1, False),
        (2**63, 1, False),
        (2**63, 2**63, True),
        (2**63, 2**64, False),
        ("a", "a", True),
        ("b", "a", False),
        (INFO, INFO, True),
        (replace(INFO, requires_grad=True), INFO, False),
        (1, INFO, False),
        (INFO, 1, False),
        (INFO, "a", False),
        (object(), object(), True),
        ([], object(), False),
    ],
)
def test_numbers_may_change_and_keep_their_types_and_all_else_stays(leaf, agreed, is_right):
    assert is_alike(layout_of(leaf), layout_of(agreed)) is is_right


def test_trees_of_other_forms_are_not_alike():
    assert not is_alike(layout_of(1, 2), layout_of(1))
