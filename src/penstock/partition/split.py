"""Which layers make up which stage: even, by weight, or as given; and the table that shows it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from penstock.errors import PartitionError, count_of, listed
from penstock.partition.balance import balance
from penstock.placement import Placement
from penstock.tables import NO_SCREEN, Column, Screen, table_text

MOST_LISTED = 16
"""Stages whose numbers of layers are listed one by one."""


SMALL_SHARE = 0.1
"""The share of trained parameters below which W has next to nothing to do."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """How many parameters stages hold, each counted once per rank. Keys are tuples of one or two stages."""

    of_stage: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """A parameter that several stages of one rank share counts in the first of them in the model."""
    shared: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """How many parameters of a stage count in an earlier stage of its rank, by the two stages."""
    copied: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """How many parameters of a stage are copies of those of a stage of another rank, by the two stages; they count in
    both."""
    frozen: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """How many of the parameters of a stage are not trained, by the stage; stages without frozen ones are left out."""

    @classmethod
    def of_ranks(cls, counts_of_ranks: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> "ParameterCounts":
        """Join the counts of all ranks; those of one rank are, by field, rows of one or two stages and a number."""
        return cls(
            **{
                name: {tuple(stages): number for counts in counts_of_ranks for *stages, number in counts.get(name, ())}
                for name in ("of_stage", "shared", "copied", "frozen")
            }
        )


def split_over(
    placement: Placement,
    num_layers: int,
    *,
    weights: Sequence[float] | None = None,
    split: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Return the layers of each stage of a placement, which says which rank holds which stage.

    A route is the way of microbatches through one copy of the model; every route runs a whole copy, cut alike. `split`
    and `weights` are those of `split_layers`, for the stages of one route.

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
    position_of_stage = {stage: position for route in placement.routes for position, stage in enumerate(route)}
    return tuple(parts[position_of_stage[stage]] for stage in range(placement.num_stages))


def count_stages(num_layers: int, layers_per_stage: int, num_ranks: int) -> int:
    """Return how many stages of so many layers a model has; the last may have fewer (torchtitan's rule).

    Raises:
        PartitionError: the ranks cannot hold equally many of them; it names the nearest numbers of layers that fit.
    """
    num_stages = -(-num_layers // layers_per_stage)
    if num_stages % num_ranks == 0:
        return num_stages
    fitting = [number for number in range(1, num_layers + 1) if -(-num_layers // number) % num_ranks == 0]
    nearest_numbers = sorted(fitting, key=lambda number: abs(number - layers_per_stage))[:2]
    fix = f"use {' or '.join(map(str, sorted(nearest_numbers)))}" if fitting else "use fewer ranks or more layers"
    raise PartitionError(
        f"{count_of(layers_per_stage, 'layer')} per stage make {count_of(num_stages, 'stage')} of "
        f"{count_of(num_layers, 'layer')}, no multiple of {count_of(num_ranks, 'rank')}; {fix}"
    )


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    weights: Sequence[float] | None = None,
    split: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Return the layers of each stage, as consecutive ranges that cover all layers; no stage is empty.

    `split` gives the number of layers per stage and wins over `weights`, the relative cost per layer, by which the
    heaviest stage becomes as light as it can. Without both, the numbers of layers differ by at most 1, and the first
    stages get more.

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
        _require_split(split, num_layers, num_stages)
        return _consecutive_ranges(split)
    if weights is None:
        weights = [1.0] * num_layers
    if len(weights) != num_layers:
        raise PartitionError(f"{len(weights)} weights were given for {num_layers} layers; give one for each layer")
    return _consecutive_ranges(balance(weights, num_stages))


def describe_split(
    stages: Sequence[range],
    names: Sequence[str],
    weights: Sequence[float],
    parameters: ParameterCounts,
    screen: Screen = NO_SCREEN,
    *,
    late_shares: Mapping[int, float] | None = None,
    reasons: Mapping[int, Mapping[str, str]] | None = None,
    splits_backwards: bool = False,
) -> str:
    """Draw a split as a text table: per stage its layers, its share of the weight, and its parameters.

    `names` and `weights` have one entry per layer; `screen` says how wide the text may be. Stages that hold copies of
    the same layers are one row. Lines below the table name the heaviest stage and the stages that share parameters.
    `late_shares` are, by stage, the share of weight gradients that are computed in W, where that is known; `reasons`
    say, by stage and name, why further weight gradients are computed in I. `splits_backwards` is whether the schedule
    has W, which has nothing to do where parameters are frozen.
    """
    # Join stages with the same layers to one row, such as `0 and 7`.
    stages_by_layers: dict[range, list[str]] = {}
    for index, stage in enumerate(stages):
        stages_by_layers.setdefault(stage, []).append(str(index))
    stages, labels = list(stages_by_layers), [" and ".join(indices) for indices in stages_by_layers.values()]
    total_weight = sum(weights) or 1.0
    shares = [sum(weights[layer] for layer in stage) / total_weight for stage in stages]
    columns = [
        Column("stage"),
        Column("layers", drop_order=2),
        Column("weight"),
        Column("parameters", drop_order=1),
        *([Column("wait for W", drop_order=3)] if late_shares else []),
        Column("names", is_text=True),
    ]
    rows = []
    row_of_stage = {int(index): row for row, indices in enumerate(stages_by_layers.values()) for index in indices}
    # Numbers are by tuples of rows, since a parameter may be in several; here each tuple is one row.
    counts = _numbers_by_row(parameters.of_stage, row_of_stage)
    for row, (label, stage, share) in enumerate(zip(labels, stages, shares, strict=True)):
        late_cell = [_late_share(late_shares, label)] if late_shares else []
        rows.append(
            [label, str(len(stage)), f"{share:.1%}", f"{counts[row,]:,}", *late_cell, _first_to_last(names, stage)]
        )
    # Write the lines below the table.
    heaviest = max(range(len(shares)), key=lambda stage: shares[stage])
    ratio = shares[heaviest] * len(shares)
    num_shared = _numbers_by_row(parameters.shared, row_of_stage)
    num_copied = _numbers_by_row(parameters.copied, row_of_stage)
    last_lines = [
        f"heaviest: stage {labels[heaviest]}, {ratio:.2f} times the mean",
        *_lines_on_sharing("tied on one rank", num_shared, labels, "counted once"),
        *_lines_on_sharing("copies on other ranks", num_copied, labels, "counted in each"),
    ]
    if num_copied:
        last_lines.append(f"without copies: {sum(counts.values()) - sum(num_copied.values()):,} parameters")
    last_lines += _lines_on_frozen(counts, _numbers_by_row(parameters.frozen, row_of_stage), labels, splits_backwards)
    last_lines += [
        f"do not wait for W in stage {stage}: {names_by_reason(reason_of_name)}"
        for stage, reason_of_name in (reasons or {}).items()
        if reason_of_name
    ]
    return "\n".join([table_text(columns, rows, screen), *map(screen.wrapped, last_lines)]) + "\n"


def names_by_reason(reasons: Mapping[str, str]) -> str:
    """List names by what is said of them: `0.weight, 1.weight (small); 2.weight (cannot be told apart)`."""
    names_of_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_of_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{listed(names)} ({reason})" for reason, names in names_of_reason.items())


def split_text(sizes: Sequence[int]) -> str:
    """Return a split in a few words: `split 3,4`; of many stages, only how many layers they have."""
    if len(sizes) <= MOST_LISTED:
        return f"split {','.join(map(str, sizes))}"
    least, most = min(sizes), max(sizes)
    layers = count_of(most, "layer") if least == most else f"{least} to {most} layers"
    return f"split into {len(sizes)} stages of {layers}"


def _numbers_by_row(
    numbers: Mapping[tuple[int, ...], int], row_of_stage: Mapping[int, int]
) -> dict[tuple[int, ...], int]:
    """Return numbers by rows instead of stages; of copies of one stage, the largest, and none of a row with itself."""
    number_of_rows: dict[tuple[int, ...], int] = {}
    for stages, number in numbers.items():
        rows = tuple(row_of_stage[stage] for stage in stages)
        if len(set(rows)) == len(rows):
            number_of_rows[rows] = max(number, number_of_rows.get(rows, 0))
    return number_of_rows


def _lines_on_frozen(
    counts: Mapping[tuple[int, ...], int],
    frozen: Mapping[tuple[int, ...], int],
    labels: Sequence[str],
    splits_backwards: bool,
) -> Iterator[str]:
    """Yield what is trained where some parameters are frozen, and that W then has little to do, if it has."""
    if not any(frozen.values()):
        return
    trained = {row: number - frozen.get((row,), 0) for (row,), number in sorted(counts.items())}
    number_of_stages = (f"{number:,} in stage {labels[row]}" for row, number in trained.items() if number)
    idle = [labels[row] for row, number in trained.items() if not number]
    none = f"; none in {'stages' if len(idle) > 1 else 'stage'} {listed(idle)}" if idle else ""
    yield f"trained, all others are frozen: {listed([*number_of_stages])}{none}"
    share = sum(trained.values()) / (sum(counts.values()) or 1)
    if splits_backwards and share < SMALL_SHARE:
        yield (
            f"{share:.2%} of the parameters are trained, so that W has next to nothing to do, and I takes as long as a "
            "whole backward: take a schedule that does not split backwards, such as 1f1b"
        )


def _lines_on_sharing(
    title: str, numbers: Mapping[tuple[int, ...], int], labels: Sequence[str], counted: str
) -> Iterator[str]:
    """Yield lines that name the rows with parameters of another row; rows with as many of the same one share a line."""
    holders: dict[tuple[int, int], list[int]] = {}
    for (row, owner), number in sorted(numbers.items()):
        holders.setdefault((owner, number), []).append(row)
    for (owner, number), rows in holders.items():
        held_by = ", ".join(labels[row] for row in rows)
        stages = f"stage {held_by}" if len(rows) == 1 else f"stages {held_by}"
        noun = "parameter" if number == 1 else "parameters"
        yield f"{title}: {number:,} {noun} of stage {labels[owner]} in {stages}, {counted}"


def _late_share(shares: Mapping[int, float], label: str) -> str:
    """Return the smallest share of the stages that a label such as `0 and 7` names; `-` where none is known."""
    known_shares = [shares[stage] for stage in map(int, label.split(" and ")) if stage in shares]
    return f"{min(known_shares):.0%}" if known_shares else "-"


def _require_split(split: Sequence[int], num_layers: int, num_stages: int) -> None:
    sizes = list(split)
    if len(sizes) != num_stages:
        raise PartitionError(
            f"split {sizes} names {count_of(len(sizes), 'stage')}, but the schedule has {num_stages}; give "
            f"{count_of(num_stages, 'number')}"
        )
    for stage, count in enumerate(sizes):
        if count < 1:
            raise PartitionError(
                f"split {sizes} gives stage {stage} {count} layers; every stage needs 1, be it an nn.Identity()"
            )
    missing = num_layers - sum(sizes)
    if missing:
        way = f"give {missing} more to some stage" if missing > 0 else f"take {-missing} away from some stage"
        raise PartitionError(
            f"split {sizes} adds up to {sum(sizes)} layers, but the model has {num_layers}; "
            f"{way}, or leave split out for stages as even as can be"
        )


def _consecutive_ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def _first_to_last(names: Sequence[str], stage: range) -> str:
    first, last = names[stage[0]], names[stage[-1]]
    return first if len(stage) == 1 else f"{first} .. {last}"
