"""All values of a batch agree on the rows of each microbatch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import BatchSpec, PreSplit, Replicate, merge_outputs
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
        with pytest.raises(PipelineError, match=f"at most {num_rows} microbatches"):
            split_batch((x,), {}, None, num_microbatches=num_microbatches, allow_ragged=True)
        return

    parts = split_batch((x,), {}, None, num_microbatches=num_microbatches, allow_ragged=True)

    sizes = [part.size for part in parts]
    assert sizes == [len(piece) for piece in x.tensor_split(num_microbatches)]
    assert min(sizes) >= 1
    assert torch.equal(merge_outputs([part.args[0] for part in parts]), x)


def test_presplit_parts_decide_the_sizes_of_whole_tensors():
    parts = split_batch((PreSplit([rows(3), rows(1)]),), {}, rows(4), num_microbatches=2)

    assert [part.target.tolist() for part in parts] == [[0.0, 1.0, 2.0], [3.0]]


def test_a_presplit_marked_replicate_counts_no_rows():
    lengths = PreSplit([rows(5), rows(9)])

    parts = split_batch((rows(4), lengths), {}, None, num_microbatches=2, specs=BatchSpec(args=(None, Replicate())))

    assert [part.size for part in parts] == [2, 2]
    assert [len(part.args[1]) for part in parts] == [5, 9]
