"""The costs that a command was given, how costs per layer are split over stages, and what replicas share.

The options are `--costs` and `--split`; `--data`, `--shard`, `--residency` and `--look-ahead`.
"""

import re
from argparse import Namespace
from dataclasses import replace

from penstock.errors import ConfigError, count_of, cut, described, shortened
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import FULL, NONE, NOT_SHARDED, Sharding
from penstock.partition.split import split_text
from penstock.planning import layers_of_stages, stage_costs
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.equal_work import ranks_of_layers
from penstock.simulation.costs.file import AnyCosts, load_costs
from penstock.simulation.costs.heavy import with_heavy_entries
from penstock.simulation.costs.layer_costs import split_sizes
from penstock.simulation.costs.replicas import of_replicas

SPLIT = "--split"

HEAVY = "--heavy"
_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}")
_HEAVY = re.compile(r"\s*([0-9]{1,9})\s*=\s*([0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*")


def given_costs(arguments: Namespace, text: str) -> AnyCosts:
    """Read costs, multiplied as `--heavy` says; costs per layer get the split of `--split` in place of their own.

    Raises:
        ConfigError, FormatError: for costs that are none, a split that is none of their layers, ranks or layers that
            there are not, and costs per layer with `--per-action`.
    """
    costs = _split_costs(arguments, text)
    if arguments.per_action and isinstance(costs, LayerCosts):
        raise ConfigError(f"{text} has costs per layer, not per action; leave it out", key="--per-action")
    factors = _heavy_factors(arguments)
    if not factors:
        return costs
    if isinstance(costs, LayerCosts):
        return _heavy_layers(costs, factors)
    if arguments.ranks is None:
        raise ConfigError(f"{arguments.heavy} names ranks; say with --ranks P how many there are", key=HEAVY)
    if arguments.per_action:
        raise ConfigError("not with --per-action, whose costs are of stages; leave one out", key=HEAVY)
    _require_entries(factors, arguments.ranks, "rank")
    try:
        return with_heavy_entries(costs, factors, arguments.ranks, "rank")
    except ConfigError as error:
        problem = f"{arguments.heavy} multiplies what ranks take, but {error.key} has {error.problem}"
        raise ConfigError(problem, key=HEAVY) from None


def _heavy_layers(costs: LayerCosts, factors: dict[int, float]) -> LayerCosts:
    _require_entries(factors, costs.num_layers, "layer")
    return with_heavy_entries(costs, factors, costs.num_layers, "layer")


def _heavy_stages(costs: Costs, factors: dict[int, float], table: Schedule | Program) -> Costs:
    """Multiply the seconds of the stages of ranks that have a factor."""
    _require_entries(factors, table.num_ranks, "rank")
    ranks = enumerate(ranks_of_layers(table.placement))
    factors_by_stage = {stage: factors[rank] for stage, rank in ranks if rank in factors}
    return with_heavy_entries(costs, factors_by_stage, table.num_stages, "stage")


def _require_entries(factors: dict[int, float], count: int, noun: str) -> None:
    """Refuse a rank or layer that there is not. Raises: ConfigError."""
    unknown = [index for index in factors if index >= count]
    if unknown:
        raise ConfigError(f"there is no {noun} {unknown[0]}; expected 0 to {count - 1}", key=HEAVY)


def costs_text(arguments: Namespace, text: str) -> str:
    """Return costs as they were written, with what `--heavy` says."""
    return f"{text}, heavy {arguments.heavy}" if arguments.heavy else text


def _heavy_factors(arguments: Namespace) -> dict[int, float]:
    """Return how many times as long a rank, or layer, takes, by its index. Raises: ConfigError."""
    factors: dict[int, float] = {}
    text = getattr(arguments, "heavy", None)  # a command that only proves has no such option
    for part in text.split(",") if text else ():
        match = _HEAVY.fullmatch(part)
        if match is None:
            raise ConfigError(f"{shortened(part)}; expected RANK=TIMES, such as 3=2", key=HEAVY)
        index = int(match[1])
        if index in factors:
            raise ConfigError(f"{index} is given twice; keep one", key=HEAVY)
        factors[index] = float(match[2])
    return factors


def _split_costs(arguments: Namespace, text: str) -> AnyCosts:
    costs = load_costs(text)
    if arguments.split is None:
        return costs
    if not isinstance(costs, LayerCosts):
        problem = f"{text} has no costs per layer, so it cannot be split"
        raise ConfigError(f"{problem}; give a file that penstock profile RUN.toml wrote, or leave it out", key=SPLIT)
    try:
        return replace(costs, split=read_split(arguments.split))
    except ConfigError as error:
        raise ConfigError(error.problem, key=SPLIT) from None


def read_split(text: str) -> tuple[int, ...]:
    """Read layers per stage, such as `3,4`. Raises: ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise ConfigError(f"{shortened(text)}; expected the number of layers of each stage, such as 3,4", key=SPLIT)
    return tuple(map(int, parts))


def costs_of_table(arguments: Namespace, text: str, table: Schedule | Program) -> tuple[Costs, str]:
    """Return the costs of one table's stages, and `split 3,4` where COSTS are per layer, else an empty text.

    Raises:
        ConfigError, FormatError, PartitionError: for costs or a split that are none, or none of this table.
    """
    costs = _split_costs(arguments, text)
    factors = _heavy_factors(arguments)
    if not isinstance(costs, LayerCosts):
        plain_costs = stage_costs(costs, table)
        return _heavy_stages(plain_costs, factors, table) if factors else plain_costs, ""
    costs = _heavy_layers(costs, factors) if factors else costs
    sizes = split_sizes(layers_of_stages(costs, table.placement))
    require_split_used(arguments, {table.name: sizes})
    return stage_costs(costs, table), split_text(sizes)


def require_split_used(arguments: Namespace, sizes_of_name: dict[str, tuple[int, ...]]) -> None:
    """Refuse `--split` where none of these schedules has as many stages. Raises: ConfigError."""
    if arguments.split is None:
        return
    count = len(read_split(arguments.split))
    counts = {name: len(sizes) for name, sizes in sizes_of_name.items()}
    if counts and count not in counts.values():
        numbers = " or ".join(map(str, sorted(set(counts.values()))))
        raise ConfigError(
            f"{cut(arguments.split, 40)} is for {count_of(count, 'stage')}, but {', '.join(counts)} "
            f"{'has' if len(counts) == 1 else 'have'} {numbers}; give the layers of each stage, or leave it out",
            key=SPLIT,
        )


# ---- replicas


def sharding_of(arguments: Namespace) -> Sharding:
    """Return what the replicas share out and how they gather it, as the options say.

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
        raise ConfigError(error.problem, key="--shard") from None
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
    """Return the costs of stages in as many replicas as the options say. Raises: as `replicas_of`, `sharding_of`."""
    replicas = replicas_of(arguments, costs.replicas)
    if replicas is None:
        return costs
    return of_replicas(costs, replicas, is_sharded=sharding_of(arguments).shard != NONE)
