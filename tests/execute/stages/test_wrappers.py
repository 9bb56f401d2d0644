"""Layers that reduce gradients by themselves run with the gradients of one process, or are refused with the fix."""

import re

import pytest
import torch
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ConfigError
from tests.support.local_pipelines import assert_errors, error_of
from tests.support.replicas import (
    FLOAT,
    assert_gradients,
    expected_gradients,
    gradients_of,
    layers,
    mesh,
    own_rows,
    pipeline_of,
)


def sharded_layers(own_mesh, **options):
    model = layers()
    for layer in model:
        fully_shard(layer[0], mesh=own_mesh["replica"], **options)
        fully_shard(layer, mesh=own_mesh["replica"], **options)
    return model


def replicated_layers(own_mesh):
    return [replicate(layer, mesh=own_mesh["replica"]) for layer in layers()]


def set_of_callers(model, seed):
    """Make the caller's own settings of fully_shard: no reduction in the first step, nothing resharded in it."""
    for layer in model:
        layer.set_requires_gradient_sync(seed == 2)
        layer.set_reshard_after_forward(seed == 1)
        layer.set_reshard_after_backward(seed == 2)


def train_sharded(rank, make, schedule, options, prepare=lambda model, seed: None):
    """Two steps whose gradients add up, with evaluation between them."""
    own_mesh = mesh()
    model = make(own_mesh)
    pipeline = pipeline_of(model, schedule, own_mesh, **options)
    for seed in (1, 2):
        prepare(model, seed)
        inputs, target = own_rows(own_mesh, seed)
        pipeline.step(inputs, target=target)
        pipeline.evaluate(inputs, target=target)
    return gradients_of(pipeline, "main_grad" if "main_gradients" in options else "grad")


@pytest.mark.feature("E5")
@pytest.mark.parametrize(
    ("make", "schedule", "options"),
    [
        pytest.param(sharded_layers, "gpipe", {}, marks=pytest.mark.slow),
        pytest.param(sharded_layers, "1f1b", {}, marks=pytest.mark.slow),
        (sharded_layers, "interleaved-1f1b", {}),
        (sharded_layers, "looped-bfs", {"debug": "values"}),
        (sharded_layers, "1f1b", {"main_gradients": True}),
        (replicated_layers, "1f1b", {}),
    ],
)
def test_sharded_gradients_are_those_of_the_whole_batch(four_ranks, make, schedule, options):
    found = four_ranks.run(train_sharded, make, schedule, options)

    assert_gradients(found, expected_gradients(seeds=(1, 2)))


def test_the_settings_of_fully_shard_are_the_callers(four_ranks):
    found = four_ranks.run(train_sharded, sharded_layers, "1f1b", {}, set_of_callers)

    assert_gradients(found, expected_gradients(seeds=(1, 2)))


def look_at_sharded(rank):
    """Whether gradients in mixed precision are right, and a memory report counts a rank's shards."""
    own_mesh = mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=FLOAT)
    mixed = pipeline_of(sharded_layers(own_mesh, mp_policy=policy), "1f1b", own_mesh)
    inputs, target = own_rows(own_mesh)
    report = mixed.memory_report(inputs, target=target)
    close = [
        torch.allclose(gradient, expected_gradients()[name], rtol=0.05, atol=0.01)
        for name, gradient in gradients_of(mixed).items()
    ]
    num_bytes = sum(parameter.to_local().nbytes for _, parameter in mixed.named_parameters())
    counted = sum(stage.parameter_bytes for stage in report.ranks[mixed.rank].stages)
    return all(close), counted == num_bytes


def test_mixed_precision_and_memory_reports_know_shards(four_ranks):
    assert four_ranks.run(look_at_sharded) == [(True, True)] * 4


def evaluate_before_stepping(rank):
    """A forward without a backward before the optimizer's step must not leave the old weights behind."""
    own_mesh = mesh()
    model = [fully_shard(layer, mesh=own_mesh["replica"]) for layer in layers()]
    pipeline = pipeline_of(model, "1f1b", own_mesh)
    held = [parameter for _, parameter in pipeline.named_parameters()]  # what an optimizer holds
    inputs, target = own_rows(own_mesh)
    before = pipeline.evaluate(inputs, target=target).loss
    for parameter in held:
        parameter.data.mul_(0.5)
    return float(before), float(pipeline.evaluate(inputs, target=target).loss)


def test_evaluation_leaves_no_gathered_weights_behind(four_ranks):
    for before, after in four_ranks.run(evaluate_before_stepping):
        assert before != after


def wrap_plainly(layer, own_mesh, **options):
    return DistributedDataParallel(layer, process_group=own_mesh.get_group("replica"), **options)


def wrap_delayed(layer, own_mesh):
    return wrap_plainly(
        layer,
        own_mesh,
        delay_all_reduce_named_params=[("0.weight", layer[0].weight)],
        param_to_hook_all_reduce=layer[0].bias,
    )


def wrap_hooked(layer, own_mesh):
    wrapped = wrap_plainly(layer, own_mesh)
    wrapped.register_comm_hook(None, lambda state, bucket: None)
    return wrapped


def wrap_tensor_parallel(layer, own_mesh):
    parallel = parallelize_module(layer, own_mesh["pipeline"], {"0": ColwiseParallel()})
    return DistributedDataParallel(parallel, device_mesh=own_mesh["replica"])


REFUSED = {
    "around parameters that are DTensors": wrap_tensor_parallel,
    "static_graph=True": lambda layer, own_mesh: wrap_plainly(layer, own_mesh, static_graph=True),
    "delay_all_reduce_named_params": wrap_delayed,
    "a communication hook": wrap_hooked,
    "process_group= the group of its replicas": lambda layer, own_mesh: DistributedDataParallel(layer),
    "use torch.distributed.fsdp.fully_shard": lambda layer, own_mesh: FullyShardedDataParallel(
        layer, process_group=own_mesh.get_group("replica"), device_id=torch.device("cpu")
    ),
    "wrap the layer in DistributedDataParallel": lambda layer, own_mesh: replicate_by_ddp(
        layer, process_group=own_mesh.get_group("replica")
    ),
    "give the mesh of the replicas": lambda layer, own_mesh: fully_shard(layer),
}


def refusals(rank):
    """What each wrapper is refused with; only the third of four layers has it, which the second rank holds."""
    own_mesh, errors = mesh(), []
    for wrap in REFUSED.values():
        model = layers()
        model[2] = wrap(model[2], own_mesh)
        errors.append(error_of(pipeline_of, model, "1f1b", own_mesh))
    return errors


def test_a_wrapper_that_would_be_wrong_is_refused_on_all_ranks_with_the_fix(four_ranks):
    for fix, *errors in zip(REFUSED, *four_ranks.run(refusals), strict=True):
        assert_errors(errors, ConfigError, "stage 1, layer 2", fix)


def refused_splits(rank):
    own_mesh = mesh()
    found = [str(error_of(pipeline_of, sharded_layers(own_mesh), name, own_mesh)) for name in ("zb-h1", "zbv")]
    model = layers()
    fully_shard(model[3], mesh=own_mesh["replica"])
    pipeline = pipeline_of(model, "1f1b", own_mesh)
    inputs, target = own_rows(own_mesh)
    found.append(str(error_of(pipeline.profile, inputs, target=target, split_backwards=True)))
    pipeline.profile(inputs, target=target)
    return found


@pytest.mark.feature("E5")
def test_sharded_layers_are_refused_where_backwards_are_split(four_ranks):
    for zb_h1, zbv, profile in four_ranks.run(refused_splits):
        assert re.search(r"layer \d \(FSDPSequential\): fully_shard .* but zb-h1 splits .*such as 1f1b", zb_h1)
        assert "but zbv splits" in zbv
        assert "stage 1, layer 3 (FSDPSequential)" in profile
        assert "split_backwards=True" in profile
