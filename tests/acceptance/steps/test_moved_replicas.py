"""Code that was moved over from another system trains in replicas of pipelines as one process does."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PartitionError
from penstock.moving import torch_pipelining as moved
from penstock.moving.deepspeed import initialize
from penstock.moving.megatron import get_forward_backward_func
from penstock.moving.torchtitan import pipeline_llm
from tests.moving.megatron_model import Part, count_tokens, forward_step, forward_step_per_token, microbatches, squares
from tests.moving.megatron_model import one_process as one_process_of_parts
from tests.moving.own_layers import batch, own_stage, reference
from tests.moving.test_deepspeed import data, halving, model, sgd
from tests.moving.test_deepspeed_schedule import Halves
from tests.moving.test_schedule_classes import TwoByTwo
from tests.support.local_pipelines import assert_errors, error_of, square_loss, token_loss
from tests.support.mesh_pipelines import Rows, assert_near, device_mesh, on_mesh, whole

M = 4
"""Microbatches of a replica."""
SHARDS = [{}, {"shard": "optimizer"}, {"shard": "full"}]


def check(ranks, loss, expected, num_replicas=2):
    """Every rank has the loss, and together they have all gradients, equal in all replicas."""
    for _, found in ranks:
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    gradients = whole([rows for rows, _ in ranks], num_replicas)
    assert gradients.keys() == expected.keys()
    assert_near(gradients, expected)


# ---- torch.distributed.pipelining


def torch_on_thread(places, schedule, indices, **options):
    return torch_case(places, places.pipeline.rank, places.replica, schedule, indices, **options)


def torch_case(mesh, place, replica, schedule, indices, **options):
    own = indices[place]
    num_stages = 2 * len(own)
    num_parts = num_stages // 2 if schedule == "dualpipe" else num_stages
    stages = [moved.PipelineStage(own_stage(index % num_parts), index, num_stages) for index in own]
    moving = moved.Schedule(schedule, stages, M, square_loss, mesh=mesh, **options)
    inputs, target = (tensor.chunk(2)[replica] for tensor in batch(16))
    args = (inputs,) if any(stage.is_first for stage in stages) else ()
    moving.step(*args, target=target if any(stage.is_last for stage in stages) else None)
    found = Rows(moving.pipeline), moving.result.loss
    moving.close()
    return found


@pytest.mark.parametrize(
    ("schedule", "indices", "options"),
    [
        ("1F1B", [(0,), (1,)], {}),
        ("1F1B", [(0,), (1,)], {"shard": "full"}),
        ("Interleaved1F1B", [(0, 2), (1, 3)], {"shard": "optimizer"}),
        ("ZBVZeroBubble", [(0, 3), (1, 2)], {}),
        ("ZBVZeroBubble", [(0, 3), (1, 2)], {"shard": "full"}),
        ("dualpipe", [(0, 3), (1, 2)], {}),
        ("dualpipe", [(0, 3), (1, 2)], {"shard": "full"}),
        (TwoByTwo, [(0,), (1,)], {}),
    ],
)
def test_stages_of_torch_train_in_replicas(schedule, indices, options):
    ranks = on_mesh(2, 2, lambda places: torch_on_thread(places, schedule, indices, **options))

    num_parts = 2 if schedule == "dualpipe" else 2 * len(indices[0])
    result, gradients = reference(num_parts, 2 * M, rows=16)
    check(ranks, result.loss, {f"{stage}.{name}": value for (stage, name), value in gradients.items()})


@pytest.mark.slow
def test_a_mesh_of_processes_is_one_job(four_ranks):
    ranks = four_ranks.run(on_process)

    result, gradients = reference(2, 2 * M, rows=16)
    check(ranks, result.loss, {f"{stage}.{name}": value for (stage, name), value in gradients.items()})


def on_process(rank):
    return torch_case(device_mesh(2, 2), rank % 2, rank // 2, "1F1B", [(0,), (1,)])


# ---- torchtitan


@pytest.mark.parametrize("options", SHARDS)
def test_parts_of_a_whole_model_train_in_replicas(options):
    def case(places):
        parts = nn.Sequential(*(own_stage(index) for index in range(4)))
        names = [[str(index)] for index in range(4)]
        pipelined = pipeline_llm(parts, names, "Interleaved1F1B", M, square_loss, mesh=places, **options)
        inputs, target = (tensor.chunk(2)[places.replica] for tensor in batch(16))
        pipelined.pp_schedule.step(inputs, target=target)
        found = Rows(pipelined.pp_schedule.pipeline), pipelined.pp_schedule.result.loss
        pipelined.pp_schedule.close()
        return found

    result, gradients = reference(4, 2 * M, rows=16)
    check(on_mesh(2, 2, case), result.loss, {f"{s}.{s}.{name}": value for (s, name), value in gradients.items()})


# ---- Megatron-LM


def megatron_case(places, *, items, step=forward_step, numbers=(M,), **options):
    """Call the function for batches of these numbers of microbatches, one after another; gradients add up."""
    call = get_forward_backward_func(mesh=places, **options)
    part = Part(places.pipeline.rank, 2)
    begin = 0
    for number in numbers:
        size = number * places.num_replicas
        own = items[begin : begin + size][number * places.replica :][:number]
        call(forward_step_func=step, data_iterator=iter(own), model=part, num_microbatches=number)
        begin += size
    found = Rows(call.pipeline), call.result.loss
    call.close()
    return found


def named_parts(gradients):
    return {f"{stage}.model.{name}": value for (stage, name), value in gradients.items()}


@pytest.mark.feature("A12", "E13")
@pytest.mark.parametrize("options", [*SHARDS, {"schedule": "zb-h1"}])
def test_a_forward_step_trains_in_replicas(options):
    items = microbatches(2 * M)
    ranks = on_mesh(2, 2, lambda places: megatron_case(places, items=items, **options))

    losses, gradients = one_process_of_parts(2, items, lambda o, i: squares(o, i).mean(), [1 / len(items)] * len(items))
    check(ranks, sum(losses) / len(items), named_parts(gradients))


def test_tokens_are_those_of_all_replicas():
    items = microbatches(2 * M)
    items[5]["mask"].zero_()
    ranks = on_mesh(
        2,
        2,
        lambda places: megatron_case(places, items=items, step=forward_step_per_token, count_tokens=count_tokens),
    )

    counts = [float(count_tokens(item)) for item in items]
    weights = [count / sum(counts) for count in counts]
    losses, gradients = one_process_of_parts(
        2, items, lambda o, i: (squares(o, i) * i["mask"]).sum() / max(float(i["mask"].sum()), 1.0), weights
    )
    loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    check(ranks, loss, named_parts(gradients))


def test_gradients_of_calls_with_other_numbers_of_microbatches_add_up():
    items = microbatches(12)
    ranks = on_mesh(2, 2, lambda places: megatron_case(places, items=items, numbers=(4, 2)))

    losses, gradients = one_process_of_parts(2, items, lambda o, i: squares(o, i).mean(), [1 / 8] * 8 + [1 / 4] * 4)
    check(ranks, sum(losses[8:]) / 4, named_parts(gradients))


def test_calls_with_other_numbers_of_microbatches_are_refused_where_weights_are_sharded():
    def case(places):
        call, part = get_forward_backward_func(mesh=places, shard="full"), Part(places.pipeline.rank, 2)
        errors = []
        for number, timers in ((M, None), (2, None), (M, nullcontext), (M, None)):
            given = {"data_iterator": iter(microbatches(number)), "model": part, "timers": timers}
            try:
                errors.append(len(call(forward_step, num_microbatches=number, **given)))
            except ConfigError as error:
                errors.append(str(error))
        call.close()
        return errors

    for rank, (first, fewer, timed, again) in enumerate(on_mesh(2, 2, case)):
        assert first == again == M * (rank % 2)
        assert (
            "num_microbatches: 2, but the shards of the weights belong to the pipeline of batches of 4; give" in fewer
        )
        assert "belong to the pipeline of batches of 4, made without timers; give as many, timers in the first" in timed


# ---- DeepSpeed


def engine_of(places, **options):
    return initialize(model(partition_method="uniform"), gradient_accumulation_steps=M, mesh=places, **options)


def items_of(places, items):
    return iter(items[M * places.replica :][:M])


@pytest.mark.feature("E13", "X3")
@pytest.mark.parametrize("options", [*SHARDS, {"schedule": "zbv"}, {"schedule": Halves}])
def test_an_engine_trains_in_replicas(options):
    def case(places):
        engine = engine_of(places, **options)
        loss = engine.train_batch(items_of(places, data(2 * M)))
        evaluated = engine.eval_batch(items_of(places, data(2 * M)))
        few = (engine.eval_batch, items_of(places, data(2 * M)))
        fewer = error_of(*few, num_micro_batches=2) if "shard" in options else few[0](few[1], num_micro_batches=2)
        found = Rows(engine.pipeline), loss
        engine.close()
        return found, evaluated, fewer

    ranks = on_mesh(2, 2, case)

    layers = [spec() for spec in model().specs()]
    layers[4].module.weight = layers[0].weight
    losses = []
    for hidden, labels in data(2 * M):
        for layer in layers:
            hidden = layer(hidden)
        losses.append(token_loss(hidden, labels))
    (sum(losses) / len(losses)).backward()
    expected = {f"{index}.{name}": p.grad for index, layer in enumerate(layers) for name, p in layer.named_parameters()}
    if options.get("schedule") == "zbv":
        del expected["4.module.weight"]  # it is on the rank of the weight that it is tied to, and listed once
    check([found for found, *_ in ranks], (sum(losses) / len(losses)).detach(), expected)
    few = (losses[0] + losses[1] + losses[4] + losses[5]) / 4
    for _, evaluated, fewer in ranks:
        torch.testing.assert_close(evaluated, (sum(losses) / len(losses)).detach(), rtol=1e-12, atol=0)
        if "shard" in options:
            assert "num_micro_batches: 2, but the shards of the weights belong to the pipeline of batches of 4" in str(
                fewer
            )
        else:
            torch.testing.assert_close(fewer, few.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"shard": "full"}])
def test_an_engine_with_an_optimizer_clips_and_steps_in_replicas_as_with_one(options):
    """A batch of two replicas is that of one replica with twice the microbatches."""

    def trained(places, number):
        engine = initialize(
            model(partition_method="uniform"),
            optimizer=sgd,
            lr_scheduler=halving,
            gradient_accumulation_steps=number,
            gradient_clipping=0.05,
            mesh=places,
            **options,
        )
        items = data(32)
        losses = [engine.train_batch(iter(items[16 * step :][number * places.replica :][:number])) for step in range(2)]
        found = Rows(engine.pipeline), torch.stack(losses), engine.grad_norm
        engine.close()
        return found

    two, one = (on_mesh(2, replicas, trained, 16 // replicas) for replicas in (2, 1))

    weights = whole([rows for rows, *_ in one], 1, "weights")
    assert_near(whole([rows for rows, *_ in two], 2, "weights"), weights)
    for _, losses, norm in two:
        torch.testing.assert_close(losses, one[0][1], rtol=1e-12, atol=0)
        assert norm == pytest.approx(one[0][2], rel=1e-12)


# ---- what is refused


def test_stages_that_one_replica_lacks_are_told_in_all():
    def case(places):
        index = places.pipeline.rank
        is_wrong = places.replica == 1 and index == 1
        stage = moved.PipelineStage(own_stage(index), 0 if is_wrong else index, 2)
        return error_of(moved.Schedule, "1F1B", stage, M, square_loss, mesh=places)

    errors = on_mesh(2, 2, case)

    assert [type(error) for error in errors] == [PartitionError] * 4
    assert_errors(errors, PartitionError, "replica 1: rank 1 brings the stages [0]")


def test_data_that_end_in_one_replica_refuse_the_batch_in_all():
    def case(places):
        engine = engine_of(places)
        error = error_of(engine.train_batch, iter(data(M - places.replica)))
        engine.train_batch(iter(data(M)))
        engine.close()
        return error

    for error in on_mesh(2, 2, case):
        assert "ended: a batch takes 4 items, and 3 were left" in str(error)


def test_a_mesh_goes_without_a_transport():
    def case(places):
        return error_of(engine_of, places, transport=places.pipeline)

    for error in on_mesh(2, 2, case):
        assert isinstance(error, ConfigError)
        assert "mesh: it goes without a transport" in str(error)
