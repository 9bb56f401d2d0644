"""`Layout`, and all layouts that a cluster and a batch allow.

8 devices, 256 sequences     pipeline x data      1 x 8, 2 x 4, 4 x 2, 8 x 1
                             microbatch size      1, 2, 4: as many microbatches as the rows of a replica make
                             checkpointing        none, full
                             shard                none, optimizer, full; one replica has nothing to share out
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.errors import ConfigError, count_of
from penstock.lowering import FULL, NONE, SHARDS

STAGES_PER_RANK = (1, 2, 4)
STAGES_PER_RANK_OF_FULL = (4, 8)
"""A rank that gathers two stages at a time needs more than two, or it is a rank that gathers all once a step."""
MOST_MICROBATCHES = 1 << 14
"""The most microbatches of a replica in a step; layouts with more would take minutes to plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a training lies on its devices, without the order of its work."""

    pipeline: int
    """Ranks of the pipeline."""
    data: int
    """Replicas of the pipeline."""
    shard: str
    """What replicas share out, a word of `penstock.lower`."""
    microbatch_size: int
    """Sequences of a microbatch."""
    microbatches: int
    """Microbatches of a step, in each replica."""
    checkpointing: str
    """What the blocks of the model keep for their backward: none of it, ..., as `pipeline.activation_checkpointing`."""

    def stages_per_rank(self, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of stages of a rank that are tried with so many layers."""
        numbers = STAGES_PER_RANK_OF_FULL if self.shard == FULL else STAGES_PER_RANK
        return tuple(number for number in numbers if number * self.pipeline <= num_layers)

    def __str__(self) -> str:
        shard = "" if self.shard == NONE else f", shard {self.shard}"
        checkpointing = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        parts = f"{self.microbatch_size}x{self.microbatches}"
        return f"pipeline {self.pipeline} x data {self.data}{shard}, microbatches {parts}{checkpointing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values that layouts may have, beside those that the numbers of devices and layers leave."""

    microbatch_sizes: Sequence[int] = (1, 2, 4)
    checkpointing: Sequence[str] = ("none", "full")
    shards: Sequence[str] = SHARDS


def layouts_of(gpus: int, num_layers: int, global_batch: int, choices: Choices) -> Iterator[Layout]:
    """Yield the layouts of a model of so many layers on so many devices, for so many sequences in a step.

    Raises:
        ConfigError: there is none: too few layers, or a batch that no number of replicas divides.
    """
    replicas = _numbers_of_replicas(gpus, num_layers, global_batch)
    sizes = [size for size in choices.microbatch_sizes if any(global_batch // data % size == 0 for data in replicas)]
    if not sizes:
        problem = f"microbatches of {' or '.join(map(str, choices.microbatch_sizes))} do not divide the sequences of a"
        near = _multiples_near(global_batch, min(replicas) * min(choices.microbatch_sizes))
        raise ConfigError(f"{problem} replica; use {near} sequences", key="global_batch")
    fewest, unit = min(
        (global_batch // data // size, data * size)
        for data, size in product(replicas, sizes)
        if global_batch // data % size == 0
    )
    if fewest > MOST_MICROBATCHES:
        problem = f"{global_batch} sequences are {fewest:,} microbatches or more of each replica in a step"
        raise ConfigError(f"{problem}; use at most {MOST_MICROBATCHES * unit:,} sequences", key="global_batch")
    for data, size, checkpointing in product(replicas, sizes, choices.checkpointing):
        num_rows = global_batch // data
        if num_rows % size or num_rows // size > MOST_MICROBATCHES:
            continue
        for shard in choices.shards if data > 1 else (NONE,):
            layout = Layout(
                pipeline=gpus // data,
                data=data,
                shard=shard,
                microbatch_size=size,
                microbatches=num_rows // size,
                checkpointing=checkpointing,
            )
            if layout.stages_per_rank(num_layers):
                yield layout


def _numbers_of_replicas(gpus: int, num_layers: int, global_batch: int) -> list[int]:
    """Return the numbers of replicas that leave each rank a layer and divide the batch. Raises: ConfigError."""
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    allowed = [data for data in divisors if gpus // data <= num_layers]
    dividing = [data for data in allowed if global_batch % data == 0]
    if dividing:
        return dividing
    least = min(allowed)
    if len(allowed) < len(divisors):
        most = max(number for number in divisors if number <= num_layers)
        reason = f"the {count_of(num_layers, 'layer')} of the model fill at most {most} of {gpus} ranks, so "
    else:
        reason = ""
    raise ConfigError(
        f"{reason}{global_batch} sequences are for {least} replicas or more, which do not divide them; use "
        f"{_multiples_near(global_batch, least)} sequences, or other GPUs",
        key="global_batch",
    )


def _multiples_near(number: int, unit: int) -> str:
    """Return the multiples of a unit next to a number, in words."""
    below = number - number % unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)
