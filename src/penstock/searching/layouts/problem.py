"""`LayoutProblem`: what the layers of a model cost in one layout, and what a rank may hold."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.lowering import NONE, OPTIMIZER, Sharding
from penstock.searching.layouts.cluster import Cluster, Wire
from penstock.searching.layouts.layout import Choices, Layout, layouts_of
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.costs.replicas import of_replicas

Floats = NDArray[np.float64]
RANGE_OF_MEASURED = (0.95, 1.05)
"""The seconds of a step of which a prediction from measured costs is told, as shares of it."""


CostsOf = Callable[[int, str], LayerCosts]
"""Returns the costs of the layers of a model, for one microbatch of so many sequences and a kind of checkpointing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """What is asked: a model by its costs, the cluster, and the batch of a step."""

    cluster: Cluster
    costs_of: CostsOf
    global_batch: int
    """Sequences of a step, over all replicas."""
    sequence_length: int
    choices: Choices = field(default_factory=Choices)
    seconds_range: tuple[float, ...] = RANGE_OF_MEASURED
    """The shares of a predicted step between which a measured one is expected."""

    def problems(self) -> list["LayoutProblem"]:
        """Return the problem of every layout. Raises: ConfigError, where there is no layout."""
        choices = self.choices
        costs = {
            (size, kind): self.costs_of(size, kind)
            for size in choices.microbatch_sizes
            for kind in choices.checkpointing
        }
        num_layers = next(iter(costs.values())).num_layers
        layouts = layouts_of(self.cluster.gpus, num_layers, self.global_batch, choices)
        return [
            LayoutProblem.of(layout, costs[layout.microbatch_size, layout.checkpointing], self.cluster)
            for layout in layouts
        ]


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """One layout, its costs per layer, and the limit of a rank."""

    layout: Layout
    costs: LayerCosts
    """The costs of a layer on one device of the layout, with the links that its ranks have."""
    limit_bytes: int

    @classmethod
    def of(cls, layout: Layout, costs: LayerCosts, cluster: Cluster) -> "LayoutProblem":
        """Return the problem of a layout on a cluster, from what layers cost with a microbatch of its size."""
        changes: dict[str, Any] = {}
        if cluster.within is not None:
            changes |= _fields_of_wire(cluster.within)
            changes["channels"] = cluster.channels(layout.pipeline, layout.data)
        wire = cluster.replica_wire(layout.pipeline, layout.data)
        if wire is not None:
            changes |= {f"replica_{name}": value for name, value in _fields_of_wire(wire).items()}
        shards = 1 if layout.shard == NONE else layout.data
        if costs.optimizer:  # each replica updates its part; those that were measured updated one of `costs.shards`
            changes["optimizer"] = tuple(seconds * costs.shards / shards for seconds in costs.optimizer)
        return cls(layout, replace(costs, split=(), **changes), cluster.limit_bytes)

    @property
    def num_layers(self) -> int:
        return self.costs.num_layers

    @property
    def shards(self) -> int:
        """The parts in which replicas store what is always there."""
        return 1 if self.layout.shard == NONE else self.layout.data

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.layout.shard)

    def stage_costs(self, stage_layers: Any, table: Any) -> Costs:
        """Return what stages cost that have these layers, with the exchanges of their replicas."""
        costs = self.costs.of_table(table, stage_layers)
        return of_replicas(costs, self.layout.data, is_sharded=self.layout.shard != NONE)

    def of_layers(self, name: str) -> Floats:
        """[num_layers] a field of the costs; 0 where it is not given."""
        if not getattr(self.costs, name):
            return np.zeros(self.num_layers)
        return np.array(self.costs.spread_out(name, self.num_layers, "layer"), np.float64)

    @cached_property
    def static_bytes(self) -> Floats:
        """[num_layers] bytes of parameters, gradients and optimizer state that a rank stores, or its shards of them."""
        names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        return np.asarray(sum(self.of_layers(name) for name in names) / self.shards)

    @property
    def whole_weights(self) -> Floats:
        """[num_layers] bytes of a layer's whole weights beside its shards, while it is gathered."""
        return self.of_layers("parameter_bytes") * (self.layout.shard != NONE)

    @property
    def whole_gradients(self) -> Floats:
        """[num_layers] bytes of a layer's whole gradients beside its shards, from a backward to their reduction."""
        return self.of_layers("gradient_bytes") * (self.layout.shard != NONE)

    @cached_property
    def resident_costs(self) -> LayerCosts:
        """The costs for what knows no gathers: bytes that are always there in place of shards.

        Replicas that gather once a step hold all weights of a rank whole at some time. What is whole beside them comes
        and goes, and is left out, so that these bytes are no more than those of a program.
        """
        static = self.static_bytes + self.whole_weights * (self.layout.shard == OPTIMIZER)
        resident = tuple(np.ceil(static).astype(int).tolist())
        return replace(self.costs, parameter_bytes=(0,), gradient_bytes=(0,), optimizer_bytes=resident, shards=1)

    @cached_property
    def seconds(self) -> Floats:
        """[num_layers] seconds of a forward and a whole backward of one microbatch."""
        return np.asarray(self.costs.seconds_of_layers.sum(axis=0))


def _fields_of_wire(wire: Wire) -> dict[str, float]:
    return {"latency_s": wire.latency_s, "bandwidth_bytes_per_s": wire.bandwidth_bytes_per_s}


def measured_costs(costs: LayerCosts, microbatch_size: int, checkpointing: str) -> CostsOf:
    """Return costs of one size of microbatches and one kind of checkpointing, with which they were measured."""

    def costs_of(size: int, kind: str) -> LayerCosts:
        if (size, kind) != (microbatch_size, checkpointing):
            raise ConfigError(
                f"they were measured with microbatches of {microbatch_size} and checkpointing {checkpointing!r}, not "
                f"{size} and {kind!r}; measure again, with penstock profile",
                key="costs",
            )
        return costs

    return costs_of
