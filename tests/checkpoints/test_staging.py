"""Copies from which files are written while training goes on."""

import torch

from penstock.checkpoints.local_tensors import LocalTensor
from penstock.checkpoints.staging import Staging


def held(tensor):
    return LocalTensor(tensor, tuple(tensor.shape))


def test_later_changes_do_not_reach_the_copy():
    tensor = torch.arange(6.0).reshape(2, 3).t()

    copied = Staging().copy({"part": {"name": held(tensor)}})["part"]["name"]
    expected = tensor.clone()
    tensor.zero_()

    assert torch.equal(copied, expected)
    assert copied.is_contiguous()


def test_the_same_memory_is_used_again():
    staging = Staging()
    first = staging.copy({"part": {"a": held(torch.zeros(3)), "b": held(torch.zeros(2))}})["part"]

    second = staging.copy({"part": {"a": held(torch.ones(3)), "b": held(torch.ones(4))}})["part"]

    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["b"].tolist() == [1.0] * 4
    assert staging.num_bytes == 7 * 4
    staging.copy({})
    assert staging.num_bytes == 0
