"""A reader takes one step's microbatches off a stream and holds the later ones to the first."""

import warnings

import pytest
import torch

from penstock.errors import PenstockWarning, PipelineError
from penstock.execute.batch.slices import BatchRule
from penstock.execute.batch.stream import Stream
from penstock.execute.batch.stream_reader import Reader, StreamRules
from penstock.ir.timeline import DataWait


def item(rows, length=4):
    return torch.zeros(rows, length), torch.zeros(rows, length)


def reader_of(items, *, rule=None, read=lambda: 0.0, **rules):
    reader = Reader(Stream(items), 1, rule or BatchRule(len(items)), StreamRules(**rules), read=read)
    reader.begin()
    return reader


def test_microbatches_come_numbered_and_cut():
    reader = reader_of([item(2)] * 3, rule=BatchRule(3, num_slices=2))

    taken = [reader.next(index) for index in range(3)]

    assert [[(each.index, each.slice, each.size, each.length) for each in slices] for slices in taken] == [
        [(index, 0, 2, 2), (index, 1, 2, 2)] for index in range(3)
    ]


@pytest.mark.parametrize(
    ("second", "rules", "text"),
    [
        (item(3), {}, r"variable_shapes=True and reduction='sum': a mean needs all sizes"),
        (item(3), {"is_sum": True}, r"create the pipeline with variable_shapes=True$"),
        (item(2, 5), {}, r"create the pipeline with variable_shapes=True$"),
        (item(3), {"has_variable_shapes": True}, r"has 3 rows, microbatch 0 of the step had 2 rows"),
    ],
)
def test_a_microbatch_that_is_not_like_the_first_is_an_error_with_the_way_out(second, rules, text):
    reader = reader_of([item(2), second], **rules)
    reader.next(0)

    with pytest.raises(PipelineError, match=text):
        reader.next(1)


def test_slices_of_a_mean_must_be_as_long_as_those_of_the_first():
    reader = reader_of([item(2), item(2, 6)], rule=BatchRule(2, num_slices=2), has_variable_shapes=True)
    reader.next(0)

    with pytest.raises(PipelineError, match=r"2 rows in slices of \[3, 3\], .* 2 rows in slices of \[2, 2\]"):
        reader.next(1)


@pytest.mark.parametrize(
    ("second", "rules"), [(item(2, 5), {}), (item(3), {"is_sum": True}), (item(1, 1), {"is_sum": True})]
)
def test_shapes_that_may_vary_do(second, rules):
    reader = reader_of([item(2), second], has_variable_shapes=True, **rules)

    assert [reader.next(index)[0].args[0].shape for index in range(2)] == [(2, 4), second[0].shape]


def test_only_the_first_slow_pull_of_a_step_is_warned_of():
    moments = iter([0.0, 0.0, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0])  # begin, got, ready of each of three pulls
    reader = reader_of([item(2)] * 3, read=lambda: next(moments), warn_s=0.9)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for index in range(3):
            reader.next(index)

    (warning,) = found
    assert warning.category is PenstockWarning
    assert "rank 1 waited 500 ms for the data of microbatch 1 and prepared them for 500 ms" in str(warning.message)


def test_every_wait_is_noted_with_its_microbatch_when_it_was():
    moments = iter([0.0, 0.25, 0.5, 1.0, 1.5, 2.0])  # begin, got, ready of each of two pulls
    reader = reader_of([item(2)] * 2, read=lambda: next(moments))
    assert reader.waits == [DataWait(1, 0, 0.0, 0.5)]

    for index in range(2):
        reader.next(index)

    assert reader.waits == [DataWait(1, 0, 0.0, 0.5), DataWait(1, 1, 1.0, 2.0)]


def test_a_wait_of_a_step_that_was_refused_is_none_of_the_next_one():
    stream = Stream([item(2)] * 2)
    readers = [Reader(stream, 1, BatchRule(2), StreamRules(), read=lambda: 0.0) for _ in range(2)]
    readers[0].begin()
    stream.undo_begin()

    readers[1].begin()
    for index in range(2):
        readers[1].next(index)

    assert [wait.microbatch for wait in readers[0].waits] == [0]
    assert [wait.microbatch for wait in readers[1].waits] == [1]


def test_a_count_is_refused_before_anything_is_pulled():
    reader = Reader(Stream([]), 0, BatchRule(1), StreamRules(has_count=True), read=lambda: 0.0)

    with pytest.raises(PipelineError, match="count weighs microbatches by their targets"):
        reader.begin()
