"""`ShardGradients`: the gradients of shards, of which this rank has some rows; DTensors that lie as the shards do."""

from torch import Tensor, nn

from penstock.execute.parameters.gradient_store import StoredGradients
from penstock.execute.parameters.gradient_sums import added
from penstock.execute.values.tensors import local_part, part_like


class ShardGradients(StoredGradients):
    """Those of one unit; all tensors that are passed and returned are this rank's rows."""

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = super().of(parameter)
        return None if gradient is None else local_part(gradient)

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        super().put(parameter, None if gradient is None else part_like(parameter, gradient))

    def add(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Add the rows of a sum over the replicas, whose memory becomes the gradient's where there is none."""
        before = self.of(parameter)
        if before is None:
            self.put(parameter, rows)
        else:
            added(before, rows)

    def like(self, parameter: nn.Parameter) -> Tensor:
        whole = super().like(parameter)
        return whole.new_empty(()).expand(local_part(parameter).shape)
