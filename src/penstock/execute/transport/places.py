"""`Places`: where a rank is in a job, which is a pipeline and its replicas, and the transport along each dimension.

                pipeline 0    pipeline 1
    data 0      rank 0  ────  rank 1        a replica: messages of the pipeline go along `pipeline`,
                  │             │
    data 1      rank 2  ────  rank 3        reductions along `data`

Lists of all ranks are one replica after another. A rank that aborts does so along both dimensions: its peers of either
one hear of it and abort too, so after two hops all ranks have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from penstock.execute.transport.backend_links import abort_all
from penstock.execute.transport.protocol import Transport, WaitObserver
from penstock.execute.transport.rank_names import RankNames, rank_names

T = TypeVar("T")
PIPELINE, DATA = "pipeline", "data"
"""Names of the dimensions of a job."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The ranks of a job, seen from one of them."""

    pipeline: Transport
    """Transport to the ranks of the same replica."""
    data: Transport | None
    """Transport to the ranks that hold the same stages; None where there is one replica."""
    names: RankNames
    """Names of all ranks, by index."""
    mesh: DeviceMesh | None = None
    """Mesh of the ranks that hold the same stages, over which parameters are sharded."""

    @classmethod
    def of(cls, transport: Transport) -> Self:
        """Return the places of a pipeline without replicas."""
        return cls(transport, None, rank_names(transport))

    @property
    def transports(self) -> list[Transport]:
        """The transport of each dimension."""
        return [self.pipeline] if self.data is None else [self.pipeline, self.data]

    @property
    def replica(self) -> int:
        return 0 if self.data is None else self.data.rank

    @property
    def num_replicas(self) -> int:
        return 1 if self.data is None else self.data.num_ranks

    @property
    def index(self) -> int:
        """This rank's place in lists of all ranks."""
        return self.replica * self.pipeline.num_ranks + self.pipeline.rank

    @property
    def name(self) -> str:
        """This rank's name."""
        return self.names[self.index]

    @property
    def names_of_replica(self) -> RankNames:
        """Names of the ranks of this replica, by their places along the pipeline."""
        return self.names if self.data is None else self.names.select(self.replica_of(self.replica))

    def replica_of(self, replica: int) -> range:
        """Return the indices of the ranks of a replica."""
        return range(replica * self.pipeline.num_ranks, (replica + 1) * self.pipeline.num_ranks)

    @property
    def across(self) -> range:
        """The indices of the ranks that hold the same stages, by replica."""
        return range(self.pipeline.rank, len(self.names.numbers), self.pipeline.num_ranks)

    def within_replica(self, of_number: Callable[[int], T]) -> Callable[[int], T]:
        """Turn a function of a rank's number into one of a rank's place along the pipeline of this replica."""
        numbers = self.names_of_replica.numbers
        return of_number if isinstance(numbers, range) else lambda rank: of_number(numbers[rank])

    def watch(self, observer: WaitObserver) -> None:
        """Tell the observer of every wait along any dimension."""
        for transport in self.transports:
            transport.watch(observer)

    def abort(self) -> None:
        """Give up every message of every dimension."""
        abort_all(self.transports, self.pipeline.deadline_s)

    def recover(self) -> None:
        """Start afresh together with all ranks of the job. Raises: DeadlineExceeded, PeerLost."""
        for transport in self.transports:
            transport.recover()

    def close(self) -> None:
        """Release everything."""
        first_error: BaseException | None = None
        for transport in self.transports:
            try:
                transport.close()
            except BaseException as error:  # the others are closed all the same
                first_error = first_error or error
        if first_error is not None:
            raise first_error
