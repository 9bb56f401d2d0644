"""`Sharded`: parameters of which each replica holds some rows, and all of them only while they are gathered.

    between steps     modules hold shards: `DTensor`s, which the optimizer steps
    UNSHARD           launches a gather of the unit
    its wait          makes memory for whole parameters, fills it, and lets the modules hold these
    REDUCE_GRAD       packs the whole gradients, drops them, and launches one scattered sum
    its wait          adds this replica's rows of the sum to what came before in the step
    the last one's    adds these rows to the gradients of the shards
    RESHARD           lets the modules hold shards, and frees the memory of the whole parameters

So layers and autograd see ordinary parameters, the same objects in every step. What waits for W refers to them while
their memory is gone; it is gathered again before W reads it.

Gradients of a replica add up whole, in their own type; the parts of all replicas are added in the order of replicas.
How many replicas have a gradient of a parameter is summed with the gradients, behind each part. One that none has used
gets none.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.execute.replicas.first_replica import SavedBuffers, Share, share
from penstock.execute.replicas.gathered import Block, GatheredParameter, blocks_of, require_unchanged
from penstock.execute.replicas.lane import ReplicaLane, Serial
from penstock.execute.replicas.packed_parts import PackedParts, WholeGradients, parts_by_type
from penstock.execute.replicas.summed import StageParts
from penstock.execute.values.tensors import memory_of
from penstock.execute.values.tree import map_leaves


class Sharded:
    """The layout of a unit; its parameters are whole until `shard`."""

    launches = True

    def __init__(
        self,
        stages: Mapping[int, StageParts],
        gradients: WholeGradients,
        add_rows: Callable[[nn.Parameter, Tensor], None],
        lane: ReplicaLane,
        mesh: DeviceMesh,
    ) -> None:
        """`stages` are those of the unit; `add_rows` adds to the gradient of a shard, whose memory it may keep."""
        self._stages = stages
        self._gradients = gradients
        self._add_rows = add_rows
        self._lane = lane
        self._mesh = mesh
        self._modules = [module for parts in stages.values() for module in parts.modules]
        self._buffers = SavedBuffers(self._modules)
        self._blocks: Sequence[Block] = ()
        self._gathering: Serial | None = None
        self._is_whole = False
        self._trained: Sequence[GatheredParameter] = ()
        self._packed: Sequence[PackedParts] = ()
        self._sums: list[Tensor] = []
        """Per type of gradients, this replica's rows of what was reduced in this step."""

    def wholes(self) -> list[nn.Parameter]:
        """Return the whole parameters, each once; none before `shard`."""
        return [each.whole for block in self._blocks for each in block.parameters]

    def shard(self) -> dict[nn.Parameter, nn.Parameter]:
        """Keep this replica's rows alone, and let the modules hold shards; return the shard of each parameter."""
        self._blocks, shard_of = blocks_of(self._modules, self._mesh)
        return shard_of

    def held(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters, whole ones having memory while they are gathered, and the gradients of both kinds."""
        wholes, shards = self.wholes(), [each.shard for block in self._blocks for each in block.parameters]
        found = [getattr(each, self._gradients.attribute, None) for each in (*shards, *wholes)]
        gradients = [*self._sums, *(gradient for gradient in found if gradient is not None)]
        return [*(block.own for block in self._blocks), *wholes], gradients

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
        trained = [each for block in self._blocks for each in block.parameters if each.whole.requires_grad]
        if trained != self._trained:
            self._trained, self._packed = trained, parts_by_type(trained, self._gradients, self._lane)

    def unshard(self) -> "_Launched":
        """Launch a gather of the unit."""
        self._gathering = self._lane.gather([block.own for block in self._blocks], self._fill)
        return _Launched(self._lane, self._gathering)

    def reshard(self) -> None:
        """Drop the whole parameters. Raises: PipelineError, where a layer has changed one, which would be lost."""
        if self._gathering is not None:
            self._lane.complete(self._gathering)
        require_unchanged(self._blocks, self._stages)
        self._drop()

    def reduce(self, stage: int, *, is_last: bool) -> "_Launched":
        """Launch the sum of what has come to the gradients of the unit, and drop them."""
        exchange = None
        if self._packed:
            packed = [each.pack() for each in self._packed]
            exchange = self._lane.scatter(packed, partial(self._take_sums, is_last=is_last))
        return _Launched(self._lane, exchange, share(self._lane.transport, self._buffers.now() if is_last else []))

    def after_step(self) -> None: ...

    def end_failed_step(self) -> None:
        self._lane.forget()
        self._gathering, self._sums = None, []
        for each in self.wholes():
            self._gradients.release(each)
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
                for shard, rows in packed.unpacked(total):
                    self._add_rows(shard, rows)
            self._sums = []


class _Launched:
    """A gather or a reduction that is under way, and the buffers that go with it."""

    def __init__(self, lane: ReplicaLane, exchange: Serial | None, buffers: Share | None = None) -> None:
        self._lane, self._exchange, self._shared_buffers = lane, exchange, buffers

    def wait(self) -> None:
        if self._exchange is not None:
            self._lane.complete(self._exchange)
        if self._shared_buffers is not None:
            self._shared_buffers.wait()


def _lies_in(leaf: object, memory: Collection[int]) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and memory_of(leaf) in memory
