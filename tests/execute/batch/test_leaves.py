"""A value is cut along its dimension, into pieces that autograd takes for tensors of their own."""

import torch

from penstock.execute.batch.microbatch import BatchSpec, Split
from tests.execute.batch.test_cutting import split_batch
from tests.execute.batch.test_microbatch import rows


def test_pieces_are_views():
    x = rows(4, 2)

    parts = split_batch((x,), {}, None, num_microbatches=2)
    x.add_(100)

    assert parts[1].args[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(parts[1].args[0], x[2:])


def test_a_piece_that_is_changed_in_place_leaves_the_others_as_they_were_to_autograd():
    first, second = split_batch((rows(4, 2),), {}, None, num_microbatches=2)
    weight = torch.ones(2, requires_grad=True)
    product = (first.args[0] * weight).sum()

    second.args[0].mul_(3.0)
    product.backward()  # needs the first piece as it was

    assert weight.grad.tolist() == [1.0, 1.0]


def test_negative_dimensions_count_from_the_end():
    parts = split_batch((rows(4, 3).T,), {}, None, num_microbatches=2, specs=BatchSpec(args=Split(-1)))

    assert [tuple(part.args[0].shape) for part in parts] == [(3, 2), (3, 2)]
