"""`Sharded`: parameters of which each replica holds some rows, and all of them only while they are gathered.

    between steps     modules hold shards: `DTensor`s, which the optimizer steps
    UNSHARD           launches a gather of the unit
    its wait          makes memory for whole parameters, fills it, and lets the modules hold these
    REDUCE_GRAD       packs the whole gradients, drops them, and launches one scattered sum
    its wait          adds this replica's rows of the sum to what came before in the step
    the last one's    adds these rows to the gradients of the shards
    RESHARD           lets the modules hold shards, and frees the memory of the whole parameters

So layers and autograd see ordinary parameters, the same objects in every step. Weight gradients that wait for W refer
to them while their memory is gone; it is gathered again before W reads it.

Gradients of a replica add up whole, in their own type; the parts of all replicas are added in the order of replicas.
How many replicas have a gradient of a parameter is summed with the gradients, behind each part. One that none has used
gets none.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.execute.parameters.gathered import Block, GatheredParameter, blocks_of, require_unchanged
from penstock.execute.parameters.gradient_store import GradientStore, StoredGradients
from penstock.execute.parameters.gradient_sums import added, dense
from penstock.execute.parameters.layout import Launched, ParameterLayout, StageParts
from penstock.execute.replicas.exchanges import ReplicaExchanges, Serial
from penstock.execute.replicas.first_replica import SavedBuffers, Share
from penstock.execute.values.tensors import local_part, memory_of, part_like
from penstock.execute.values.tree import map_leaves


@dataclass(eq=False)
class Sharded(ParameterLayout):
    """The layout of a unit; its parameters are whole until `shard`."""

    launches = True

    _stages: Mapping[int, StageParts]
    _gradients: GradientStore
    _add_rows: Callable[[nn.Parameter, Tensor], None]
    """Adds rows to the gradient of a shard, and may keep their memory."""
    _exchanges: ReplicaExchanges
    _mesh: DeviceMesh
    _num_averaged: int = 1
    """Number of replicas over which gradients are averaged; 1 where they are summed."""
    _blocks: Sequence[Block] = ()
    _gathering: Serial | None = None
    _is_whole: bool = False
    _trained_parameters: Sequence[GatheredParameter] = ()
    _packed: "Sequence[PackedParts]" = ()
    _sums: list[Tensor] = field(default_factory=list)
    """This replica's rows of the gradients that were reduced in this step, one tensor per type of gradients."""

    def __post_init__(self) -> None:
        self._modules = [module for parts in self._stages.values() for module in parts.modules]
        self._buffers = SavedBuffers(self._modules)

    def unsharded_parameters(self) -> list[nn.Parameter]:
        """Return the whole parameters, each once; none before `shard`."""
        return [parameter.unsharded for block in self._blocks for parameter in block.parameters]

    def shard(self) -> dict[nn.Parameter, nn.Parameter]:
        """Keep this replica's rows alone, and let the modules hold shards; return the shard of each parameter."""
        self._blocks, shard_of = blocks_of(self._modules, self._mesh)
        return shard_of

    def held(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters, whole ones having memory while they are gathered, and the gradients of both kinds."""
        unsharded = self.unsharded_parameters()
        shards = [parameter.shard for block in self._blocks for parameter in block.parameters]
        gradients = (getattr(param, self._gradients.attribute, None) for param in (*shards, *unsharded))
        all_gradients = [*self._sums, *(gradient for gradient in gradients if gradient is not None)]
        return [*(block.local_part for block in self._blocks), *unsharded], all_gradients

    def copier(self) -> Callable[[Any], Any]:
        return self.copied

    def copied(self, value: Any) -> Any:
        """Return a value with copies of its tensors that lie in whole parameters, as outputs that views of them are."""
        memory = {block.address for block in self._blocks}
        return map_leaves(lambda leaf: leaf.clone() if _lies_in(leaf, memory) else leaf, value)

    # ---- a step

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Begin a step; gradients are reduced in any case."""
        self._sums = []
        for block in self._blocks:
            block.begin_step()
        if not is_training:
            return
        params = [param for block in self._blocks for param in block.parameters if param.unsharded.requires_grad]
        if params != self._trained_parameters:
            self._trained_parameters = params
            by_unsharded = {param.unsharded: param for param in params}
            self._packed = [
                PackedParts([by_unsharded[unsharded] for unsharded in group], self._gradients, self._exchanges)
                for group in self._gradients.by_type(by_unsharded)
            ]

    def unshard(self) -> Launched:
        """Launch a gather of the unit."""
        self._gathering = self._exchanges.gather([block.local_part for block in self._blocks], self._fill)
        return Launched(self._exchanges, self._gathering)

    def reshard(self) -> None:
        """Drop the whole parameters. Raises: PipelineError, where a layer has changed one, which would be lost."""
        if self._gathering is not None:
            self._exchanges.complete(self._gathering)
        require_unchanged(self._blocks, self._stages)
        self._drop()

    def reduce(self, stage: int, *, is_last: bool) -> Launched:
        """Launch the sum of what has come to the gradients of the unit, and drop them."""
        exchange = None
        if self._packed:
            packed = [packed_parts.pack() for packed_parts in self._packed]
            exchange = self._exchanges.scatter(packed, partial(self._take_sums, is_last=is_last))
        buffers = self._buffers.now() if is_last else []
        return Launched(self._exchanges, exchange, Share(self._exchanges.transport, buffers))

    def end_failed_step(self) -> None:
        self._exchanges.forget()
        self._gathering, self._sums = None, []
        for parameter in self.unsharded_parameters():
            self._gradients.release(parameter)
        self._drop()

    # ---- what exchanges bring

    def _fill(self, gathered: Sequence[Tensor]) -> None:
        for block, parts in zip(self._blocks, gathered, strict=True):
            block.fill(parts)
        self._gathering, self._is_whole = None, True

    def _drop(self) -> None:
        if self._is_whole:
            self._is_whole = False
            for block in self._blocks:
                block.drop()

    def _take_sums(self, parts: Sequence[Tensor], *, is_last: bool) -> None:
        if self._sums:
            for total, part in zip(self._sums, parts, strict=True):
                total.add_(part)
        else:
            self._sums = [part.clone() for part in parts]
        if is_last:
            for packed, total in zip(self._packed, self._sums, strict=True):
                for shard, rows in packed.unpacked(total, self._num_averaged):
                    self._add_rows(shard, rows)
            self._sums = []


class PackedParts:
    """Whole gradients of one type in one buffer, so that each replica gets the sum of its rows of all.

    part of replica 0                           part of replica 1
    rows of a | rows of b | uses of a, of b     rows of a | rows of b | uses of a, of b
    """

    def __init__(
        self, parameters: Sequence[GatheredParameter], gradients: GradientStore, exchanges: ReplicaExchanges
    ) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._exchanges = exchanges
        self._like = gradients.like(parameters[0].unsharded)
        self._places: list[slice] = []
        begin = 0
        for parameter in parameters:
            self._places.append(slice(begin, begin + parameter.rows.part_elements))
            begin += parameter.rows.part_elements
        self._uses = slice(begin, begin + len(parameters))
        """The place of the numbers of replicas that have a gradient, one number per parameter."""

    def pack(self) -> Tensor:
        """Return a buffer of `ReplicaExchanges` with all gradients, which are dropped: [D x part]."""
        num_replicas = self._exchanges.transport.num_ranks
        buffer = self._exchanges.buffer_for(num_replicas * self._uses.stop, self._like)
        parts = buffer.view(num_replicas, -1)
        gradients = [self._gradients.of(parameter.unsharded) for parameter in self._parameters]
        with torch.no_grad():
            parts[:, self._uses] = 1  # this is a fill: a copy from the host would wait for the device
            triples = zip(self._parameters, self._places, gradients, strict=True)
            for index, (parameter, place, gradient) in enumerate(triples):
                if gradient is None:
                    parts[:, place] = 0
                    parts[:, self._uses.start + index] = 0
                else:
                    parameter.rows.share_out(dense(gradient), parts[:, place])
                    self._gradients.release(parameter.unsharded)
        return buffer

    def unpacked(self, total: Tensor, divisor: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return the shard of each parameter that any replica has used, and its rows in the sum: a view of [part].

        The sums are divided by `divisor`, and how many replicas have them are not.
        """
        replica = self._exchanges.transport.rank
        if divisor > 1:
            total[: self._uses.start].div_(divisor)
        for parameter, place, num_uses in zip(self._parameters, self._places, total[self._uses].tolist(), strict=True):
            if num_uses:
                yield parameter.shard, parameter.rows.own_in(total[place], replica)


class ShardGradients(StoredGradients):
    """The gradients of the shards of one unit: DTensors that lie as the shards do.

    All tensors that are passed and returned are this rank's rows.
    """

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = super().of(parameter)
        return None if gradient is None else local_part(gradient)

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        super().put(parameter, None if gradient is None else part_like(parameter, gradient))

    def add(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Add the rows of a sum over the replicas, whose memory becomes the gradient's where there is none."""
        accumulated = self.of(parameter)
        if accumulated is None:
            self.put(parameter, rows)
        else:
            added(accumulated, rows)

    def like(self, parameter: nn.Parameter) -> Tensor:
        full_like = super().like(parameter)
        return full_like.new_empty(()).expand(local_part(parameter).shape)


def _lies_in(leaf: object, memory: Collection[int]) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and memory_of(leaf) in memory
