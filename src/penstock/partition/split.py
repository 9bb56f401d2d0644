"""Which layers make up which stage: even, by weight, or as given; and the table that shows it."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from penstock.errors import PartitionError, count_of
from penstock.partition.balance import balance
from penstock.placement import Placement
from penstock.tables import NO_SCREEN, Column, Screen, table_text

MOST_LISTED = 16
"""Stages whose numbers of layers are listed one by one."""


def split_over(
    placement: Placement,
    num_layers: int,
    *,
    weights: Sequence[float] | None = None,
    split: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Return the layers of each stage of a placement; every route runs a whole copy of the model, cut alike.

    `split` and `weights` are those of `split_layers`, for the stages of one route.

    Raises:
        PartitionError: the layers cannot be split so, or the routes have different numbers of stages.
    """
    lengths = [len(route) for route in placement.routes]
    if len(set(lengths)) > 1:
        raise PartitionError(
            f"the routes of the schedule have {lengths} stages, but each runs a whole copy of the model; "
            "give all routes the same number of stages"
        )
    try:
        parts = split_layers(num_layers, lengths[0], weights=weights, split=split)
    except PartitionError as error:
        if len(lengths) == 1:
            raise
        raise PartitionError(f"{error} (stages of one of the schedule's {len(lengths)} copies of the model)") from error
    place_of_stage = {stage: place for route in placement.routes for place, stage in enumerate(route)}
    return tuple(parts[place_of_stage[stage]] for stage in range(placement.num_stages))


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    weights: Sequence[float] | None = None,
    split: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Return the layers of each stage, as consecutive ranges that cover all layers; no stage is empty.

    `split` gives the number of layers per stage and wins over `weights`; without both, the counts differ by at most 1
    and the first stages get more.

    Raises:
        PartitionError: more stages than layers, or a `split` or `weights` that does not fit.
    """
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages were asked for; expected 1 or more")
    if num_stages > num_layers:
        raise PartitionError(
            f"the schedule has {num_stages} stages, but the model has only {num_layers} layers and every stage needs "
            f"one; use at most {num_layers} stages (fewer ranks or stages per rank) or more layers"
        )
    if split is not None:
        _check_split(split, num_layers, num_stages)
        return _ranges(split)
    if weights is None:
        weights = [1.0] * num_layers
    if len(weights) != num_layers:
        raise PartitionError(f"{len(weights)} weights were given for {num_layers} layers; give one for each layer")
    return _ranges(balance(weights, num_stages))


def describe_split(
    stages: Sequence[range],
    names: Sequence[str],
    weights: Sequence[float],
    num_parameters: Sequence[int],
    screen: Screen = NO_SCREEN,
    *,
    late_shares: Mapping[int, float] | None = None,
) -> str:
    """Draw a split as a text table: per stage its layers, its share of the weight, and its parameters.

    `names`, `weights` and `num_parameters` have one entry per layer. Stages that hold copies of the same layers are one
    row. `late_shares` are those of a stage's weight gradients that wait for W, where that is known.
    """
    copies: dict[range, list[str]] = {}
    for index, stage in enumerate(stages):
        copies.setdefault(stage, []).append(str(index))
    stages, labels = list(copies), [" and ".join(indices) for indices in copies.values()]
    total = sum(weights) or 1.0
    shares = [sum(weights[layer] for layer in stage) / total for stage in stages]
    columns = [
        Column("stage"),
        Column("layers", drop_order=2),
        Column("weight"),
        Column("parameters", drop_order=1),
        *([Column("wait for W", drop_order=3)] if late_shares else []),
        Column("names", is_text=True),
    ]
    rows = []
    for label, stage, share in zip(labels, stages, shares, strict=True):
        parameters = f"{sum(num_parameters[layer] for layer in stage):,}"
        late = [_late_share(late_shares, label)] if late_shares else []
        rows.append([label, str(len(stage)), f"{share:.1%}", parameters, *late, _first_to_last(names, stage)])
    heaviest = max(range(len(shares)), key=lambda stage: shares[stage])
    ratio = shares[heaviest] * len(shares)
    last = screen.wrapped(f"heaviest: stage {labels[heaviest]}, {ratio:.2f} times the mean")
    return f"{table_text(columns, rows, screen)}\n{last}\n"


def split_text(sizes: Sequence[int]) -> str:
    """Return a split in a few words: `split 3,4`; of many stages, only how many layers they have."""
    if len(sizes) <= MOST_LISTED:
        return f"split {','.join(map(str, sizes))}"
    least, most = min(sizes), max(sizes)
    layers = count_of(most, "layer") if least == most else f"{least} to {most} layers"
    return f"split into {len(sizes)} stages of {layers}"


def _late_share(shares: Mapping[int, float], label: str) -> str:
    found = [shares[stage] for stage in map(int, label.split(" and ")) if stage in shares]
    return f"{min(found):.0%}" if found else "-"


def _check_split(split: Sequence[int], num_layers: int, num_stages: int) -> None:
    given = list(split)
    if len(given) != num_stages:
        raise PartitionError(
            f"split {given} names {len(given)} stages, but the schedule has {num_stages}; give {num_stages} numbers"
        )
    for stage, count in enumerate(given):
        if count < 1:
            raise PartitionError(f"split {given} gives stage {stage} {count} layers; every stage needs at least 1")
    missing = num_layers - sum(given)
    if missing:
        way = f"give {missing} more to some stage" if missing > 0 else f"take {-missing} away from some stage"
        raise PartitionError(
            f"split {given} adds up to {sum(given)} layers, but the model has {num_layers}; "
            f"{way}, or leave split out for stages as even as can be"
        )


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def _first_to_last(names: Sequence[str], stage: range) -> str:
    first, last = names[stage[0]], names[stage[-1]]
    return first if len(stage) == 1 else f"{first} .. {last}"
