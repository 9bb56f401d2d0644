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
    in_part: slice
    """Where its rows are in the part of a replica."""
    whole: nn.Parameter
    filled: Tensor
    """The memory of `whole`: [D, elements of a part]."""
    shard: nn.Parameter
    holders: Sequence[Holder]


class Block:
    """The parameters of a unit that have one type."""

    def __init__(self, held: Mapping[nn.Parameter, Sequence[Holder]], mesh: DeviceMesh) -> None:
        """`held` has the parameters, still whole, each with those that hold it. The modules hold shards afterwards."""
        (replica,), self._num_replicas = mesh.get_coordinate() or [0], mesh.size()
        early = {parameter: early_rows(parameter) for parameter in held}
        rows = {each: Rows.of(each, self._num_replicas) if (left := early[each]) is None else left[0] for each in held}
        like = next(iter(held)).detach()
        self.own = like.new_zeros(sum(each.part_elements for each in rows.values()))
        """[part]"""
        self._memory = like.new_empty(self._num_replicas * self.own.numel()).untyped_storage()
        self._num_bytes = self._memory.nbytes()
        self.parameters: list[GatheredParameter] = []
        self._versions: list[int] = []
        """Of the whole parameters, when they were filled."""
        begin = 0
        for parameter, own in rows.items():
            in_part = slice(begin, begin + own.part_elements)
            part = self.own[in_part]
            if (left := early[parameter]) is None:
                own.take_own(parameter.detach(), part, replica)
            else:
                part.copy_(left[1])
            whole = own.whole_in(self._view(begin, self._num_replicas * own.part_elements))
            filled = self._view(begin, self._num_replicas, own.part_elements)
            self.parameters.append(
                GatheredParameter(
                    own,
                    in_part,
                    _like(whole, parameter),
                    filled,
                    _like(as_shard(own.own_in(part, replica), mesh, own.shape, whole.stride()), parameter),
                    held[parameter],
                )
            )
            begin = in_part.stop
        self.drop()

    @property
    def address(self) -> int:
        """Where the whole parameters are, 0 while they have no memory."""
        return self._memory.data_ptr()

    def begin_step(self) -> None:
        """Train what the caller wants trained."""
        for each in self.parameters:
            if each.whole.requires_grad is not each.shard.requires_grad:
                each.whole.requires_grad_(each.shard.requires_grad)

    def fill(self, gathered: Tensor) -> None:
        """Let the modules hold whole parameters, from the parts of all replicas: [D x part]."""
        self._memory.resize_(self._num_bytes)
        parts = gathered.view(self._num_replicas, -1)
        with torch.no_grad():
            for each in self.parameters:
                each.filled.copy_(parts[:, each.in_part])
        for each in self.parameters:
            for module, name in each.holders:
                put_parameter(module, name, each.whole)
        self._versions = [version_of(each.whole) for each in self.parameters]

    def drop(self) -> None:
        """Let the modules hold shards, and free the whole parameters."""
        for each in self.parameters:
            for module, name in each.holders:
                put_parameter(module, name, each.shard)
        self._memory.resize_(0)

    def changed(self) -> str:
        """Name a whole parameter that somebody has changed since it was filled; empty where all are as they were."""
        pairs = zip(self.parameters, self._versions, strict=True)
        changed = next((each for each, version in pairs if version_of(each.whole) != version), None)
        return "" if changed is None else f"{type(changed.holders[0][0]).__name__}.{changed.holders[0][1]}"

    def _view(self, begin: int, *shape: int) -> Tensor:
        """Return a tensor in the memory of whole parameters, with a version counter of its own."""
        strides = torch.empty(shape, device="meta").stride()
        return self.own.new_empty(0).set_(self._memory, self._num_replicas * begin, shape, strides)


def blocks_of(modules: Iterable[nn.Module], mesh: DeviceMesh) -> tuple[list[Block], dict[nn.Parameter, nn.Parameter]]:
    """Shard the parameters of some modules, each once; return the shard of each, too."""
    held: dict[nn.Parameter, list[Holder]] = {}
    for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            held.setdefault(parameter, []).append((module, name))
    by_type: dict[tuple[torch.dtype, torch.device], dict[nn.Parameter, list[Holder]]] = {}
    for parameter, holders in held.items():
        by_type.setdefault((parameter.dtype, parameter.device), {})[parameter] = holders
    blocks = [Block(own, mesh) for own in by_type.values()]
    shards = [each.shard for block in blocks for each in block.parameters]
    return blocks, dict(zip(chain.from_iterable(by_type.values()), shards, strict=True))


def require_unchanged(blocks: Sequence[Block], stages: Iterable[int]) -> None:
    """Make sure that no layer has changed a whole parameter, which would be lost. Raises: PipelineError."""
    for name in filter(None, (block.changed() for block in blocks)):
        raise PipelineError(
            f"stage {min(stages)}: {name} was changed in place while a step ran, but is sharded over replicas, so that "
            "the change would be lost; change it between steps, or keep what a forward changes in a buffer"
        )


def _like(values: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with these values, and the attributes of another one."""
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    made.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != OWN_ROWS})
    return made
