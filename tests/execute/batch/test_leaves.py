"""A value is cut along its dimension, into pieces that autograd takes for tensors of their own."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from penstock.errors import PipelineError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.leaves import marking
from penstock.execute.batch.microbatch import BatchSpec, Replicate, Split
from tests.execute.batch.test_cutting import split_batch
from tests.execute.batch.test_microbatch import rows
from tests.execute.values.test_block_masks import ROWS, mask_of
from tests.support.local_pipelines import error_of

OLD_TORCH = "dq_kv_order" not in BlockMask.__annotations__


def test_pieces_are_views_of_which_a_change_in_place_leaves_the_others_as_they_were_to_autograd():
    x = rows(4, 2)
    first, second = split_batch((x,), {}, None, num_microbatches=2)
    assert second.args[0].data_ptr() == x[2:].data_ptr()
    from_the_end = split_batch((x.T,), {}, None, num_microbatches=2, specs=BatchSpec(args=Split(-1)))
    assert [tuple(part.args[0].shape) for part in from_the_end] == [(2, 2), (2, 2)]
    weight = torch.ones(2, requires_grad=True)
    product = (first.args[0] * weight).sum()

    second.args[0].mul_(3.0)
    product.backward()  # needs the first piece as it was

    assert weight.grad.tolist() == [1.0, 1.0]


def test_a_backward_of_one_piece_calls_no_hook_of_another():
    x = rows(6, 2).requires_grad_()
    pieces = [part.args[0] for part in split_batch((x,), {}, None, num_microbatches=3)]
    gradients = [[], [], []]
    for piece, seen in zip(pieces, gradients, strict=True):
        piece.register_hook(seen.append)

    (3.0 * pieces[1]).sum().backward()

    assert [len(seen) for seen in gradients] == [0, 1, 0]
    assert x.grad.tolist() == [[0.0, 0.0]] * 2 + [[3.0, 3.0]] * 2 + [[0.0, 0.0]] * 2


def test_a_block_mask_of_other_rows_is_refused_and_one_for_any_row_or_that_is_marked_goes_whole():
    causal, mask = mask_of(None, lambda row, head, query, key: query >= key), mask_of(2)
    batch, marked = {"causal": causal, "mask": mask}, BatchSpec(kwargs={"mask": Replicate()})

    parts = split_batch((rows(6),), batch, None, num_microbatches=3, specs=marked)
    error = error_of(split_batch, (rows(12),), {"mask": mask_of()}, None, num_microbatches=3)

    assert all(part.kwargs["causal"] is causal and part.kwargs["mask"] is mask for part in parts)
    assert isinstance(error, PipelineError)
    assert "args[0] (shape (12,), split on dim 0) has 12 rows, but kwargs['mask'] (a BlockMask) has 6" in str(error)
    assert "ps.PreSplit([...]) of one BlockMask for each microbatch" in str(error)


def test_a_block_mask_is_not_cut_along_the_sequence():
    (microbatch,) = split_batch((rows(2, 8),), {"mask": mask_of(2)}, None, num_microbatches=1)
    marked = BatchSpec(kwargs={"mask": Replicate()})

    with pytest.raises(PipelineError, match=r"kwargs\['mask'\] is a BlockMask, which cannot be cut along the sequence"):
        BatchRule(1, num_slices=2).slices(microbatch)
    slices = BatchRule(1, num_slices=2, slice_specs=marked).slices(microbatch)

    assert all(part.kwargs["mask"] is microbatch.kwargs["mask"] for part in slices)


def special_mask():
    mask = mask_of()
    mask.dq_kv_order = torch.zeros(ROWS, 1, 2, dtype=torch.int32)
    return mask


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(ROWS).to_sparse(),
        lambda: torch.eye(ROWS).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)] * ROWS),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)] * ROWS, layout=torch.jagged),
        pytest.param(special_mask, marks=pytest.mark.skipif(OLD_TORCH, reason="masks have no order before torch 2.13")),
    ],
)
def test_what_torch_cannot_cut_is_refused_by_name(make):
    with pytest.raises(PipelineError, match=r"kwargs\['mask'\] cannot be cut by torch .*ps.PreSplit"):
        split_batch((rows(ROWS),), {"mask": make()}, None, num_microbatches=2)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("target", "target=ps.Replicate()"),
        ("args[1]", "args={1: ps.Replicate()}"),
        ("kwargs['images']", "kwargs={'images': ps.Replicate()}"),
        ("kwargs['a'][0].x", "kwargs={'a': {0: {'x': ps.Replicate()}}}"),
        ("target.labels", "target={'labels': ps.Replicate()}"),
    ],
)
def test_a_place_is_marked_by_specs_that_fit_it(place, text):
    assert marking(place) == f"specs=ps.BatchSpec({text})"
