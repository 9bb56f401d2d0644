"""Splits of layers over the stages of one program, by what its ranks then hold: which fit, and which needs least.

A rank holds, while a row of its order runs, a sum of sizes, each taken so many times:

    held by rank 0     4 x activation of stage 0  +  1 x message of stage 0  +  1 x what is always there

How many times does not depend on the split, since the order does not; the sizes are those of the layers. So the few
rows of a rank that may be its fullest are found once (`MemoryOfSplits`), and every split is a product with them.

    a rank with one stage     by dynamic programming over the layers: exact for any number of them
    few splits                by looking at all: exact
    otherwise                 from the balanced split on, layer by layer, as long as that helps: may miss a split
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.live import WORKSPACES, StageBytes, live_shares, whole_bytes
from penstock.ir.program import Program
from penstock.partition.balance import balance, lightest_split, weights_of_parts
from penstock.simulation.costs.layer_costs import LayerCosts

MOST_SPLITS = 20_000
"""The most splits that are all looked at."""
MOST_MOVES = 500
ALIVE = ("activation", "weight_context", "checkpoint", "message", *WORKSPACES, "weights", "gradient")
STATIC = "static"
SIZES = (*ALIVE, STATIC)
"""A rank holds the rounded sum of all but the last one, and what is static besides, as a proof adds them."""

Array = NDArray[Any]
Split = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FittingSplit:
    """The splits of a program's stages that matter under a limit of memory, as layers per stage."""

    split: Split | None
    """The split that fits whose heaviest stage takes least time; None where none was found."""
    least: Split
    """The split whose fullest rank holds least."""
    least_bytes: int
    """The bytes that the fullest rank holds with the split `least`."""
    is_exact: bool
    """Whether no split was overlooked."""


def fitting_split(costs: LayerCosts, program: Program, limit: Array, shards: int = 1) -> FittingSplit:
    """Return the split that takes least time of those in which no rank holds more than its `limit` of bytes.

    Replicas store what is always there in so many `shards`. There are at least as many layers as stages.
    """
    memory = MemoryOfSplits.of(costs, program, shards)
    seconds = weights_of_parts(costs.seconds_of_layers.sum(axis=0).tolist())
    num_layers, num_parts = costs.num_layers, len(program.placement.routes[0])
    loads = memory.loads_of_parts()
    if loads is not None:
        allowed = [np.where((load <= limit[ranks]).all(axis=-1), seconds, np.inf) for ranks, load in loads]
        least = lightest_split([load.max(axis=-1) for _, load in loads])
        assert least is not None, "without a limit, a part may take any layers"
        split, is_exact = lightest_split(allowed), True
    else:
        is_exact = comb(num_layers - 1, num_parts - 1) <= MOST_SPLITS
        choose = _best_of_all if is_exact else _best_by_moves
        start = balance(costs.seconds_of_layers.sum(axis=0).tolist(), num_parts)
        fastest = choose(start, lambda splits: _time_keys(memory.peaks(splits), limit, seconds, splits))
        least = choose(start, lambda splits: _memory_keys(memory.peaks(splits)))
        split = fastest if (memory.peaks(np.array([fastest])) <= limit).all() else None
    return FittingSplit(split, least, int(memory.peaks(np.array([least])).max()), is_exact)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryOfSplits:
    """The most bytes that each rank of a program holds, for any split of the layers over its stages."""

    bytes_of_parts: Array
    """[size, start, stop] bytes of a stage with the layers of this range, by the order of `SIZES`."""
    times_of_ranks: Sequence[Array]
    """Per rank, [row, size, part] how many times it holds each size of each part, in rows that may be its fullest."""

    @classmethod
    def of(cls, costs: LayerCosts, program: Program, shards: int) -> "MemoryOfSplits":
        """Return what the memory model of a program says, one size of one part after the other."""
        sizes = _bytes_of_parts(costs, program.num_slices, shards)
        return cls(sizes, list(_times_of_ranks(costs, program, [bool(size.any()) for size in sizes])))

    def peaks(self, splits: Array) -> Array:
        """Return the most bytes of each rank, [num_splits, num_ranks]; `splits` are [num_splits, num_parts] layers."""
        stops = np.cumsum(splits, axis=1)
        *alive, static = self.bytes_of_parts[:, stops - splits, stops]
        bytes_of_columns = np.concatenate(alive, axis=1)  # [num_splits, sizes x parts]
        peaks = []
        for times_of_rank in self.times_of_ranks:
            times = times_of_rank[:, :-1].reshape(len(times_of_rank), -1)
            columns = np.flatnonzero(times.any(axis=0))  # of few parts
            live = (bytes_of_columns[:, columns] @ times[:, columns].T).max(axis=1)
            peaks.append(whole_bytes(live) + whole_bytes(static @ times_of_rank[0, -1]))
        return np.stack(peaks, axis=1)

    def loads_of_parts(self) -> list[tuple[list[int], Array]] | None:
        """Return each part's ranks, and [start, stop, rank] what these hold; None where a rank has several parts."""
        num_parts = self.times_of_ranks[0].shape[-1]
        loads: list[tuple[list[int], list[Array]]] = [([], []) for _ in range(num_parts)]
        message = SIZES.index("message")
        for rank, times in enumerate(self.times_of_ranks):
            parts = set(np.flatnonzero(times.any(axis=(0, 1))).tolist())
            senders = {part for part in parts if not np.delete(times[:, :, part], message, axis=1).any()}
            parts -= senders  # of which the rank has only messages
            if len(parts) != 1 or senders - {min(parts) - 1}:
                return None
            (part,) = parts
            loads[part][0].append(rank)
            loads[part][1].append(self._load(times, part))
        if not all(ranks for ranks, _ in loads):
            return None
        return [(ranks, np.stack(load, axis=-1)) for ranks, load in loads]

    def _load(self, times: Array, part: int) -> Array:
        """Return the most bytes, [start, stop], of a rank whose only part has these layers and takes a message."""
        load = np.tensordot(times[:, :-1, part], self.bytes_of_parts[:-1], axes=1)
        if part:
            message = SIZES.index("message")
            outputs = self.bytes_of_parts[message, 0]  # of the layers up to each stop, so up to each start of the next
            load = load + times[:, message, part - 1, None, None] * outputs[None, :, None]
        return whole_bytes(load.max(axis=0)) + whole_bytes(times[0, -1, part] * self.bytes_of_parts[-1])


def _bytes_of_parts(costs: LayerCosts, num_slices: int, shards: int) -> Array:
    """Return [size, start, stop] the bytes of each size for a stage that has the layers `start` to `stop`.

    Sizes are what a rank may hold (`SIZES`): an activation, a message and so on, of one microbatch cut into
    `num_slices`, then parameters, gradients and static bytes, which replicas may store in `shards`. All pairs of
    `start` and `stop` are computed at once; those with `start` after `stop` mean nothing.
    """
    num_layers = costs.num_layers

    def of_layers(name: str) -> Array:
        return np.array(costs.spread_out(name, num_layers, "layer"), np.float64)

    # A message is the output of the last layer, before `stop`. A checkpoint is the input of the first layer: by default
    # as large as the output of the layer before it.
    outputs = np.concatenate([[0.0], of_layers("message_bytes")])
    inputs = np.append(of_layers("checkpoint_bytes"), 0.0) if costs.checkpoint_bytes else outputs
    activation = sums_of_ranges(of_layers("activation_bytes"))
    static_of_layers = sum(of_layers(name) for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
    all_ranges = np.ones((num_layers + 1, num_layers + 1))
    size_of_value = {
        "activation": activation,
        "weight_context": sums_of_ranges(of_layers("weight_context_bytes"))
        if costs.weight_context_bytes
        else activation,
        "checkpoint": inputs[:, None] * all_ranges,
        "message": outputs[None, :] * all_ranges,
        **{name: largest_of_ranges(of_layers(f"{name}_bytes")) for name in WORKSPACES},
    }
    sizes = {name: np.rint(value / num_slices) for name, value in size_of_value.items()}
    sizes |= {
        "weights": sums_of_ranges(of_layers("parameter_bytes")),
        "gradient": sums_of_ranges(of_layers("gradient_bytes")),
    }
    sizes[STATIC] = np.ceil(sums_of_ranges(np.asarray(static_of_layers)) / shards)
    return np.stack([sizes[name] for name in SIZES])


def sums_of_ranges(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of the values of each range, [start, stop]; it means nothing where `start` is behind `stop`."""
    sums = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.asarray(sums[None, :] - sums[:, None])


def largest_of_ranges(values: Array) -> Array:
    """Return the largest of the values of each range, [start, stop]; 0 where `start` is not before `stop`."""
    largest = np.zeros((len(values) + 1, len(values) + 1))
    for start in range(len(values)):
        largest[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return largest


def _times_of_ranks(costs: LayerCosts, program: Program, is_there: Sequence[bool]) -> list[Array]:
    """Return for each rank how many of each size it holds at once, [row, size, part], for rows that may be its fullest.

    The bytes that a rank holds at a row are these numbers times the sizes (an activation, a message and so on) of each
    part (a stage of one copy of the model). The numbers do not depend on how layers are split. `is_there[size]` says
    which sizes the costs know.
    """
    placement, num_stages = program.placement, program.num_stages
    num_parts = len(placement.routes[0])
    factor = np.array(costs.spread_out("microbatch_bytes_factor", program.num_microbatches, "microbatch"))
    factors = factor if (factor != 1).any() else None
    static = np.zeros((program.num_ranks, num_parts))
    columns: list[dict[tuple[int, int], Array]] = [{} for _ in range(program.num_ranks)]
    is_stage_of_part = np.zeros((num_parts, num_stages), np.int64)
    for route in placement.routes:
        is_stage_of_part[range(num_parts), route] = 1  # both copies of a part have the same layers
    for part, is_stage in enumerate(is_stage_of_part):
        static[:, part] = StageBytes.of(num_stages, static=is_stage).static_of_ranks(placement)
    # Count each size of each part by itself: a size of 1 for the part's stages and 0 for all others.
    for part, index in product(range(num_parts), np.flatnonzero(is_there[: len(ALIVE)]).tolist()):
        sizes = replace(StageBytes.of(num_stages, **{ALIVE[index]: is_stage_of_part[part]}), microbatch_factor=factors)
        num_held = live_shares(program, sizes)
        for rank, rows in enumerate(program.ranks):
            if num_held[rows].any():  # a rank holds sizes of few parts, so that few columns are kept
                columns[rank][index, part] = num_held[rows]
    times_of_ranks = []
    for rank, columns_of_rank in enumerate(columns):
        has_columns = bool(columns_of_rank)
        fullest_rows = _fullest(np.stack(list(columns_of_rank.values()), axis=1)) if has_columns else np.zeros((1, 0))
        times_of_rank = np.zeros((len(fullest_rows), len(SIZES), num_parts))
        for column, (index, part) in enumerate(columns_of_rank):
            times_of_rank[:, index, part] = fullest_rows[:, column]
        times_of_rank[:, SIZES.index(STATIC)] = static[rank]
        times_of_ranks.append(times_of_rank)
    return times_of_ranks


def _fullest(times: Array) -> Array:
    """Return the rows in which a rank may hold most: those of which no other row has as many of everything."""
    rows = np.unique(times, axis=0)
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    fullest: list[Array] = []
    for row in rows:
        if not any((row <= fuller).all() for fuller in fullest):
            fullest.append(row)
    return np.array(fullest)


# ---- splits of ranks with several stages

Keys = Callable[[Array], Array]
"""Returns the keys of splits, [num_splits, num_keys]: the smallest is the best, by its first key, then by the next."""


def _time_keys(peaks: Array, limit: Array, seconds: Array, splits: Array) -> Array:
    """Return bytes over the limit, relative seconds of the heaviest stage, and how uneven the numbers of layers are."""
    stops = np.cumsum(splits, axis=1)
    heaviest = np.round(seconds[stops - splits, stops].max(axis=1), 9)
    over = np.maximum(peaks - limit, 0).sum(axis=1)
    return np.stack([over, heaviest, (splits**2).sum(axis=1)], axis=1)


def _memory_keys(peaks: Array) -> Array:
    """Return the bytes of the fullest rank, and of all ranks."""
    return np.stack([peaks.max(axis=1), peaks.sum(axis=1)], axis=1)


def _smallest(keys: Array) -> int:
    return int(np.lexsort(keys.T[::-1])[0])


def _best_of_all(start: Split, keys: Keys) -> Split:
    """Return the best of all splits of as many layers over as many stages."""
    num_layers, num_parts = sum(start), len(start)
    cuts = np.array(list(combinations(range(1, num_layers), num_parts - 1)), np.int64).reshape(-1, num_parts - 1)
    bounds = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_layers)))
    splits = np.diff(bounds, axis=1)
    return tuple(splits[_smallest(keys(splits))].tolist())


def _best_by_moves(start: Split, keys: Keys) -> Split:
    """Return the split that moves of one layer from some stage to another lead to, the best move first."""
    split, unit = np.array([start]), np.eye(len(start), dtype=np.int64)
    moves = (unit[None, :] - unit[:, None]).reshape(-1, len(start))
    for _ in range(MOST_MOVES):
        splits = split + moves  # a stage may keep all of its layers
        splits = splits[(splits > 0).all(axis=1)]
        best = splits[[_smallest(keys(splits))]]
        if keys(best).tolist() >= keys(split).tolist():
            break
        split = best
    return tuple(split[0].tolist())
