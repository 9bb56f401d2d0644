"""Layers wrapped in DistributedDataParallel get the gradients of one process that runs the batches of all replicas."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.local_pipelines import error_of, settle, square_loss
from tests.support.replicas import (
    FLOAT,
    MICROBATCHES,
    NUM_LAYERS,
    TOLERANCE,
    WIDTH,
    assert_gradients,
    batch,
    expected_gradients,
    gradients_of,
    layers,
    mesh,
    own_rows,
    pipeline_of,
)


def wrap(layer, own_mesh, **options):
    return DistributedDataParallel(layer, process_group=own_mesh.get_group("replica"), **options)


def train_wrapped(rank, schedule, options):
    own_mesh = mesh()
    inputs, target = own_rows(own_mesh)
    if schedule == "sequential":  # plain data parallelism: every rank is a pipeline of its own
        own_mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replica", "pipeline"))
        inputs, target = (tensor.chunk(4)[rank] for tensor in batch())
    pipeline = pipeline_of([wrap(layer, own_mesh) for layer in layers()], schedule, own_mesh, **options)
    if "main_gradients" not in options:
        pipeline.evaluate(inputs, target=target)
    pipeline.step(inputs, target=target)
    return gradients_of(pipeline, "main_grad" if "main_gradients" in options else "grad")


@pytest.mark.feature("B13", "E4")
@pytest.mark.parametrize("options", [{}, {"main_gradients": True}], ids=str)
@pytest.mark.parametrize(
    "schedule",
    [
        *("sequential", "1f1b", "zbv", "dualpipe"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "interleaved-1f1b", "zb-h1")),
    ],
)
def test_gradients_are_those_of_the_whole_batch(four_ranks, schedule, options):
    assert_gradients(four_ranks.run(train_wrapped, schedule, options), expected_gradients())


# ---- several steps


def train_accumulating(rank, schedule, sync, tied):
    """Three steps; `sync`: in each, or only in the last, by the layers' `no_sync` or the pipeline's."""
    own_mesh = mesh()
    wrapped = [wrap(layer, own_mesh) for layer in layers()]
    pipeline = pipeline_of(wrapped, schedule, own_mesh, tied=tied)
    for seed in (1, 2, 3):
        inputs, target = own_rows(own_mesh, seed)
        with ExitStack() as stack:
            if seed < 3 and sync != "each":
                for each in wrapped if sync == "layers" else [pipeline]:
                    stack.enter_context(each.no_sync())
            pipeline.step(inputs, target=target)
        if seed == 1:
            first = gradients_of(pipeline)
    return first, gradients_of(pipeline)


@pytest.mark.feature("E4")
@pytest.mark.parametrize("sync", ["each", "layers", "pipeline"])
def test_gradients_of_several_steps_add_up(four_ranks, sync):
    found = four_ranks.run(train_accumulating, "1f1b", sync, ())

    assert_gradients([last for _, last in found], expected_gradients(seeds=(1, 2, 3)))
    averaged = torch.allclose(found[0][0]["0.0.weight"], found[2][0]["0.0.weight"], rtol=0, atol=TOLERANCE)
    assert averaged is (sync == "each")  # under the caller's no_sync each replica has its own sum


@pytest.mark.feature("E8")
@pytest.mark.parametrize("sync", ["layers", "pipeline"])
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zbv"])
def test_tied_gradients_of_several_steps_add_up_also_where_only_the_last_is_synchronised(four_ranks, schedule, sync):
    tied = [("0.module.0.weight", "3.module.0.weight")]

    found = four_ranks.run(train_accumulating, schedule, sync, tied)

    model = layers()
    model[3][0].weight = model[0][0].weight
    expected = expected_gradients(model, (1, 2, 3))
    if schedule != "zbv":  # in which one rank holds both uses, and lists the weight once
        expected["3.0.weight"] = expected["0.0.weight"]
    assert_gradients([last for _, last in found], expected)


# ---- what DDP does besides


class Unsteady(nn.Module):
    """Has a buffer, and parameters of which some have no gradient: frozen, never used, or used on one replica only."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=FLOAT)
        self.always, self.sometimes, self.never, self.frozen = (nn.Linear(WIDTH, WIDTH, dtype=FLOAT) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.uses_all = False

    def forward(self, features, *, shift):
        features = self.frozen(self.always(self.norm(features))) + shift
        return self.sometimes(features) if self.uses_all else features


def unsteady_layers(own_mesh):
    made = [settle(Unsteady(), seed) for seed in range(NUM_LAYERS)]
    for layer in made:
        layer.uses_all = own_mesh.get_local_rank("replica") == 1
    return made


def train_unsteady(rank):
    """The pipeline's gradients and buffers after two steps, and those of DDP without a pipeline."""
    own_mesh = mesh()
    options = {"find_unused_parameters": True}
    alone = wrap(Pipelined(unsteady_layers(own_mesh)), own_mesh, **options)
    wrapped = [wrap(layer, own_mesh, **options) for layer in unsteady_layers(own_mesh)]
    pipeline = pipeline_of(wrapped, "1f1b", own_mesh)
    for seed in (1, 2):
        inputs, target = own_rows(own_mesh, seed)
        shift = inputs + 1
        pipeline.step(inputs, target=target, shift=shift)
        parts = list(zip(*(rows.chunk(MICROBATCHES) for rows in (inputs, target, shift)), strict=True))
        with alone.no_sync():
            for part in parts[:-1]:
                step_alone(alone, *part)
        step_alone(alone, *parts[-1])
    prefix = "module.layers."
    own_layers = {name: layer for stage in pipeline.stages for name, layer in stage.layers.items()}
    buffers = {
        f"{name}.{own}": value for name, layer in own_layers.items() for own, value in layer.module.named_buffers()
    }
    gradients_alone = {name.removeprefix(prefix): p.grad for name, p in alone.named_parameters()}
    buffers_alone = {name.removeprefix(prefix): value for name, value in alone.named_buffers()}
    return gradients_of(pipeline), buffers, gradients_alone, buffers_alone


class Pipelined(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.layers = nn.ModuleList(model)

    def forward(self, features, shift):
        for layer in self.layers:
            features = layer(features, shift=shift)
        return features


def step_alone(model, inputs, target, shift):
    (square_loss(model(inputs, shift), target) / MICROBATCHES).backward()


def test_unused_and_frozen_parameters_buffers_and_keywords_are_as_with_ddp_alone(four_ranks):
    found = four_ranks.run(train_unsteady)

    gradients, buffers, gradients_alone, buffers_alone = zip(*found, strict=True)
    assert_gradients(gradients, gradients_alone[0])
    assert gradients_alone[0]["0.sometimes.weight"] is not None
    assert gradients_alone[0]["0.never.weight"] is None
    for own in buffers:  # every replica has the first one's, which DDP alone would take in the next forward
        torch.testing.assert_close(own, {name: buffers_alone[0][name] for name in own}, rtol=0, atol=TOLERANCE)


# ---- failures


def train_one_replica(rank):
    own_mesh = mesh()
    pipeline = pipeline_of([wrap(layer, own_mesh) for layer in layers()], "1f1b", own_mesh, deadline_s=4.0)
    inputs, target = own_rows(own_mesh)
    pipeline.step(inputs, target=target)
    if own_mesh.get_local_rank("replica") == 1:
        return None
    return str(error_of(pipeline.step, inputs, target=target))


def test_a_replica_that_does_not_come_is_an_error_within_the_deadline(four_ranks):
    found = four_ranks.run(train_one_replica, timeout_s=30.0)

    assert any("were not averaged over ranks" in text and "within 4 s" in text for text in found[:2])
    assert found[2:] == [None, None]
