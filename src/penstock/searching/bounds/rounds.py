"""How far apart the F of a stage are where each must wait for the memory of an earlier microbatch.

    rank    F F' ~ ~ I' F I W W' F' ~ ~ I' F I W W' F' ...        rounds of F' of one microbatch, last rank of a V

docs/searching.md has the proof.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.searching.bounds.bound import RankStages, Route
from penstock.searching.problem import FORWARD, INPUT, NO_LIMIT, WEIGHT, Seconds


@dataclass(frozen=True, slots=True)
class Rounds:
    """How far the F of a stage come behind its first F; an entry per F."""

    start_s: Seconds
    busy_s: Seconds
    """The most work of as many microbatches, on all stages of the rank."""


def rounds_of(route: Route, own: RankStages, place: int) -> Rounds | None:
    """Return those of the stage at a place of its rank; None where its work takes as long."""
    if own.limit == NO_LIMIT or not min(own.activation):
        return None
    until = range(place, len(own.stages))
    nearest = min(_nearest(own, place, each) for each in until)
    distances = np.arange(nearest, min(own.count, 2 * nearest + 3))
    lasts = np.max([_of_stages(route, own, place, each, distances) for each in until], axis=0)
    busy = _most_work(route, own)
    if (lasts <= distances * (busy[-1] / own.count)).all():
        return None
    start = _starts(distances.tolist(), lasts.tolist(), float(route.forward[own.stages[place]]), own.count)
    return Rounds(np.array(start), busy[:-1])


def _nearest(own: RankStages, place: int, until: int) -> int:
    """Return of which microbatch before it an F has to wait for the I of the stage at a place: they do not all fit."""
    return max((own.most_activations(until) - (until - place)) // (place + 1), 1)


def _of_stages(route: Route, own: RankStages, place: int, until: int, distances: NDArray[np.int64]) -> Seconds:
    """[num_distances] from the start of an F to that of the F so many microbatches further, by the I of a stage."""
    first, last = own.stages[place], own.stages[until]
    way = route.forwards_between(first, last) + float(route.forward[last]) + route.there_and_back(last)
    found = way + _least_work(route, own, until, (place + 1) * (distances + 1) + until - place)
    return np.where(distances >= _nearest(own, place, until), found, -np.inf)


def _least_work(route: Route, own: RankStages, until: int, needed: NDArray[np.int64]) -> Seconds:
    """Of the rank, from the start of an I to that of an F, until when so many more F of its first stages must start."""
    stages, slots = list(own.stages[: until + 1]), own.most_activations(until)
    forward, inputs, weight = (float(each[stages].min()) for each in (route.forward, route.input, route.weight))
    num_forwards = np.maximum(needed - 1 - slots, 0)
    # More I than have to run leave room for the tensors of W, of which fewer have to run then.
    more = np.arange(slots + 1)
    num_inputs = np.maximum((needed - slots)[:, None] + more, 0)
    left: NDArray[np.int64] = num_inputs
    if min(own.context[: until + 1]):
        left = (own.limit - (slots - more) * min(own.activation[: until + 1])) // min(own.context[: until + 1])
    least = num_inputs * inputs + np.maximum(num_inputs - left, 0) * weight
    return np.asarray(num_forwards * forward + least.min(axis=1))


def _most_work(route: Route, own: RankStages) -> Seconds:
    """[num_microbatches + 1] seconds of all stages of the rank, of 0, 1, ... of the slowest microbatches."""
    problem = route.problem
    seconds = [problem.plane(problem.seconds, plane)[list(own.stages)] for plane in (FORWARD, INPUT, WEIGHT)]
    slowest_first = np.sort(np.concatenate(seconds), axis=1)[:, ::-1]
    return np.concatenate([[0.0], np.cumsum(slowest_first.sum(axis=0))])


def _starts(distances: list[int], lasts: list[float], forward: float, count: int) -> list[float]:
    """Return how far each F comes behind the first; `lasts` are seconds to the F so many microbatches further."""
    rounds = dict(zip(distances, lasts, strict=True))
    # Two shorter rounds may take as long as one.
    needed = {
        distance: each
        for distance, each in rounds.items()
        if all(rounds[part] + rounds.get(distance - part, -np.inf) < each for part in distances)
    }
    start = [0.0] * count
    for index in range(1, count):
        behind = [start[index - distance] + each for distance, each in needed.items() if distance <= index]
        start[index] = max([start[index - 1] + forward, *behind])
    return start
