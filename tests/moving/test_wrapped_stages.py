"""Stages of other systems' loops keep their data-parallel wrappers: DDP around a stage, `fully_shard` on parts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.moving.torch_pipelining import PipelineStage, Schedule1F1B
from penstock.moving.torchtitan import pipeline_llm
from tests.support.local_pipelines import square_loss
from tests.support.replicas import (
    MICROBATCHES,
    NUM_LAYERS,
    assert_gradients,
    expected_gradients,
    full,
    layers,
    mesh,
    own_rows,
)


def train_both_ways(rank):
    own_mesh = mesh()
    return train_stages(own_mesh), train_parts(own_mesh)


def train_stages(own_mesh):
    """torch.distributed.pipelining: each rank wraps its own stage."""
    group = own_mesh.get_group("pipeline")
    index = dist.get_rank(group)
    own = layers()[2 * index : 2 * index + 2]
    wrapped = DistributedDataParallel(nn.Sequential(*own), process_group=own_mesh.get_group("replica"))
    stage = PipelineStage(wrapped, index, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=square_loss)
    inputs, target = own_rows(own_mesh)
    schedule.step(*((inputs,) if stage.is_first else ()), target=target if stage.is_last else None)
    return {
        f"{2 * index + layer}.{name}": parameter.grad
        for layer in range(2)
        for name, parameter in own[layer].named_parameters()
    }


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers())})

    def forward(self, features):
        for layer in self.layers.values():
            features = layer(features)
        return features


def train_parts(own_mesh):
    """torchtitan: `prepare` shards each part."""
    names = [[f"layers.{index}" for index in part] for part in ((0, 1), (2, 3))]
    assert NUM_LAYERS == 4
    pipelined = pipeline_llm(
        Model(),
        names,
        "1F1B",
        n_microbatches=MICROBATCHES,
        loss_fn=square_loss,
        prepare=lambda part: fully_shard(part, mesh=own_mesh["replica"]),
        group=own_mesh.get_group("pipeline"),
    )
    inputs, target = own_rows(own_mesh)
    pipelined.pp_schedule.step(
        *((inputs,) if pipelined.pp_has_first_stage else ()), target=target if pipelined.pp_has_last_stage else None
    )
    named = [item for part in pipelined.model_parts for item in part.named_parameters()]
    return {name.removeprefix("layers."): full(parameter.grad) for name, parameter in named}


def test_wrapped_stages_and_sharded_parts_get_the_gradients_of_the_whole_batch(four_ranks):
    found = four_ranks.run(train_both_ways)

    assert_gradients([stages for stages, _ in found], expected_gradients())
    assert_gradients([parts for _, parts in found], expected_gradients())
