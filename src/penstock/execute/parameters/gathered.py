"""`Block`: the parameters of a unit that have one type: this replica's rows in one piece of memory, and the whole ones.

    own       a0 a1 | b0 b1             the rows of this replica, one parameter after another: shards are views of it
    memory    a0 a1 a2 a3 | b0 b1 b2    the whole parameters, which are views of it; freed between uses

The memory of whole parameters is filled through tensors with version counters of their own. So autograd accepts a
weight that it has saved before the memory was freed. To read a parameter whose memory is freed may end the process:
modules hold shards meanwhile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PipelineError
from penstock.execute.replicas.early import OWN_ROWS, early_rows
from penstock.execute.replicas.rows import Rows
from penstock.execute.undocumented import version_of
from penstock.execute.undocumented_modules import put_parameter
from penstock.execute.values.tensors import as_shard

Holder = tuple[nn.Module, str]
"""A module, and the name under which it holds a parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class GatheredParameter:
    """One parameter of a unit."""

    rows: Rows
    slice_in_part: slice
    """The place of its rows in the part of a replica."""
    unsharded: nn.Parameter
    unsharded_parts: Tensor
    """The memory of `unsharded`: [D, elements of a part]."""
    shard: nn.Parameter
    holders: Sequence[Holder]


class Block:
    """The parameters of a unit that have one type."""

    def __init__(self, holders_by_parameter: Mapping[nn.Parameter, Sequence[Holder]], mesh: DeviceMesh) -> None:
        """Shard some parameters of one dtype over the replicas of `mesh`: this replica keeps its rows of each alone.

        `holders_by_parameter` has the modules that hold each parameter, which is still whole, and its name there. All
        shards lie in one piece of memory, `local_part`. A second piece, `_memory`, has room for the whole parameters,
        and is allocated only between a gather and its end. The modules hold shards afterwards.
        """
        (replica,), self._num_replicas = mesh.get_coordinate() or [0], mesh.size()
        # `Rows` says which rows of a parameter each replica has. A parameter that was sharded when it was built has
        # only its rows left (an early part); any other is whole.
        early_parts = {parameter: early_rows(parameter) for parameter in holders_by_parameter}
        rows_by_parameter = {
            parameter: Rows.of(parameter, self._num_replicas) if early_part is None else early_part[0]
            for parameter, early_part in early_parts.items()
        }
        like = next(iter(holders_by_parameter)).detach()
        self.local_part = like.new_zeros(sum(rows.part_elements for rows in rows_by_parameter.values()))
        """The rows of this replica: [part]."""
        self._memory = like.new_empty(self._num_replicas * self.local_part.numel()).untyped_storage()
        self._num_bytes = self._memory.nbytes()
        self.parameters: list[GatheredParameter] = []
        self._versions: list[int] = []
        """Versions of the whole parameters when they were filled."""
        # Both pieces of memory have the parameters one after another; `begin` counts the elements of this replica's
        # part. In `_memory` the parts of all replicas of one parameter follow each other: that is the whole parameter.
        begin = 0
        for parameter, rows in rows_by_parameter.items():
            slice_in_part = slice(begin, begin + rows.part_elements)
            part = self.local_part[slice_in_part]
            if (early_part := early_parts[parameter]) is None:
                rows.take_own(parameter.detach(), part, replica)
            else:
                part.copy_(early_part[1])
            unsharded = rows.whole_in(self._view(begin, self._num_replicas * rows.part_elements))
            shard = as_shard(rows.own_in(part, replica), mesh, rows.shape, unsharded.stride())
            self.parameters.append(
                GatheredParameter(
                    rows,
                    slice_in_part,
                    unsharded=_parameter_like(unsharded, parameter),
                    unsharded_parts=self._view(begin, self._num_replicas, rows.part_elements),
                    shard=_parameter_like(shard, parameter),
                    holders=holders_by_parameter[parameter],
                )
            )
            begin = slice_in_part.stop
        self.drop()  # lets the modules hold shards, and frees `_memory`

    @property
    def address(self) -> int:
        """Where the whole parameters are, 0 while they have no memory."""
        return self._memory.data_ptr()

    def begin_step(self) -> None:
        """Train what the caller wants trained."""
        for parameter in self.parameters:
            if parameter.unsharded.requires_grad is not parameter.shard.requires_grad:
                parameter.unsharded.requires_grad_(parameter.shard.requires_grad)

    def fill(self, parts_of_replicas: Tensor) -> None:
        """Let the modules hold whole parameters, from the parts of all replicas: [D x part]."""
        self._memory.resize_(self._num_bytes)
        parts = parts_of_replicas.view(self._num_replicas, -1)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.unsharded_parts.copy_(parts[:, parameter.slice_in_part])
        for parameter in self.parameters:
            for module, name in parameter.holders:
                put_parameter(module, name, parameter.unsharded)
        self._versions = [version_of(parameter.unsharded) for parameter in self.parameters]

    def drop(self) -> None:
        """Let the modules hold shards, and free the whole parameters."""
        for parameter in self.parameters:
            for module, name in parameter.holders:
                put_parameter(module, name, parameter.shard)
        self._memory.resize_(0)

    def name_of_changed(self) -> str:
        """Name a whole parameter that somebody has changed since it was filled; empty where all are as they were."""
        for parameter, version in zip(self.parameters, self._versions, strict=True):
            if version_of(parameter.unsharded) != version:
                module, name = parameter.holders[0]
                return f"{type(module).__name__}.{name}"
        return ""

    def _view(self, begin: int, *shape: int) -> Tensor:
        """Return a tensor in the memory of whole parameters, with a version counter of its own."""
        strides = torch.empty(shape, device="meta").stride()
        return self.local_part.new_empty(0).set_(self._memory, self._num_replicas * begin, shape, strides)


def blocks_of(modules: Iterable[nn.Module], mesh: DeviceMesh) -> tuple[list[Block], dict[nn.Parameter, nn.Parameter]]:
    """Shard the parameters of some modules, each once; return the shard of each, too."""
    holders_by_parameter: dict[nn.Parameter, list[Holder]] = {}
    for module in dict.fromkeys(chain.from_iterable(root.modules() for root in modules)):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders_by_parameter.setdefault(parameter, []).append((module, name))
    holders_by_type: dict[tuple[torch.dtype, torch.device], dict[nn.Parameter, list[Holder]]] = {}
    for parameter, holders in holders_by_parameter.items():
        holders_by_type.setdefault((parameter.dtype, parameter.device), {})[parameter] = holders
    blocks = [Block(holders_of_type, mesh) for holders_of_type in holders_by_type.values()]
    shards = [parameter.shard for block in blocks for parameter in block.parameters]
    return blocks, dict(zip(chain.from_iterable(holders_by_type.values()), shards, strict=True))


def require_unchanged(blocks: Sequence[Block], stages: Iterable[int]) -> None:
    """Make sure that no layer has changed a whole parameter, which would be lost. Raises: PipelineError."""
    for name in filter(None, (block.name_of_changed() for block in blocks)):
        raise PipelineError(
            f"stage {min(stages)}: {name} was changed in place while a step ran, but is sharded over replicas, so that "
            "the change would be lost; change it between steps, or keep what a forward changes in a buffer"
        )


def _parameter_like(values: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with these values, and the attributes of another one."""
    new_parameter = nn.Parameter(values, requires_grad=parameter.requires_grad)
    new_parameter.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != OWN_ROWS})
    return new_parameter
