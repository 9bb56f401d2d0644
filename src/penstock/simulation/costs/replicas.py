"""The costs of gathers and reductions between another number of replicas.

Each of D replicas stores a part of a stage's weights. A gather brings it the other D - 1 parts, and a reduction takes
its gradients of these parts to where they are stored: (D - 1) / D of the bytes either way. Replicas that store all of
the gradients need both, one after the other.
"""

from dataclasses import replace

from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.movement import ring_s


def of_replicas(costs: Costs, replicas: int, *, is_sharded: bool) -> Costs:
    """Return the costs of a stage in so many replicas, which share out what they store if `is_sharded`.

    Seconds that are given for a number of replicas change as the exchange of their bytes does; those that are given for
    no number stay. An exchange without seconds takes as long as its bytes do between replicas.
    """
    unshard_s = _seconds(costs, "unshard_s", "parameter_bytes", replicas)
    reduce_s = _seconds(costs, "reduce_s", "gradient_bytes", replicas)
    was_sharded = costs.shards > 1
    is_given = any(costs.reduce_s)
    if is_given and costs.replicas > 1:
        share = (1 if is_sharded else 2) / (1 if was_sharded else 2)
    else:
        share = 1 if is_given or is_sharded else 2
    return replace(
        costs,
        unshard_s=unshard_s,
        reduce_s=tuple(share * seconds for seconds in reduce_s),
        replicas=replicas,
        shards=replicas if is_sharded else 1,
    )


def exchange_s(costs: Costs, num_bytes: float, replicas: int) -> float:
    """Return the seconds in which each replica gets the parts of the others; one replica needs none."""
    return ring_s(num_bytes, replicas, costs.replica_bandwidth_bytes_per_s, costs.replica_latency_s)


def _seconds(costs: Costs, name: str, size: str, replicas: int) -> tuple[float, ...]:
    """Return the seconds per stage of an exchange of so many replicas; `name` and `size` are fields of `costs`."""
    cost_s: tuple[float, ...] = getattr(costs, name)
    num_bytes: tuple[float, ...] = getattr(costs, size)
    count = max(len(cost_s), len(num_bytes))
    bytes_of_stage = num_bytes * count if len(num_bytes) == 1 else num_bytes
    if not any(cost_s):
        return tuple(exchange_s(costs, stage_bytes, replicas) for stage_bytes in bytes_of_stage)
    if costs.replicas == 1:
        return tuple(cost_s)
    seconds_of_stage = cost_s * count if len(cost_s) == 1 else cost_s
    stages = zip(seconds_of_stage, bytes_of_stage, strict=True)
    return tuple(seconds * _growth(costs, stage_bytes, replicas) for seconds, stage_bytes in stages)


def _growth(costs: Costs, num_bytes: float, replicas: int) -> float:
    """Return how many times as long an exchange takes as between the replicas of the costs."""
    known_s = exchange_s(costs, num_bytes, costs.replicas)
    if known_s:
        return exchange_s(costs, num_bytes, replicas) / known_s
    return (1 - 1 / replicas) / (1 - 1 / costs.replicas)
