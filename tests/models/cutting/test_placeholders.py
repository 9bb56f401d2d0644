"""Values that are not there: their kind and their graph are right."""

import torch
from torch import nn

from penstock.models.cutting.placeholders import Placeholder, copied, on_meta, without_values


def output(placeholder, *args, **kwargs):
    return placeholder.output("__call__", args, kwargs, is_training=True)


def test_a_copy_on_the_meta_device_leaves_the_module_and_its_ties_as_they_are():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight

    bare_module = on_meta(module)

    assert all(tensor.is_meta for tensor in (*bare_module.parameters(), *bare_module.buffers()))
    assert bare_module[1].weight is bare_module[0].weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_a_tensor_without_values_has_the_strides_and_a_graph_of_its_own():
    bare = without_values(torch.ones(3, 2, requires_grad=True).T)

    assert bare.is_meta
    assert bare.stride() == (1, 2)
    assert bare.requires_grad
    assert not bare.is_leaf
    assert not without_values(torch.ones(3)).requires_grad


class Counted(nn.Linear):
    calls = 0

    def forward(self, features, twice=False):
        type(self).calls += 1
        return super().forward(features).detach() if twice else super().forward(features), features.shape[0]


def test_what_a_module_would_return_is_asked_once_for_each_kind_of_input():
    module = Counted(3, 4)
    placeholder = Placeholder("inner", module)
    for rows, twice in ((2, False), (2, False), (5, False), (5, True)):
        returned, number = output(placeholder, torch.ones(rows, 3), twice=twice)
        assert returned.shape == (rows, 4)
        assert returned.is_meta
        assert returned.requires_grad is not twice
        assert number == rows
    assert Counted.calls == 3
    module.requires_grad_(False)
    assert not output(placeholder, torch.ones(2, 3))[0].requires_grad


def test_a_module_that_decides_by_values_runs_on_zeros_with_the_integers_of_the_batch():
    class Selecting(nn.Linear):
        def forward(self, features, kept):
            return super().forward(features[: int(kept.sum())])

    placeholder = Placeholder("inner", Selecting(3, 4))
    for kept in (torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])):
        assert output(placeholder, torch.ones(3, 3), kept).shape == (int(kept.sum()), 4)


def test_an_input_that_a_module_returns_as_it_is_stays_the_same_object():
    features = torch.ones(2, 3)
    assert output(Placeholder("inner", nn.Identity()), features) is features


def test_copies_leave_tensors_and_objects_alone():
    value = {"a": torch.ones(2, requires_grad=True) * 2, "b": [{1}]}
    twin = copied(value)
    twin["a"].zero_()
    twin["b"][0].add(2)
    assert value["a"].sum() == 4
    assert value["b"] == [{1}]


def test_a_block_that_decides_by_values_is_asked_once_where_it_returns_what_is_like_its_input():
    class Routed(nn.Linear):
        calls = 0

        def forward(self, features, kept):
            type(self).calls += 1
            return super().forward(features) * int(kept.sum())

    placeholder = Placeholder("blocks.0", Routed(3, 3), is_point=True)
    features = torch.ones(2, 3)
    for kept in (torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0])):
        returned = output(placeholder, features, kept)
        assert returned.shape == (2, 3)
        assert returned.requires_grad
    assert Routed.calls == 2, "once on the meta device, and once on zeros"
