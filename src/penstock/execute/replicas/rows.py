"""`Rows`: how the rows of one parameter are shared out over replicas, as `DTensor` shares out `Shard(0)`.

    replica 0   rows 0 1        each replica has as many rows, the last ones fewer or none;
    replica 1   rows 2 3        in buffers, all have as many: the missing ones are zeros
    replica 2   row  4 -

Each replica has a scalar as a whole, since it has no row.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from penstock.execute.values.tensors import Order, memory_order, stored


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one parameter; a row is whatever lies along its first dimension."""

    shape: torch.Size
    order: Order
    """Order of the dimensions in memory, the rows being outermost."""
    num_replicas: int

    @classmethod
    def of(cls, parameter: Tensor, num_replicas: int) -> "Rows":
        """Return the rows of a parameter. One whose rows do not lie one after another gets contiguous memory."""
        order = memory_order(parameter)
        return cls(parameter.shape, order if order[:1] == (0,) else (), num_replicas)

    @property
    def is_scalar(self) -> bool:
        return not self.shape

    @property
    def num_rows(self) -> int:
        return 1 if self.is_scalar else self.shape[0]

    @property
    def per_replica(self) -> int:
        """The number of rows that each replica has room for."""
        return -(-self.num_rows // self.num_replicas)

    @property
    def row_elements(self) -> int:
        return prod(self.shape[1:])

    @property
    def part_elements(self) -> int:
        """The number of elements in the part of one replica."""
        return self.per_replica * self.row_elements

    def whole_in(self, memory: Tensor) -> Tensor:
        """Return a view of the whole parameter in the memory of all parts: [D x part]."""
        return self._view(memory, self.num_rows)

    def own_in(self, part: Tensor, replica: int) -> Tensor:
        """Return a view of a replica's rows in the memory of its part."""
        return self._view(part, len(self.of_replica(replica)))

    def of_replica(self, replica: int) -> range:
        """Return the numbers of a replica's rows."""
        if self.is_scalar:
            return range(1)
        first = min(replica * self.per_replica, self.num_rows)
        return range(first, min(first + self.per_replica, self.num_rows))

    def take_own(self, tensor: Tensor, part: Tensor, replica: int) -> None:
        """Copy a replica's rows of a whole tensor of this shape into its part."""
        rows = self.of_replica(replica)
        self.own_in(part, replica).copy_(tensor if self.is_scalar else tensor[rows.start : rows.stop])

    def share_out(self, tensor: Tensor, parts: Tensor) -> None:
        """Copy a whole tensor of this shape into the parts of all replicas: [D, part]."""
        if self.is_scalar:
            parts.copy_(tensor.reshape(1).expand_as(parts))
            return
        rows = stored(tensor, self.order).reshape(self.num_rows, self.row_elements)
        num_full, rest = divmod(self.num_rows, self.per_replica) if self.per_replica else (0, 0)
        parts[:num_full].copy_(rows[: num_full * self.per_replica].reshape(num_full, self.part_elements))
        if num_full < self.num_replicas:
            parts[num_full:].zero_()
            if rest:
                parts[num_full, : rest * self.row_elements].copy_(rows[-rest:].reshape(-1))

    def _view(self, memory: Tensor, num_rows: int) -> Tensor:
        if self.is_scalar:
            return memory[0]
        row = [self.shape[dim] for dim in self.order[1:]] if self.order else self.shape[1:]
        stored_rows = memory[: num_rows * self.row_elements].view(num_rows, *row)
        if not self.order:
            return stored_rows
        # The order of dimensions that undoes `self.order`.
        return stored_rows.permute(sorted(range(len(self.order)), key=lambda dim: self.order[dim]))
