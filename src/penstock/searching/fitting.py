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

from penstock.ir.live import StageBytes, live_shares, whole_bytes
from penstock.ir.program import Program
from penstock.partition.balance import balance, lightest_split, weights_of_parts
from penstock.simulation.costs.layer_costs import LayerCosts

MOST_SPLITS = 20_000
"""Splits of which all are looked at."""
MOST_MOVES = 500
ALIVE = ("activation", "weight_context", "checkpoint", "message", "weights", "gradient")
STATIC = "static"
SIZES = (*ALIVE, STATIC)
"""A rank holds the rounded sum of all but the last one, and what is static besides, as a proof adds them."""

Array = NDArray[Any]
Split = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FittingSplit:
    """The splits of a program's stages that matter under a limit of memory, as layers per stage."""

    split: Split | None
    """Of those that fit, the one whose heaviest stage takes least time; None where none was found."""
    least: Split
    """The one whose fullest rank holds least."""
    least_bytes: int
    """How much that rank then holds."""
    is_exact: bool
    """Whether no split was overlooked."""


def fitting_split(costs: LayerCosts, program: Program, limit: Array, shards: int = 1) -> FittingSplit:
    """Find the split that takes least time of those in which no rank holds more than its `limit` of bytes.

    `shards` are the parts in which replicas store what is always there. There are at least as many layers as stages.
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
        fastest = choose(start, lambda splits: _time_within(memory.peaks(splits), limit, seconds, splits))
        least = choose(start, lambda splits: _most_held(memory.peaks(splits)))
        split = fastest if (memory.peaks(np.array([fastest])) <= limit).all() else None
    return FittingSplit(split, least, int(memory.peaks(np.array([least])).max()), is_exact)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryOfSplits:
    """The most bytes that each rank of a program holds, for any split of the layers over its stages."""

    bytes_of_parts: Array
    """[size, start, end] bytes of a stage with the layers of this range, by the order of `SIZES`."""
    times_of_ranks: Sequence[Array]
    """Per rank, [row, size, part] how many times it holds each size of each part, in rows that may be its fullest."""

    @classmethod
    def of(cls, costs: LayerCosts, program: Program, shards: int) -> "MemoryOfSplits":
        """Look at the memory model of a program, one size of one part after the other."""
        sizes = _bytes_of_parts(costs, program.num_slices, shards)
        return cls(sizes, list(_times_of_ranks(costs, program, [bool(size.any()) for size in sizes])))

    def peaks(self, splits: Array) -> Array:
        """[num_splits, num_ranks] the most bytes of each rank, where `splits` are [num_splits, num_parts] layers."""
        ends = np.cumsum(splits, axis=1)
        *alive, static = self.bytes_of_parts[:, ends - splits, ends]
        held = np.concatenate(alive, axis=1)
        peaks = []
        for times_of_rank in self.times_of_ranks:
            times = times_of_rank[:, :-1].reshape(len(times_of_rank), -1)
            sizes = np.flatnonzero(times.any(axis=0))  # of few parts
            live = (held[:, sizes] @ times[:, sizes].T).max(axis=1)
            peaks.append(whole_bytes(live) + whole_bytes(static @ times_of_rank[0, -1]))
        return np.stack(peaks, axis=1)

    def loads_of_parts(self) -> list[tuple[list[int], Array]] | None:
        """Return of each part its ranks, and [start, end, rank] what they hold; None where a rank has several parts."""
        num_parts = self.times_of_ranks[0].shape[-1]
        loads: list[tuple[list[int], list[Array]]] = [([], []) for _ in range(num_parts)]
        message = SIZES.index("message")
        for rank, times in enumerate(self.times_of_ranks):
            parts = set(np.flatnonzero(times.any(axis=(0, 1))).tolist())
            received = {part for part in parts if not np.delete(times[:, :, part], message, axis=1).any()}
            places = parts - received
            if len(places) != 1 or received - {min(places) - 1}:
                return None
            (place,) = places
            loads[place][0].append(rank)
            loads[place][1].append(self._load(times, place))
        if not all(ranks for ranks, _ in loads):
            return None
        return [(ranks, np.stack(load, axis=-1)) for ranks, load in loads]

    def _load(self, times: Array, place: int) -> Array:
        """[start, end] the most bytes of a rank whose only part has these layers, with the message that it takes."""
        load = np.tensordot(times[:, :-1, place], self.bytes_of_parts[:-1], axes=1)
        if place:
            message = SIZES.index("message")
            outputs = self.bytes_of_parts[message, 0]  # of the layers up to each end, so up to each start of the next
            load = load + times[:, message, place - 1, None, None] * outputs[None, :, None]
        return whole_bytes(load.max(axis=0)) + whole_bytes(times[0, -1, place] * self.bytes_of_parts[-1])


def _bytes_of_parts(costs: LayerCosts, num_slices: int, shards: int) -> Array:
    """[size, start, end] bytes of a stage that has the layers of this range, of one microbatch or slice."""
    count = costs.num_layers

    def of_layers(name: str) -> Array:
        return np.array(costs.spread_out(name, count, "layer"), np.float64)

    def summed(values: Array) -> Array:
        ends = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(ends[None, :] - ends[:, None])

    outputs = np.concatenate([[0.0], of_layers("message_bytes")])  # of the layer before each end
    inputs = np.append(of_layers("checkpoint_bytes"), 0.0) if costs.checkpoint_bytes else outputs
    activation = summed(of_layers("activation_bytes"))
    static = sum(of_layers(name) for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
    ones = np.ones((count + 1, count + 1))
    of_value = {
        "activation": activation,
        "weight_context": summed(of_layers("weight_context_bytes")) if costs.weight_context_bytes else activation,
        "checkpoint": inputs[:, None] * ones,
        "message": outputs[None, :] * ones,
    }
    sizes = {name: np.rint(value / num_slices) for name, value in of_value.items()}
    sizes |= {"weights": summed(of_layers("parameter_bytes")), "gradient": summed(of_layers("gradient_bytes"))}
    sizes[STATIC] = np.ceil(summed(np.asarray(static)) / shards)
    return np.stack([sizes[name] for name in SIZES])


def _times_of_ranks(costs: LayerCosts, program: Program, is_there: Sequence[bool]) -> list[Array]:
    """Return of each rank [row, size, part] how many times it holds each size, in its rows that may be the fullest."""
    placement, num_stages = program.placement, program.num_stages
    num_parts = len(placement.routes[0])
    factor = np.array(costs.spread_out("microbatch_bytes_factor", program.num_microbatches, "microbatch"))
    factors = factor if (factor != 1).any() else None
    static = np.zeros((program.num_ranks, num_parts))
    columns: list[dict[tuple[int, int], Array]] = [{} for _ in range(program.num_ranks)]
    units = np.zeros((num_parts, num_stages), np.int64)
    for route in placement.routes:
        units[range(num_parts), route] = 1  # both copies of a part have the same layers
    for part, unit in enumerate(units):
        static[:, part] = StageBytes.of(num_stages, static=unit).static_of_ranks(placement)
    for part, index in product(range(num_parts), np.flatnonzero(is_there[: len(ALIVE)]).tolist()):
        sizes = replace(StageBytes.of(num_stages, **{ALIVE[index]: units[part]}), microbatch_factor=factors)
        times = live_shares(program, sizes)
        for rank, rows in enumerate(program.ranks):
            if times[rows].any():  # a rank holds sizes of few parts, so that few columns are kept
                columns[rank][index, part] = times[rows]
    times_of_ranks = []
    for rank, of_sizes in enumerate(columns):
        fullest = _fullest(np.stack(list(of_sizes.values()), axis=1)) if of_sizes else np.zeros((1, 0))
        times_of_rank = np.zeros((len(fullest), len(SIZES), num_parts))
        for column, (index, part) in enumerate(of_sizes):
            times_of_rank[:, index, part] = fullest[:, column]
        times_of_rank[:, SIZES.index(STATIC)] = static[rank]
        times_of_ranks.append(times_of_rank)
    return times_of_ranks


def _fullest(times: Array) -> Array:
    """Return the rows in which a rank may hold most: those that no other row has as many of everything as."""
    rows = np.unique(times, axis=0)
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    fullest: list[Array] = []
    for row in rows:
        if not any((row <= other).all() for other in fullest):
            fullest.append(row)
    return np.array(fullest)


# ---- splits of ranks with several stages

Keys = Callable[[Array], Array]
"""Returns [num_splits, num_keys] of splits: the smallest is the best, by its first key, then by the next one."""


def _time_within(peaks: Array, limit: Array, seconds: Array, splits: Array) -> Array:
    """[num_splits, 3] bytes over the limit, relative seconds of the heaviest stage, and how uneven the counts are."""
    ends = np.cumsum(splits, axis=1)
    heaviest = np.round(seconds[ends - splits, ends].max(axis=1), 9)
    over = np.maximum(peaks - limit, 0).sum(axis=1)
    return np.stack([over, heaviest, (splits**2).sum(axis=1)], axis=1)


def _most_held(peaks: Array) -> Array:
    """[num_splits, 2] bytes of the fullest rank, and of all ranks."""
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
    split, num_parts = np.array([start]), len(start)
    moves = np.array([
        np.eye(num_parts, dtype=np.int64)[target] - np.eye(num_parts, dtype=np.int64)[source]
        for source in range(num_parts)
        for target in range(num_parts)
    ])  # fmt: skip
    for _ in range(MOST_MOVES):
        splits = split + moves  # a stage may keep all of its layers
        splits = splits[(splits > 0).all(axis=1)]
        best = splits[[_smallest(keys(splits))]]
        if keys(best).tolist() >= keys(split).tolist():
            break
        split = best
    return tuple(split[0].tolist())
