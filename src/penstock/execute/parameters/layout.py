"""`ParameterLayout`: how the parameters of one unit lie, in whole or in parts, and what a step does about it.

UNSHARD        launches a gather; the first computation of the stage behind it waits for its ticket
REDUCE_GRAD    launches a reduction; REDUCE_TIED, STEP and the end of the program wait for its ticket
RESHARD        drops what was gathered
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.execute.replicas.exchanges import ReplicaExchanges, Serial
from penstock.execute.replicas.first_replica import Share


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """An exchange between replicas that is under way, and the buffers of modules that go with it."""

    exchanges: ReplicaExchanges
    exchange: Serial | None
    buffers: Share | None = None

    def wait(self) -> None:
        """Return when the exchange and the buffers are over. Raises: PeerLost, DeadlineExceeded."""
        if self.exchange is not None:
            self.exchanges.complete(self.exchange)
        if self.buffers is not None:
            self.buffers.wait()

    def give_up(self) -> None:
        """Do nothing: a failed step aborts the transports, and the exchanges with them."""


@dataclass(frozen=True, slots=True, eq=False)
class StageParts:
    """The parameters and modules of a stage."""

    parameters: Callable[[], Sequence[nn.Parameter]]
    """Returns the parameters that the stage holds now."""
    modules: Sequence[nn.Module]


class ParameterLayout:
    """The parameters of a unit: of one stage, or of stages that share some.

    Here every replica holds them as a whole, and nobody reduces. Other layouts say what they do besides.
    """

    launches = False
    """Whether `unshard` and `reduce` return tickets; else they are done when they return."""
    reduces_in_backward = False
    """Whether `begin_last_backward` does anything."""

    def shard(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Keep this replica's part of the parameters alone; return, by parameter, what modules hold in its place."""
        return {}

    def held(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return parameters and gradients that are held beside those of the modules."""
        return (), ()

    def copier(self) -> Callable[[Any], Any] | None:
        """Return what copies the tensors of a value that lie in memory which `reshard` drops; None where none do."""
        return None

    def begin_step(self, *, is_synced: bool, sums_tied: bool, is_training: bool) -> None:
        """Begin a step; unless `is_synced`, replicas reduce none but those of tied parameters, if these are summed."""

    def begin_last_backward(self, stage: int) -> None:
        """Begin the last whole backward of a stage in a step."""

    def unshard(self) -> Launched | None:
        """Make the parameters whole."""
        return None

    def reshard(self) -> None:
        """Go back to this rank's part."""

    def reduce(self, stage: int, *, is_last: bool) -> Launched | None:
        """Add up over the replicas what has come to the gradients of a stage; nothing comes behind the last one."""
        return None

    def end_step(self) -> None:
        """End a step, also one that has failed."""

    def end_failed_step(self) -> None:
        """Leave nothing of a step behind; called before `end_step`."""
