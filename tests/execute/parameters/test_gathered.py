"""A block has this replica's rows, and whole parameters while they are filled; modules hold the one or the other."""

import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.parameters.gathered import blocks_of, require_unchanged
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.execute.values.tensors import is_dtensor, local_part
from tests.support.local_pipelines import error_of, settle


def layers():
    return [settle(nn.Linear(3, 5), 1), nn.BatchNorm1d(5), settle(nn.Linear(5, 2, dtype=torch.float64), 2)]


def two_replicas():
    """Per replica, its modules and its blocks."""
    found = []
    for replica in range(2):
        modules = layers()
        found.append((modules, blocks_of(modules, mesh_without_groups("data", 2, replica))[0]))
    return found


def fill_all(replicas, of_replica):
    """Give one replica what a gather would."""
    for index, block in enumerate(replicas[of_replica][1]):
        block.fill(torch.cat([blocks[index].local_part for _, blocks in replicas]))


def held(modules):
    return [parameter for module in modules for parameter in module.parameters()]


def test_modules_hold_shards_then_whole_parameters_then_shards():
    before = layers()
    replicas = two_replicas()
    modules, blocks = replicas[1]
    shards = held(modules)
    assert all(map(is_dtensor, shards))

    fill_all(replicas, 1)
    wholes = held(modules)
    assert all(torch.equal(*pair) for pair in zip(wholes, held(before), strict=True))
    assert not any(map(is_dtensor, wholes))

    for block in blocks:
        block.drop()
    assert list(map(id, held(modules))) == list(map(id, shards))
    assert {whole.untyped_storage().nbytes() for whole in wholes} == {0}
    fill_all(replicas, 1)
    assert list(map(id, held(modules))) == list(map(id, wholes))


def test_parameters_of_one_type_are_one_piece_of_memory():
    _, blocks = two_replicas()[0]

    assert [block.local_part.dtype for block in blocks] == [torch.float32, torch.float64]
    for block in blocks:
        addresses = {local_part(each.shard).untyped_storage().data_ptr() for each in block.parameters}
        assert addresses == {block.local_part.untyped_storage().data_ptr()}


def test_attributes_and_what_is_trained_go_along():
    layer = nn.Linear(2, 2)
    layer.weight.is_special, layer.bias.requires_grad = True, False

    (block,), _ = blocks_of([layer], mesh_without_groups("data", 2, 0))

    assert layer.weight.is_special
    assert not layer.bias.requires_grad
    layer.bias.requires_grad_(True)
    block.begin_step()
    assert [each.unsharded.requires_grad for each in block.parameters] == [True, True]


def test_a_change_of_a_whole_parameter_is_an_error_since_it_would_be_lost():
    replicas = two_replicas()
    modules, blocks = replicas[0]
    fill_all(replicas, 0)
    require_unchanged(blocks, [4])
    with torch.no_grad():
        modules[0].bias.add_(1)

    error = error_of(require_unchanged, blocks, [4])

    assert isinstance(error, PipelineError)
    assert "stage 4: Linear.bias was changed in place" in str(error)
