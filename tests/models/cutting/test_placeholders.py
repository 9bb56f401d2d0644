"""Values that are not there: their kind is right, and what is computed from them shows."""

import torch
from torch import nn

from penstock.models.cutting.placeholders import (
    Placeholder,
    is_bare,
    on_meta,
    without_values,
)

CPU = torch.device("cpu")


def test_a_tensor_without_values_has_the_memory_of_one_number():
    bare = without_values(torch.ones(300, 200, dtype=torch.bfloat16, device="meta"), CPU)

    assert bare.shape == (300, 200)
    assert bare.dtype == torch.bfloat16
    assert bare.untyped_storage().nbytes() == 2
    assert is_bare(bare)
    assert not is_bare(torch.ones(3))
    assert not is_bare((bare,))


def test_a_copy_on_the_meta_device_leaves_the_module_and_its_ties_as_they_are():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight

    copied = on_meta(module)

    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert copied[1].weight is copied[0].weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_what_a_module_would_return_is_asked_once_for_each_kind_of_input():
    calls = []

    class Counted(nn.Linear):
        def forward(self, features):
            calls.append(features.shape)
            return super().forward(features), features.shape[0]

    like = Placeholder(on_meta(Counted(3, 4)))
    for rows in (2, 2, 5):
        returned, number = like.of((torch.ones(rows, 3),), {})
        assert returned.shape == (rows, 4)
        assert returned.is_meta
        assert number == rows
    assert len(calls) == 2


def test_a_module_that_keeps_the_kind_of_its_input_is_known_by_it():
    like = Placeholder(nn.Identity())
    first = torch.ones(2, 3)

    assert not like.returns_kind_of(first)
    like.note_kind(first, first)
    assert like.returns_kind_of(torch.zeros(2, 3))
    assert not like.returns_kind_of(torch.zeros(2, 3, dtype=torch.float64))
    like.note_kind(torch.ones(4), torch.ones(5))
    assert not like.returns_kind_of(torch.ones(4))
