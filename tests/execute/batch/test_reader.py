"""A reader holds the later microbatches of a step to the first one, cuts them and times them."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.preprocessing import StreamContext
from penstock.execute.batch.reader import Reader, StreamRules
from penstock.execute.batch.stream import Stream


def context(number):
    """Of the first microbatch of a step."""
    return StreamContext(0, number, True, 0)


def item(rows, length=4):
    return torch.zeros(rows, length), torch.zeros(rows, length)


def reader_of(items, *, rule=None, read=lambda: 0.0, **rules):
    reader = Reader(
        Stream(items), 1, context(len(items)), rule or BatchRule(len(items)), StreamRules(**rules), read=read
    )
    reader.begin()
    return reader


def test_microbatches_come_numbered_and_cut():
    reader = reader_of([item(2)] * 3, rule=BatchRule(3, num_slices=2))

    taken = [reader.next(index) for index in range(3)]

    assert [[(each.index, each.slice, each.size, each.length) for each in slices] for _, slices in taken] == [
        [(index, 0, 2, 2), (index, 1, 2, 2)] for index in range(3)
    ]


@pytest.mark.parametrize(
    ("second", "rules", "text"),
    [
        (item(2, 6), {"num_slices": 2, "has_variable_shapes": True}, r"slices of \[3, 3\], .* of \[2, 2\]"),
        (item(3), {}, r"variable_shapes=True and reduction='sum': a mean needs all sizes"),
        (item(3), {"is_sum": True}, r"create the pipeline with variable_shapes=True$"),
        (item(2, 5), {}, r"create the pipeline with variable_shapes=True$"),
        (item(3), {"has_variable_shapes": True}, r"has 3 rows, microbatch 0 of the step had 2 rows"),
    ],
)
def test_a_microbatch_that_is_not_like_the_first_is_an_error_with_the_way_out(second, rules, text):
    num_slices = rules.get("num_slices", 1)
    rules = {name: value for name, value in rules.items() if name != "num_slices"}
    reader = reader_of([item(2), second], rule=BatchRule(2, num_slices=num_slices), **rules)
    reader.next(0)

    with pytest.raises(PipelineError, match=text):
        reader.next(1)


@pytest.mark.parametrize(
    ("second", "rules"), [(item(2, 5), {}), (item(3), {"is_sum": True}), (item(1, 1), {"is_sum": True})]
)
def test_shapes_that_may_vary_do(second, rules):
    reader = reader_of([item(2), second], has_variable_shapes=True, **rules)

    assert [reader.next(index)[0].args[0].shape for index in range(2)] == [(2, 4), second[0].shape]


def test_a_wait_of_a_step_that_was_refused_is_none_of_the_next_one():
    stream = Stream([item(2)] * 2)
    readers = [Reader(stream, 1, context(2), BatchRule(2), StreamRules(), read=lambda: 0.0) for _ in range(2)]
    readers[0].begin()
    stream.undo_begin()

    readers[1].begin()
    for index in range(2):
        readers[1].next(index)

    assert [wait.microbatch for wait in readers[1].waits] == [1]


def test_a_count_needs_all_targets_first():
    reader = Reader(Stream([item(1)]), 0, context(1), BatchRule(1), StreamRules(has_count=True), read=lambda: 0.0)

    with pytest.raises(PipelineError, match="count weighs microbatches by their targets"):
        reader.begin()  # before anything is pulled
