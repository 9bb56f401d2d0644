"""Gradients of shards are DTensors that lie as the shards do; whoever asks for them gets this rank's rows."""

import torch
from torch import nn

from penstock.execute.parameters.gradient_store import MAIN_GRAD
from penstock.execute.parameters.shard_gradients import ShardGradients
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.execute.values.tensors import as_shard, is_dtensor


def shard(dtype=torch.float32):
    mesh = mesh_without_groups("data", 2, 0)
    return nn.Parameter(as_shard(torch.zeros(2, 3, dtype=dtype), mesh, torch.Size((3, 3)), (3, 1)))


def test_rows_become_the_gradient_and_later_ones_are_added_to_them():
    parameter, gradients = shard(), ShardGradients()
    assert gradients.of(parameter) is None

    gradients.add(parameter, torch.ones(2, 3))
    first = parameter.grad
    gradients.add(parameter, torch.full((2, 3), 2.0))

    assert is_dtensor(first)
    assert (parameter.grad is first, tuple(first.shape), first.placements) == (True, (3, 3), parameter.placements)
    assert gradients.of(parameter).tolist() == [[3.0] * 3] * 2


def test_what_was_there_before_a_step_is_set_aside_and_the_sum_comes_on_top():
    parameter, gradients = shard(), ShardGradients()
    gradients.add(parameter, torch.ones(2, 3))

    gradients.set_aside([parameter])
    assert parameter.grad is None
    gradients.add(parameter, torch.full((2, 3), 4.0))
    gradients.put_sum(parameter, gradients.of(parameter) * 2)
    gradients.end_step()

    assert gradients.of(parameter).unique().tolist() == [9.0]
    assert is_dtensor(parameter.grad)


def test_main_gradients_are_beside_the_shard_and_wider():
    parameter = shard(torch.bfloat16)
    parameter.main_grad = None
    gradients = ShardGradients(MAIN_GRAD)

    like = gradients.like(parameter)
    gradients.add(parameter, torch.ones(2, 3))

    assert (tuple(like.shape), like.dtype) == ((2, 3), torch.float32)
    assert parameter.grad is None
    assert parameter.main_grad.dtype == torch.float32
