"""How far apart the F of a stage are where each must wait for the memory of an earlier microbatch.

    rank    F F' ~ ~ I' F I W W' F' ~ ~ I' F I W W' F' ...        rounds of F' of one microbatch, last rank of a V

docs/searching.md has the proof.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.searching.bounds.bound import RankCosts, Route
from penstock.searching.problem import FORWARD, INPUT, NO_LIMIT, WEIGHT, Seconds


@dataclass(frozen=True, slots=True)
class Rounds:
    """How far the F of a stage come behind its first F, with an entry per F."""

    start_s: Seconds
    """[num_microbatches] the least seconds from the start of the first F to that of each F."""
    busy_s: Seconds
    """[num_microbatches] the most work of as many microbatches as come before, on all stages of the rank."""


def rounds_of(route: Route, costs: RankCosts, place: int) -> Rounds | None:
    """Return the rounds of the stage at a place of its rank; None where the rank's work takes as long."""
    if costs.limit == NO_LIMIT or not min(costs.activation):
        return None
    last_places = range(place, len(costs.stages))
    nearest = min(_nearest(costs, place, last_place) for last_place in last_places)
    distances = np.arange(nearest, min(costs.num_microbatches, 2 * nearest + 3))
    rounds_s = np.max([_rounds_s(route, costs, place, last_place, distances) for last_place in last_places], axis=0)
    busy_s = _most_work_s(route, costs)
    if (rounds_s <= distances * (busy_s[-1] / costs.num_microbatches)).all():
        return None
    round_s = dict(zip(distances.tolist(), rounds_s.tolist(), strict=True))
    start_s = _starts_s(round_s, float(route.forward[costs.stages[place]]), costs.num_microbatches)
    return Rounds(np.array(start_s), busy_s[:-1])


def _nearest(costs: RankCosts, place: int, last_place: int) -> int:
    """Return how many microbatches before an F the I comes, of the stage at a last place, which the F waits for."""
    # The activations of more microbatches do not fit.
    return max((costs.most_activations(last_place) - (last_place - place)) // (place + 1), 1)


def _rounds_s(route: Route, costs: RankCosts, place: int, last_place: int, distances: NDArray[np.int64]) -> Seconds:
    """Return the seconds from an F to the F that comes each distance in microbatches later, by the I of a stage."""
    first, last = costs.stages[place], costs.stages[last_place]
    way_s = route.forwards_between(first, last) + float(route.forward[last]) + route.there_and_back(last)
    work_s = _least_work_s(route, costs, last_place, (place + 1) * (distances + 1) + last_place - place)
    return np.where(distances >= _nearest(costs, place, last_place), way_s + work_s, -np.inf)


def _least_work_s(route: Route, costs: RankCosts, last_place: int, num_started: NDArray[np.int64]) -> Seconds:
    """Return the least work of a rank from the start of an I to that of an F, by how many F must start until then.

    These are the F of its first stages, of microbatches of which the I is the first.
    """
    first_stages, num_slots = list(costs.stages[: last_place + 1]), costs.most_activations(last_place)
    forward_s, input_s, weight_s = (
        float(seconds[first_stages].min()) for seconds in (route.forward, route.input, route.weight)
    )
    num_forwards = np.maximum(num_started - 1 - num_slots, 0)
    # More I than have to run leave room for the tensors of W, of which fewer have to run then.
    num_more = np.arange(num_slots + 1)
    num_inputs = np.maximum((num_started - num_slots)[:, None] + num_more, 0)
    num_contexts: NDArray[np.int64] = num_inputs
    context, activation = min(costs.context[: last_place + 1]), min(costs.activation[: last_place + 1])
    if context:
        num_contexts = (costs.limit - (num_slots - num_more) * activation) // context
    least_s = num_inputs * input_s + np.maximum(num_inputs - num_contexts, 0) * weight_s
    return np.asarray(num_forwards * forward_s + least_s.min(axis=1))


def _most_work_s(route: Route, costs: RankCosts) -> Seconds:
    """Return the seconds of 0, 1, ... of the slowest microbatches on all stages of the rank, [num_microbatches + 1]."""
    problem = route.problem
    seconds = [problem.plane(problem.seconds, plane)[list(costs.stages)] for plane in (FORWARD, INPUT, WEIGHT)]
    slowest_first = np.sort(np.concatenate(seconds), axis=1)[:, ::-1]
    return np.concatenate([[0.0], np.cumsum(slowest_first.sum(axis=0))])


def _starts_s(round_s: dict[int, float], forward_s: float, num_microbatches: int) -> list[float]:
    """Return how far each F comes behind the first; `round_s` has the seconds of a round by its microbatches."""
    longest_rounds_s = {  # Two shorter rounds may take as long as one.
        distance: seconds
        for distance, seconds in round_s.items()
        if all(round_s[part] + round_s.get(distance - part, -np.inf) < seconds for part in round_s)
    }
    start_s = [0.0] * num_microbatches
    for index in range(1, num_microbatches):
        ends_s = [start_s[index - size] + seconds for size, seconds in longest_rounds_s.items() if size <= index]
        start_s[index] = max([start_s[index - 1] + forward_s, *ends_s])
    return start_s
