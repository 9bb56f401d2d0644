"""Bounds for every split of whole layers over ranks: of no split and no order does a step take less.

    rank 0      [layer 0][layer][layer][layer][layer]      a rank can take so many whole layers as its seconds allow:
    rank 1      .  begin  [layer][layer][layer][layer] .   what is left over is too short for another one

A stage has one or more layers that follow each other, a rank one or more stages; the placement has one route. The
proofs are in docs/explanations/bounds.md. Thousands of layouts are bounded, so a bound takes about a millisecond.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, count_of
from penstock.proofs import Limit
from penstock.searching.bounds.bound import Bound
from penstock.simulation.costs.costs import STATIC_BYTES
from penstock.simulation.costs.layer_costs import LayerCosts

Floats = NDArray[np.float64]
MOST_PLACES = 600
"""The most ways of giving the heaviest layers to ranks that are looked at one by one."""
MOST_HEAVY = 3
HEAVY = 1.25
"""A layer is heavy if it takes so many times the median."""
BISECTIONS = 30
"""Each halves the seconds between those that are refuted and those that are not."""
ROUNDING = 1e-9
"""The share by which sums of seconds may be wrong: a layer that is too large by that much counts as one that fits."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """[num_layers] what one microbatch takes and holds on each layer, whatever the stages are."""

    forward: Floats
    inputs: Floats
    weight: Floats
    again: Floats
    """Seconds of a forward that runs again."""
    activation: Floats
    context: Floats
    """Bytes that stay for W."""
    static: Floats
    hop_s: float
    """The least seconds of a message from one rank to another."""
    num_ranks: int
    num_microbatches: int
    launch_s: float

    @property
    def all_of(self) -> Floats:
        """Seconds of F, I and W."""
        return self.forward + self.inputs + self.weight

    @property
    def begins(self) -> Floats:
        """[num_ranks] the least seconds before the first F of each rank, by the order of their first layers."""
        before = np.concatenate([[0.0], np.cumsum(self.forward)])
        ranks = np.arange(self.num_ranks)
        return np.asarray(before[ranks] + self.hop_s * ranks)

    @classmethod
    def of(cls, costs: LayerCosts, ranks: int, microbatches: int) -> "Work":
        """Return what costs per layer say, in the least that any order pays for it.

        Raises:
            ConfigError: fewer layers than ranks, costs that do not say how many layers there are, or without F, I or W.
        """
        count = costs.num_layers
        if count < ranks:
            problem = f"{ranks}; the costs have {count_of(count, 'layer')}, and each rank needs at least one"
            raise ConfigError(f"{problem}; use at most {count_of(count, 'rank')}", key="ranks")

        def of_layers(name: str) -> Floats:
            entries = costs.spread_out(name, count, "layer") if getattr(costs, name) else np.zeros(count)
            return np.array(entries, np.float64)

        for name in ("forward", "backward_input", "backward_weight"):
            if not getattr(costs, name):
                raise costs.error("is missing; give the seconds of F, I and W of each layer", name)
        forward, inputs, weight = of_layers("forward"), of_layers("backward_input"), of_layers("backward_weight")
        again = of_layers("recompute") if costs.recompute else forward.copy()
        if costs.split_forward:
            forward = np.minimum(forward, of_layers("split_forward"))
        if costs.backward:
            whole = of_layers("backward")
            inputs = np.minimum(inputs, whole)
            weight = np.minimum(weight, whole - inputs)
        activation = of_layers("activation_bytes")
        context = of_layers("weight_context_bytes") if costs.weight_context_bytes else activation
        context = np.minimum(context, activation)  # a whole backward holds its activation instead
        # Microbatches that differ take the mean in all, and each at least the least.
        seconds_factor = np.array(costs.microbatch_compute_factor) * min(costs.overlap_factor, 1.0)
        least, bytes_factor = float(seconds_factor.min()), float(np.min(costs.microbatch_bytes_factor))
        message_bytes = float(of_layers("message_bytes")[:-1].min(initial=np.inf)) * bytes_factor if count > 1 else 0.0
        links = [(costs.latency_s, costs.bandwidth_bytes_per_s)]
        links += [(channel.latency_s, channel.bandwidth_bytes_per_s) for channel in costs.channels]
        return cls(
            forward * least,
            inputs * least,
            weight * least,
            again * least,
            activation * bytes_factor,
            context * bytes_factor,
            np.sum([of_layers(name) for name in STATIC_BYTES], axis=0) / costs.shards,
            min(latency_s + message_bytes / bandwidth for latency_s, bandwidth in links),
            ranks,
            microbatches,
            float(costs.launch_s),
        )


def packing_bound(costs: LayerCosts, ranks: int, microbatches: int) -> Bound:
    """Return the bound by packing whole layers: some rank has so many seconds of layers, behind its begin.

    Raises:
        ConfigError: as `Work.of`.
    """
    return _packing(Work.of(costs, ranks, microbatches))


def whole_layer_bound(costs: LayerCosts, ranks: int, microbatches: int, memory_limit: Any = None) -> Bound:
    """Return the largest bound of a step for any split of whole layers over ranks, any order, and any recomputation.

    `memory_limit` is that of `penstock.check`; one that is not in bytes is left out.

    Raises:
        ConfigError: as `Work.of`, or a wrong limit.
    """
    work = Work.of(costs, ranks, microbatches)
    bounds = [_packing(work), _one_layer(work), _one_microbatch(work)]
    limit = None if memory_limit is None else Limit.read(memory_limit)
    if limit is not None and limit.in_bytes and work.activation.any():
        most_bytes = limit.of_ranks(ranks, Fraction(1)).astype(np.float64)
        bounds.append(_forced_recomputation(work, float(most_bytes.sum())))
    return max(bounds, key=lambda bound: bound.seconds)


def _packing(work: Work) -> Bound:
    """Return the largest number of seconds that no way of giving layers to ranks can keep, by bisection."""
    seconds, begins, count = work.all_of, work.begins, work.num_microbatches
    heavy = _heavy_layers(seconds, work.num_ranks)
    light = np.delete(seconds, [0, *heavy])
    units = np.unique(light[light > 0])
    # [num_ways, num_ranks] seconds of the heavy layers of each rank. Layer 0 is on the first rank.
    loads = np.zeros((1, work.num_ranks))
    loads[0, 0] = seconds[0]
    for layer in heavy:
        loads = (loads[:, None, :] + seconds[layer] * np.eye(work.num_ranks)[None]).reshape(-1, work.num_ranks)
    begin_and_work = float((begins.sum() + count * seconds.sum()) / work.num_ranks)
    refuted_s, open_s = begin_and_work, float(begins[-1] + count * seconds.sum())
    units = units[:: max(1, len(units) // 4)]  # each of them gives a bound; a few are enough
    for _ in range(BISECTIONS):
        middle_s = (refuted_s + open_s) / 2
        if _may_fit((middle_s - begins) / count, loads, light, units):
            open_s = middle_s
        else:
            refuted_s = middle_s
    is_work = refuted_s == begin_and_work
    terms = {"begin": float(begins.mean()), "work": begin_and_work - float(begins.mean())}
    if not is_work:
        terms["whole layers"] = refuted_s - begin_and_work
    return _bound("whole layers" if not is_work else "work of all ranks", terms, work)


def _heavy_layers(seconds: Floats, num_ranks: int) -> list[int]:
    """Return the layers behind the first whose ranks are tried one by one: the heaviest, and those least alike."""
    median = float(np.median(seconds))
    by_weight = sorted(range(1, len(seconds)), key=lambda layer: -seconds[layer])
    most = 0
    while most < MOST_HEAVY and num_ranks ** (most + 1) <= MOST_PLACES:
        most += 1
    return [layer for layer in by_weight[:most] if seconds[layer] > HEAVY * median]


def _may_fit(capacity: Floats, loads: Floats, light: Floats, units: Floats) -> bool:
    """Whether light layers may fit beside one of the loads into ranks of these capacities [num_ranks].

    A light layer counts as its whole number of units, and so does the room of a rank: it then holds no more units than
    room, since the sum of rounded numbers is not above the rounded sum.
    """
    room = capacity[None, :] * (1 + ROUNDING) - loads
    is_possible = (room >= 0).all(axis=1) & (room.sum(axis=1) >= light.sum())
    for unit in units:
        rooms = np.floor(room / unit * (1 + ROUNDING))
        is_possible &= rooms.sum(axis=1) >= np.floor(light / unit).sum()
    return bool(is_possible.any())


def _one_layer(work: Work) -> Bound:
    """Return the bound of the slowest layer: its begin, its work of all microbatches and, without W, the way back."""
    begins = np.concatenate([[0.0], np.cumsum(work.forward)[:-1]])
    ends = np.concatenate([[0.0], np.cumsum(work.inputs)[:-1]])
    count = work.num_microbatches
    with_weight = begins + count * work.all_of
    layer = int(with_weight.argmax())
    bound = _bound(f"layer {layer}", {"begin": float(begins[layer]), "work": count * float(work.all_of[layer])}, work)
    way_back = begins + count * (work.forward + work.inputs) + ends + work.weight[0]
    layer = int(way_back.argmax())
    terms = {
        "begin": float(begins[layer]),
        "F and I": count * float(work.forward[layer] + work.inputs[layer]),
        "end": float(ends[layer] + work.weight[0]),
    }
    return max(bound, _bound(f"layer {layer} and its way", terms, work), key=lambda bound: bound.seconds)


def _one_microbatch(work: Work) -> Bound:
    """Return the bound of one microbatch: F and I of all layers, W of the first, and the ways between ranks."""
    ways = 2 * work.hop_s * (work.num_ranks - 1)
    terms = {"F and I": float((work.forward + work.inputs).sum()), "W": float(work.weight[0]), "ways": ways}
    return _bound("one microbatch", terms, work)


def _forced_recomputation(work: Work, all_bytes: float) -> Bound:
    """Return the bound by memory and time: an activation takes its bytes for as long as its microbatch is behind it.

    All ranks together have so many bytes for the seconds of a step. Where that is too little, layers recompute, those
    first that free most for what they cost; a share of a layer stands for some of its microbatches.
    """
    count = work.num_microbatches
    later = np.cumsum((work.forward + work.inputs)[::-1])[::-1]  # from the start of a layer's F to the end of its I
    held = work.activation * later + work.context * work.weight
    held_again = work.activation * (work.again + work.inputs) + work.context * work.weight
    saved = np.maximum(held - held_again, 0.0)
    free_bytes = all_bytes - float(work.static.sum())
    begin = float(work.begins.sum())
    least_s = (begin + count * float(work.all_of.sum())) / work.num_ranks
    if free_bytes <= 0:
        return _bound("work of all ranks", {"work": least_s}, work)
    order = np.argsort(work.again / np.maximum(saved, 1e-300), kind="stable")
    order = order[saved[order] > 0]
    # Both grow or fall piece by piece with what recomputes: the least of the larger one is where they meet.
    held_s = np.concatenate([[held.sum()], held.sum() - np.cumsum(saved[order])]) * count / free_bytes
    work_s = least_s + np.concatenate([[0.0], np.cumsum(work.again[order])]) * count / work.num_ranks
    meeting_s = _least_of_larger(work_s, held_s)
    terms = {"work": least_s, "recomputation": meeting_s - least_s}
    return _bound("memory of all ranks", terms, work)


def _least_of_larger(rising: Floats, falling: Floats) -> float:
    """Return the least of the larger one of two lines in pieces, one that rises and one that falls."""
    index = int(np.argmax(rising >= falling)) if (rising >= falling).any() else len(rising)
    if index == 0:
        return float(rising[0])
    if index == len(rising):
        return float(falling[-1])
    gap_before, gap = falling[index - 1] - rising[index - 1], rising[index] - falling[index]
    share = gap_before / (gap_before + gap)
    return float(rising[index - 1] + share * (rising[index] - rising[index - 1]))


def _bound(name: str, terms: dict[str, float], work: Work) -> Bound:
    """Return a bound for any split; the first launch is before a step begins."""
    return Bound(name, None, {**terms, "first launch": -work.launch_s} if work.launch_s else terms)
