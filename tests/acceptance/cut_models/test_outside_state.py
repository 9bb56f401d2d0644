"""State outside of modules that a forward changes around its points is refused by name; what is only read is right."""

import sys
from collections import deque

import pytest
import torch

import penstock as ps
from tests.support import numbers_of_files
from tests.support.cut_cases import (
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    Chain,
    Stateful,
    assert_refused,
    assert_right,
    batch,
    call_of,
)
from tests.support.local_pipelines import square_loss

on_both = pytest.mark.parametrize("num_ranks", [1, 2])
counted, seen, scale = 0, deque([1]), 2.0


class GlobalNumber(Stateful):
    def advance(self, rows):
        global counted
        counted += 1

    def factor(self):
        return counted


class GlobalContainer(Stateful):
    def advance(self, rows):
        seen.append(1)

    def factor(self):
        return len(seen)


class OfAnotherFile(Stateful):
    def advance(self, rows):
        numbers_of_files.calls += 1

    def factor(self):
        return numbers_of_files.calls


class ClassNumber(Stateful):
    calls = 0

    def advance(self, rows):
        type(self).calls += 1

    def factor(self):
        return self.calls


class ClassTable(Stateful):
    table = {"lengths": []}  # noqa: RUF012

    def advance(self, rows):
        self.table["lengths"].append(rows.shape[1])

    def factor(self):
        return len(self.table["lengths"])


def add_to(lengths=[]):  # noqa: B006
    lengths.append(1)
    return len(lengths)


class DefaultArgument(Stateful):
    def advance(self, rows): ...

    def factor(self):
        return add_to()


def factor_of_function():
    factor_of_function.calls += 1
    return factor_of_function.calls


factor_of_function.calls = 0


class FunctionAttribute(DefaultArgument):
    def factor(self):
        return factor_of_function()


def counter():
    number = 0

    def advance():
        nonlocal number
        number += 1
        return number

    return advance


next_number = counter()


class OuterVariable(DefaultArgument):
    def factor(self):
        return next_number()


class Helper:
    """A class that is no module."""

    calls = 0

    @classmethod
    def factor(cls):
        cls.calls += 1
        return cls.calls


class ClassMethod(DefaultArgument):
    def factor(self):
        return Helper().factor()


class InHook(Chain):
    def build(self):
        self.register_forward_pre_hook(lambda module, args: seen.append(1))


@on_both
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (GlobalNumber, r"global variable \S+\.counted"),
        (GlobalContainer, r"global variable \S+\.seen"),
        (OfAnotherFile, r"global variable \S+\.calls"),
        (ClassNumber, r"class variable ClassNumber\.calls"),
        (ClassTable, r"class variable ClassTable\.table"),
        (DefaultArgument, r"default argument of add_to\(\)"),
        (FunctionAttribute, r"attribute factor_of_function\.calls"),
        (OuterVariable, r"variable 'number' around counter"),
        (ClassMethod, r"class variable Helper\.calls"),
        (InHook, r"global variable \S+\.seen"),
    ],
)
def test_a_variable_that_the_forward_changes_is_refused(kind, match, num_ranks):
    assert_refused(kind, match=match, num_ranks=num_ranks)


class Scaled(Chain):
    def call(self, block, number, hidden):
        return block(hidden, scale)


def test_a_variable_that_the_owner_changes_holds_from_the_next_step_on():
    model = Scaled().double()
    pipeline = ps.Pipeline(ps.cut(model, ["blocks.*"]), "1f1b", 2, square_loss, ranks=1)
    rows, target = batch()["rows"], torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    for value in (2.0, 3.0, 0.5):
        sys.modules[__name__].scale = value
        result = pipeline.step(rows=rows, target=target)
        expected = sum(square_loss(model(part), target[: ROWS // 2]) for part in rows.chunk(2)) / 2
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=0)


class Buffered(Chain):
    def build(self):
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)
        self.kept = [torch.ones(WIDTH, dtype=torch.float64)]

    def call(self, block, number, hidden):
        return block(hidden, self.shift * self.kept[0])


def change_data(model):
    model.shift.data.mul_(1.5)


def replace_data(model):
    model.shift.data = torch.full((WIDTH,), 0.5, dtype=torch.float64)


def change_listed_data(model):
    model.kept[0].data.add_(1)


@on_both
@pytest.mark.parametrize("change", [change_data, replace_data, change_listed_data])
def test_a_tensor_that_the_owner_changes_by_its_data_holds_from_the_next_step_on(change, num_ranks):
    assert_right(Buffered, call_of(batch(1)), call_of(batch(1), change=change), call_of(batch(1)), num_ranks=num_ranks)


class AskingType(Chain):
    def call(self, block, number, hidden):
        return block(hidden) * (2 if type(block) is Block else 1)


class AskingOtherWay(Chain):
    def call(self, block, number, hidden):
        return block(hidden) * (2 if Block is not type(block) else 1)


class AskingStored(Chain):
    def build(self):
        self.kind = Block

    def call(self, block, number, hidden):
        return block(hidden) * (2 if type(block) is self.kind else 1)


@on_both
@pytest.mark.parametrize("kind", [AskingType, AskingOtherWay, AskingStored])
def test_a_forward_that_asks_for_the_very_type_of_a_block_is_refused(kind, num_ranks):
    assert_refused(kind, match=r"call\(\) asks '.*type\(block\).*isinstance", num_ranks=num_ranks)


class AskingPlain(Chain):
    def call(self, block, number, hidden):
        hidden = block(hidden) if type(number) is int else hidden
        return hidden if type(block) == Block and type(hidden) is torch.Tensor else hidden * 2  # noqa: E721


class OfOneType(Chain):
    def call(self, block, number, hidden):
        return block(hidden) * (2 if type(block) is type(self.blocks[0]) else 1)


@on_both
@pytest.mark.parametrize("kind", [AskingPlain, OfOneType])
def test_other_questions_for_types_are_right(kind, num_ranks):
    assert_right(kind, num_ranks=num_ranks)
