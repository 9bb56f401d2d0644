"""`Cluster`: equal nodes of equal devices, and the links between them.

    pipeline 2 x data 4 on two nodes of four devices

    node 0     device 0   1   2   3        rank 0 of the pipeline, in its four replicas
    node 1     device 4   5   6   7        rank 1

The replicas of a stage are neighbors, as `penstock train` numbers processes: they exchange over the link within a node
where a node holds all of them.
"""

from dataclasses import dataclass

from penstock.errors import ConfigError, count_of
from penstock.simulation.costs.costs import Channel

MOST_GPUS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A link as one device uses it: seconds before the first byte, and bytes per second that arrive."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Raises:
        ConfigError: for numbers that are none of devices or nodes, and devices that the nodes cannot share evenly.
    """

    gpus: int
    nodes: int = 1
    memory_bytes: int
    """The memory of a device."""
    reserve_bytes: int = 0
    """Bytes of it that are no tensors of a run."""
    within: Wire | None = None
    """The link between devices of one node; None: messages take what the costs say."""
    between: Wire | None = None
    """The link between nodes; None: as within a node."""

    def __post_init__(self) -> None:
        for key, number, most in (("gpus", self.gpus, MOST_GPUS), ("nodes", self.nodes, self.gpus)):
            if not 1 <= number <= most:
                raise ConfigError(f"{number}; expected a number from 1 to {most:,}", key=key)
        if self.gpus % self.nodes:
            divisors = [number for number in range(1, self.gpus + 1) if self.gpus % number == 0]
            nearest = sorted(sorted(divisors, key=lambda number: abs(number - self.nodes))[:2])
            raise ConfigError(
                f"{self.gpus} GPUs do not divide by {count_of(self.nodes, 'node')}; use "
                f"{' or '.join(map(str, nearest))} nodes, or {self._nearest_gpus()} GPUs",
                key="nodes",
            )

    def _nearest_gpus(self) -> str:
        below = self.gpus - self.gpus % self.nodes
        return " or ".join(str(number) for number in (below, below + self.nodes) if number)

    @property
    def limit_bytes(self) -> int:
        """The bytes that a rank may hold of tensors."""
        return self.memory_bytes - self.reserve_bytes

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    def replica_wire(self, pipeline: int, data: int) -> Wire | None:
        """Return the slowest link over which the replicas of some stage exchange; None: as the costs say."""
        groups = (range(rank * data, (rank + 1) * data) for rank in range(pipeline))
        crosses = any(self._node(group[0]) != self._node(group[-1]) for group in groups)
        return self.between or self.within if crosses else self.within

    def channels(self, pipeline: int, data: int) -> tuple[Channel, ...]:
        """Return the channels between ranks of a pipeline that cross from node to node in some replica."""
        wire = self.between
        if wire is None or self.nodes == 1:
            return ()
        pairs = [(sender, receiver) for sender in range(pipeline) for receiver in range(pipeline) if sender != receiver]
        crossing = (pair for pair in pairs if self._crosses(*pair, data))
        return tuple(Channel(*pair, wire.latency_s, wire.bandwidth_bytes_per_s) for pair in crossing)

    def _crosses(self, sender: int, receiver: int, data: int) -> bool:
        """Whether a message between two ranks leaves its node in some replica."""
        replicas = range(data)
        return any(self._node(sender * data + one) != self._node(receiver * data + one) for one in replicas)

    def _node(self, device: int) -> int:
        return device // self.gpus_per_node
