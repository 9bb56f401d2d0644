"""Shards against torch's FSDP2 around the stages of its 1F1B, on 2 x 2 ranks: for bench/train.py.

torch shards each layer. It either gathers a layer for each forward and each backward, which is the default, or leaves
layers whole between them, as torchtitan does in pipelines. Peaks count what the allocator gives out from the first step
on, gradients and batch being there already; the second step counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from in_torch import torch_step
from memory import gathered, zero
from on_ranks import in_turn, paired_ratio, spread_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.partition.split import split_over
from penstock.pipeline import Pipeline
from penstock.schedules import build

SIZES = (2, 2)
MICROBATCHES = 8
"""Of a replica."""
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("1f1b", {}),
    "interleaved-1f1b, 4 stages a rank": ("interleaved-1f1b", {"stages_per_rank": 4}),
    "v-min": ("v-min", {}),
    "v-half": ("v-half", {}),
}
THEIRS = {"FSDP2, layers stay whole": False, "FSDP2, by default": None}
"""What `reshard_after_forward` is."""


@dataclass(frozen=True)
class ShardRow:
    """What was measured of one way of training."""

    name: str
    tokens_per_s: float
    """Of both replicas."""
    spread: float
    ratios: dict[str, float]
    """Tokens per second over those of each of torch's ways: medians of the rounds."""
    peak_bytes: list[int]
    """Per rank."""


def measure_shards(decoder: DecoderConfig, batch_size: int, length: int, num_rounds: int) -> Iterator[ShardRow]:
    """Measure all ways on this rank, in turns; all ranks get the same rows."""
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("data", "pipeline"))
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    batch = torch.randint(decoder.vocabulary, (batch_size, length + 1), generator=generator)
    tokens, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    made = {name: partial(pipeline_of, decoder, mesh, *OURS[name]) for name in OURS}
    made |= {name: partial(torch_of, decoder, mesh, stays) for name, stays in THEIRS.items()}
    peaks, turns = {}, {}
    for name, make in made.items():
        step = make()
        peaks[name] = gathered(partial(step, tokens, target))[0]
        turns[name] = partial(step, tokens, target)
    seconds = in_turn(turns, num_rounds)
    num_tokens = SIZES[0] * batch_size * length
    for name, own in seconds.items():
        rate = num_tokens / sorted(own)[len(own) // 2]
        ratios = {theirs: paired_ratio(seconds[theirs], own) for theirs in THEIRS}
        yield ShardRow(name, rate, spread_of(own), ratios, peaks[name])


Step = Callable[[Tensor, Tensor], object]


def pipeline_of(decoder: DecoderConfig, mesh: DeviceMesh, family: str, options: dict[str, Any]) -> Step:
    schedule = build(family, ranks=SIZES[1], microbatches=MICROBATCHES, **options)
    specs = decoder_layers(decoder)
    weights = [spec.weight for spec in specs]
    pipeline = Pipeline(specs, schedule, loss=cross_entropy_loss, weights=weights, mesh=mesh, shard="full")
    for parameter in pipeline.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return lambda tokens, target: pipeline.step(tokens, target=target)


def torch_of(decoder: DecoderConfig, mesh: DeviceMesh, stays: bool | None) -> Step:
    schedule = build("1f1b", ranks=SIZES[1], microbatches=MICROBATCHES)
    specs = decoder_layers(decoder)
    parts = split_over(schedule.placement, len(specs), weights=[spec.weight for spec in specs])
    layers = [spec() for spec in specs]
    wrap = partial(shard, mesh=mesh["data"], reshard_after_forward=stays)
    step = torch_step("1f1b", schedule, layers, parts, cross_entropy_loss, mesh=mesh, wrap=wrap)
    zero([layers[layer] for layer in parts[mesh.get_local_rank("pipeline")]])
    return step


def shard(module: nn.Module, **options: Any) -> None:
    """Shard each layer of a stage by itself, and what is left with the stage."""
    for layer in module.children():
        fully_shard(layer, **options)
    fully_shard(module, **options)
