"""Replicas on the command line: `--data`, `--shard`, `--residency` and `--look-ahead`."""

from argparse import Namespace

from penstock.errors import ConfigError, described
from penstock.lowering import FULL, NONE, NOT_SHARDED, Sharding
from penstock.simulation import Costs
from penstock.simulation.costs.replicas import of_replicas

KEYS = ("data", "shard", "residency", "look_ahead")
"""What the options are called in a `Namespace`."""


def sharding_of(arguments: Namespace) -> Sharding:
    """Return what is shared out, and how.

    Raises:
        ConfigError: for anything but one of the ways to shard, a number below 0, and an option without the one that it
            belongs to.
    """
    shard = NONE if arguments.shard is None else arguments.shard
    if arguments.residency is not None and shard != FULL:
        raise ConfigError("only for --shard full, which keeps few stages whole; leave it out", key="--residency")
    if arguments.look_ahead is not None and shard == NONE:
        raise ConfigError("only for --shard full or optimizer, which gather; leave it out", key="--look-ahead")
    residency = NOT_SHARDED.residency if arguments.residency is None else arguments.residency
    look_ahead = NOT_SHARDED.look_ahead if arguments.look_ahead is None else arguments.look_ahead
    for key, number, fix in (("--residency", residency or 0, ", or 0 for all"), ("--look-ahead", look_ahead, "")):
        if number < 0:
            raise ConfigError(f"{number}; give a number of 1 or more{fix}", key=key)
    sharding = Sharding(shard, residency or None, look_ahead)
    try:
        sharding.passes  # noqa: B018  # it refuses an unknown way to shard
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.key}: "), key="--shard") from None
    return sharding


def replicas_of(arguments: Namespace, default: int) -> int | None:
    """Return the number of replicas, or None where neither it nor a way to shard is given.

    `default` is what counts where only a way to shard is given. Raises: ConfigError, for a number below 1.
    """
    if arguments.data is None:
        return None if arguments.shard is None else default
    if arguments.data < 1:
        raise ConfigError(f"{described(arguments.data)}; give a number of replicas, 1 or more", key="--data")
    return int(arguments.data)


def costs_of_replicas(arguments: Namespace, costs: Costs) -> Costs:
    """Return the costs of a stage in so many replicas; raises ConfigError, as the others."""
    replicas = replicas_of(arguments, costs.replicas)
    if replicas is None:
        return costs
    return of_replicas(costs, replicas, is_sharded=sharding_of(arguments).shard != NONE)
