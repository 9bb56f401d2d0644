"""Tensors are found in objects that a batch cannot be cut through, and nothing of these objects is run."""

from collections import UserDict, UserList
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from penstock.execute.batch.holders import rows_within

ROWS = torch.ones(5, 3)
BIAS = torch.ones(7)


class Plain:
    """An object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def rows(self):
        """Return nothing; a method is bound to its object."""


class Slotted:
    """An object with slots, one of which is private and one empty."""

    __slots__ = ("__hidden", "empty")

    def __init__(self, value):
        self.__hidden = value


class Lazy(Mapping):
    """A mapping that runs code for its entries, and a property that does."""

    def __getitem__(self, key):
        raise AssertionError("an entry was read")

    def __iter__(self):
        raise AssertionError("the entries were listed")

    def __len__(self):
        raise AssertionError("the entries were counted")

    @property
    def mask(self):
        raise AssertionError("a property was read")


class Guarded:
    """An object that has no attributes but slots, and minds being asked for others."""

    __slots__ = ("mask",)

    def __getattr__(self, name):
        raise AssertionError("an attribute was asked for")


def closing_over(value):
    return lambda score, row: score + value[row]


def reading_its_module(score, row):
    return score + BIAS[row] + nn.functional.relu(score)


def closing_over_nothing_yet():
    def function():
        return late

    if False:
        late = 1
    return function


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (ROWS.numpy(), ""),
        (Plain(mask=ROWS), ".mask"),
        (Plain(batch=Plain(parts=[1, {"mask": (ROWS,)}])), None),
        (Plain(parts=[1, {"mask": ROWS}]), ".parts[1]['mask']"),
        (Slotted(ROWS), "._Slotted__hidden"),
        (UserDict({(1, 2): ROWS}), ".data[(1, 2)]"),
        (UserList([0, ROWS]), ".data[1]"),
        (MappingProxyType({"mask": ROWS}), "['mask']"),
        ({"never": {ROWS}}["never"], "[0]"),
        (closing_over(ROWS), " reading value"),
        (partial(print, ROWS), ".args[0]"),
        (Plain(mask=ROWS).rows, ".__self__.mask"),
        (torch.distributions.Normal(ROWS, 1.0), ".loc"),
    ],
)
def test_the_way_to_a_tensor_is_what_python_would_write(value, way):
    assert rows_within(value, 0).get(5) == way


def test_the_nearest_tensor_of_each_length_is_found_along_the_dimension():
    value = Plain(deep=Plain(mask=ROWS, table=torch.ones(2, 4)), mask=ROWS, scalar=torch.tensor(1.0))

    assert rows_within(value, 0) == {5: ".mask", 2: ".deep.table"}
    assert rows_within(value, -1) == {3: ".mask", 4: ".deep.table"}
    assert rows_within(value, 2) == {}


def test_a_tensor_that_a_function_reads_from_its_module_is_found_and_nothing_is_run():
    assert rows_within(reading_its_module, 0) == {7: " reading BIAS"}
    module = nn.Linear(3, 5)
    of_model_or_library = Plain(module=module, parameter=nn.Parameter(ROWS), library=torch, kind=Slotted)
    for value in (Lazy(), closing_over_nothing_yet(), Guarded(), of_model_or_library, module.forward):
        assert rows_within(value, 0) == {}


def test_an_object_within_itself_and_one_of_many_entries_end_the_search():
    value = Plain(entries=[object() for _ in range(5000)])
    value.value = value
    late = Plain(names=["a"] * 5000, inner=Plain(inner=Plain(mask=ROWS)))

    assert rows_within(value, 0) == {}
    assert rows_within(late, 0) == {5: ".inner.inner.mask"}
    assert rows_within([np.zeros(1)] * 10, 0) == {1: "[0]"}
