"""All values of a batch agree on the rows of each microbatch."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import BatchSpec, PreSplit, Replicate, merge_outputs
from penstock.execute.values.tree import tensors_of
from tests.execute.batch.test_cutting import split_batch
from tests.execute.batch.test_microbatch import rows


def test_an_unbatched_mask_is_caught_and_not_cut():
    with pytest.raises(PipelineError) as caught:
        split_batch((rows(8, 16),), {"mask": [None, rows(16, 16)]}, None, num_microbatches=4)

    message = str(caught.value)
    assert "args[0] (shape (8, 16), split on dim 0) has 8 rows" in message
    assert "kwargs['mask'][1] (shape (16, 16), split on dim 0) has 16 rows" in message
    assert "Replicate()" in message


@pytest.mark.feature("0.8", "F5")
def test_rows_that_do_not_divide_are_an_error_with_every_way_out():
    with pytest.raises(PipelineError) as caught:
        split_batch((), {"mask": [1, rows(10, 3)]}, None, num_microbatches=4)

    message = str(caught.value)
    assert "kwargs['mask'][1] (shape (10, 3), split on dim 0) has 10 rows, which 4 microbatches" in message
    assert "8 or 12 rows" in message
    assert "one of 1, 2, 5, 10 microbatches" in message
    assert "allow_ragged=True" in message
    assert "Replicate()" in message


@given(st.integers(1, 40), st.integers(1, 12))
def test_ragged_microbatches_are_never_empty_and_differ_by_one_row(num_rows, num_microbatches):
    x = rows(num_rows)
    if num_rows < num_microbatches:
        with pytest.raises(PipelineError, match="expected at least one row each\\. Pass more"):
            split_batch((x,), {}, None, num_microbatches=num_microbatches, allow_ragged=True)
        return

    parts = split_batch((x,), {}, None, num_microbatches=num_microbatches, allow_ragged=True)

    sizes = [part.size for part in parts]
    assert sizes == [len(piece) for piece in x.tensor_split(num_microbatches)]
    assert min(sizes) >= 1
    assert torch.equal(merge_outputs([part.args[0] for part in parts]), x)


def test_a_presplit_decides_where_there_is_no_input_with_rows_before_it_and_it_has_some():
    parts = split_batch((), {"mask": rows(4)}, {"y": PreSplit([rows(3), rows(1)])}, num_microbatches=2)

    assert [part.size for part in parts] == [3, 1]
    assert [part.kwargs["mask"].tolist() for part in parts] == [[0.0, 1.0, 2.0], [3.0]]
    behind = split_batch((2.0, None, PreSplit([rows(3), rows(1)])), {"mask": rows(4)}, None, num_microbatches=2)
    assert [len(part.kwargs["mask"]) for part in behind] == [3, 1]  # values without rows come before it
    keywords = {"step": PreSplit([3, 4]), "mask": PreSplit([None, rows(7)])}  # parts without tensors have no rows
    without = split_batch((rows(4),), keywords, None, num_microbatches=2)
    assert [(part.size, part.kwargs["step"]) for part in without] == [(2, 3), (2, 4)]


OTHERS = {
    "keyword": (lambda other: ((rows(8),), {"other": other}, None), BatchSpec(kwargs={"other": Replicate()})),
    "second input": (lambda other: ((rows(8), other), {}, None), BatchSpec(args=(None, Replicate()))),
    "target": (lambda other: ((rows(8),), {}, other), BatchSpec(target=Replicate())),
    "keyword beside a target": (lambda other: ((), {"other": other}, rows(8)), BatchSpec(kwargs=Replicate())),
    "keyword before a keyword": (
        lambda other: ((), {"other": other, "x": rows(8)}, None),
        BatchSpec(kwargs={"other": Replicate()}),
    ),
}
"""Batches of 8 rows with a `PreSplit` that decides nothing, and the specs by which its rows do not count."""


@pytest.mark.parametrize(("batch_with", "specs"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("sizes", [(3, 1, 2, 2), (3, 1, 2, 3)], ids=["as many rows", "more rows"])
def test_a_presplit_of_other_rows_is_refused_and_handed_out_where_it_is_marked(batch_with, specs, sizes):
    batch = batch_with(PreSplit([rows(size) for size in sizes]))

    with pytest.raises(PipelineError) as caught:
        split_batch(*batch, num_microbatches=4)
    parts = split_batch(*batch, num_microbatches=4, specs=specs)

    assert f"has parts of {sizes} rows, but" in str(caught.value)
    assert "(shape (8,), split on dim 0) has 8 rows, which are not cut into these" in str(caught.value)
    assert "as a PreSplit of as many" in str(caught.value)
    assert re.search(r"mark it by specs=ps.BatchSpec\(.*ps.Replicate\(\).*\): each microbatch still", str(caught.value))
    assert [part.size for part in parts] == [2] * 4
    lengths = [sorted(map(len, tensors_of((part.args, part.kwargs, part.target)))) for part in parts]
    assert lengths == [sorted([2, size]) for size in sizes]


@pytest.mark.parametrize("batch_with", [batch_with for batch_with, _ in OTHERS.values()], ids=OTHERS)
def test_a_presplit_of_the_rows_of_the_microbatches_may_stand_anywhere(batch_with):
    parts = split_batch(*batch_with(PreSplit(rows(8).split(2))), num_microbatches=4)
    ragged = split_batch(*batch_with(PreSplit(rows(8).split([3, 3, 2]))), num_microbatches=3, allow_ragged=True)

    assert [part.size for part in parts] == [2] * 4
    assert [part.size for part in ragged] == [3, 3, 2]


@pytest.mark.parametrize(
    ("inputs", "other", "told"),
    [
        (rows(3), PreSplit(rows(8).split(4)), r"has parts of .*has 3 rows, which are not cut into these"),
        (
            PreSplit([rows(2), rows(2)]),
            PreSplit([rows(5), rows(9)]),
            r"parts of \(2, 2\) rows, but kwargs\['images'\].*\(5, 9\).*BatchSpec\(args={0: ps.*{'images': ps",
        ),
    ],
)
def test_a_presplit_beside_rows_that_cannot_be_cut_alike_or_another_of_other_rows_is_refused(inputs, other, told):
    with pytest.raises(PipelineError, match=told):
        split_batch((inputs,), {"images": other}, None, num_microbatches=2)
