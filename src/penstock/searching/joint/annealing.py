"""Annealing of a split, of the stages that recompute, and of the setting of a list schedule, in one compiled loop.

A choice is one row of whole numbers, so that a trial is a copy of it with a change:

    the end of each stage | whether it recomputes | forwards under way | I first | waits | deep first
    num_stages              num_stages              num_stages           ranks     ranks   ranks

A trial fills in the columns of stages that have changed, and one list schedule times it. Of two choices that take
equally long, the one whose ranks end earlier in the mean is better: most changes do not move the last end.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.hot import Hot
from penstock.searching.fitting import Split
from penstock.searching.joint.splits import Ranges, Splits, fill_stage
from penstock.searching.listing import DECODER, NEVER_S, ListState, Setting, fill_sequence
from penstock.searching.moves import CHANCE_STEPS, MEAN_END_WEIGHT, draw
from penstock.searching.problem import Ints, fill_room
from penstock.searching.sequences import Columns, Timing
from penstock.searching.settings import ANY_NUMBER, WAITS

Row = NDArray[np.int64]
STUCK_S = 1e200
"""What a schedule costs at least that memory ends before its time, for each action that has not run."""
WAIT_SHARES = tuple(map(float, WAITS))
"""The shares of a W by which it may hold back what comes, by their number in a choice."""
NUM_WAITS = len(WAIT_SHARES)
LOST_ON_THE_WAY = 20
"""The share of all actions by which a trial may run fewer than the one before, while none comes to its end: 1 / 20."""
ROUNDING = 1e-12
"""The share by which sums of seconds may be wrong."""
MOST_STEP = 2
"""The most by which a number of microbatches under way changes."""


class Trials(NamedTuple):
    """The choice that is changed, the best one, and what the loop needs between trials."""

    current: Any
    trial: Any
    best: Any
    filled: Any
    """[3, num_stages] the start, the stop and whether it recomputes of each stage whose columns are filled in."""
    largest_bytes: Any
    """[num_ranks] the most bytes that a backward of each rank takes."""
    cost_s: Any
    """[2] the cost of the current and of the best choice."""
    random: Any
    """[1] the state of the generator of random numbers."""
    most_bytes: Any
    """[num_ranks] the bytes that a rank may hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A split, the stages that recompute, and a setting, as a row."""

    row: Row
    num_stages: int
    cost_s: float
    """The makespan with a little of the mean end of ranks; `STUCK_S` and more where nothing fits."""

    @property
    def split(self) -> Split:
        return tuple(np.diff(self.row[: self.num_stages], prepend=0).tolist())

    @property
    def recomputed(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.row[self.num_stages : 2 * self.num_stages]).tolist())

    @property
    def setting(self) -> Setting:
        under_way = self.row[2 * self.num_stages : 3 * self.num_stages]
        inputs_first, waits, deep_first = self.row[3 * self.num_stages :].reshape(3, -1)
        shares = np.array(WAIT_SHARES, np.float64)[waits]
        return Setting(under_way.astype(np.int32), inputs_first.astype(np.bool_), shares, deep_first.astype(np.bool_))


def row_of(split: Split, recomputed: tuple[int, ...], num_ranks: int, under_way: Row, *, wait: int) -> Row:
    """Return a choice whose ranks have the same setting: I first, later stages first."""
    recomputes = np.zeros(len(split), np.int64)
    recomputes[list(recomputed)] = 1
    ones = np.ones(num_ranks, np.int64)
    return np.concatenate([np.cumsum(split), recomputes, under_way, ones, wait * ones, ones]).astype(np.int64)


class Annealing:
    """Anneals choices of one placement."""

    def __init__(self, splits: Splits, *, seed: int, may_recompute: bool) -> None:
        placement, num_stages = splits.placement, splits.placement.num_stages
        problem = splits.problem_of(splits.even_split)
        self.columns = Columns.of(problem)._replace(
            **{name: getattr(problem, name).copy() for name in ("seconds", "lag_s", "wire_s", "limit")},
            taken_bytes=problem.taken_bytes.copy(),
            freed_bytes=problem.freed_bytes.copy(),
            room_bytes=problem.room_bytes.copy(),
        )
        ones = np.ones(placement.num_ranks)
        setting = Setting(
            np.ones(num_stages, np.int32), ones.astype(np.bool_), ones.astype(np.float64), ones.astype(np.bool_)
        )
        self._state, self._timing = ListState.of(placement, setting), Timing.of(problem)
        self._sequence: Ints = np.empty(problem.num_actions, np.int32)
        self._splits, self._may_recompute = splits, may_recompute
        self._random = np.array([seed * 7919 + 12345], np.int64)
        unlimited = np.full(placement.num_ranks, np.iinfo(np.int64).max // 4)
        self.most_bytes = unlimited if splits.most_bytes is None else splits.most_bytes.copy()
        """[num_ranks] the bytes that a rank may hold; a search lowers it to make room for messages."""

    def run(self, row: Row, num_trials: int, temperature_s: float) -> Choice:
        """Return the best of so many trials that begin with a choice, at a temperature that falls to 0."""
        num_stages = self._splits.placement.num_stages
        trials = Trials(
            current=row.copy(),
            trial=row.copy(),
            best=row.copy(),
            filled=np.full((3, num_stages), -1, np.int64),
            largest_bytes=np.zeros(self._splits.placement.num_ranks, np.int64),
            cost_s=np.full(2, NEVER_S),
            random=self._random,
            most_bytes=self.most_bytes,
        )
        options = num_trials, float(temperature_s), self._may_recompute
        columns = self.columns, self._state, self._timing, self._sequence
        _ANNEAL.compiled(self._splits.ranges, *columns, trials, *options)
        return Choice(trials.best, num_stages, float(trials.cost_s[1]))


def _change(trial: Any, num_stages: int, num_ranks: int, num_layers: int, random: Any, may_recompute: bool) -> bool:
    """Change a choice at random; return whether it is one: each stage has a layer or more."""
    kind = draw(random, 20)
    stage, rank = draw(random, num_stages), draw(random, num_ranks)
    settings = 3 * num_stages + rank
    if kind < 10 and num_stages > 1:
        # Move the ends of some stages that follow each other: one end moves a layer between two stages, several ends
        # move whole stages along the model.
        first = draw(random, num_stages - 1)
        step = 1 if draw(random, 2) == 0 else -1
        count = 1 if draw(random, 5) < 3 else 1 + draw(random, num_stages)
        for index in range(first, min(first + count, num_stages - 1)):
            trial[index] += step
        for index in range(num_stages):
            if trial[index] <= (trial[index - 1] if index > 0 else 0):
                return False
        return bool(trial[num_stages - 1] == num_layers)
    if may_recompute and kind < 13:
        trial[num_stages + stage] = 1 - trial[num_stages + stage]
    elif kind < 15:
        most = trial[2 * num_stages + stage]
        step = draw(random, 2 * MOST_STEP + 1) - MOST_STEP
        trial[2 * num_stages + stage] = 1 + draw(random, 2 * num_ranks) if most == ANY_NUMBER else max(1, most + step)
    elif kind < 17:
        trial[settings] = 1 - trial[settings]
    elif kind < 19:
        trial[settings + num_ranks] = draw(random, NUM_WAITS)
    else:
        trial[settings + 2 * num_ranks] = 1 - trial[settings + 2 * num_ranks]
    return True


def _fill(ranges: Ranges, columns: Columns, state: ListState, trials: Trials) -> None:
    """Fill in what a trial takes and holds, and its setting."""
    num_stages, num_ranks = len(state.stages), len(columns.limit)
    is_changed = False
    for rank in range(num_ranks):
        columns.limit[rank] = trials.most_bytes[rank]
        state.prefers_inputs[rank] = trials.trial[3 * num_stages + rank] == 1
        state.waits_for_share[rank] = WAIT_SHARES[trials.trial[3 * num_stages + num_ranks + rank]]
        state.deep_first[rank] = trials.trial[3 * num_stages + 2 * num_ranks + rank] == 1
    for stage in range(num_stages):
        start = trials.trial[stage - 1] if stage > 0 else 0
        stop, recomputes = trials.trial[stage], trials.trial[num_stages + stage]
        state.most_under_way[stage] = trials.trial[2 * num_stages + stage]
        columns.limit[columns.rank[stage * len(ranges.seconds_factor)]] -= ranges.static_bytes[start, stop]
        filled = trials.filled
        if filled[0, stage] != start or filled[1, stage] != stop or filled[2, stage] != recomputes:
            fill_stage(ranges, columns, stage, start, stop, recomputes)
            filled[0, stage] = start
            filled[1, stage] = stop
            filled[2, stage] = recomputes
            is_changed = True
    if is_changed:
        fill_room(columns.rank, columns.taken_bytes, columns.freed_bytes, columns.room_bytes, trials.largest_bytes)


def _cost_of(columns: Columns, state: ListState, timing: Timing, sequence: Any, most_s: float) -> float:
    """Return what a trial costs: the makespan, and a little of the mean end of ranks; NEVER_S for more than `most_s`.

    A schedule that memory ends before its time costs more than any that comes to its end, the less it has run the more.
    """
    num_ranks = len(timing.free_s)
    # No rank ends before its work is done: so much of the mean is sure before a schedule is made.
    work_s = 0.0
    for action in range(len(sequence)):
        work_s += columns.seconds[action]
    most_makespan_s = (most_s - MEAN_END_WEIGHT * work_s / num_ranks) * (1 + ROUNDING) + columns.launch_s
    state.most_s[0] = most_makespan_s
    count = fill_sequence(columns, state, timing, sequence)
    if count < 0:
        return NEVER_S
    if count < len(sequence):
        return STUCK_S * (len(sequence) - count)
    total_s, last_s = 0.0, 0.0
    for rank in range(num_ranks):
        total_s += timing.free_s[rank]
        last_s = max(last_s, timing.free_s[rank])
    return last_s - columns.launch_s + MEAN_END_WEIGHT * total_s / num_ranks


def _anneal(
    ranges: Ranges,
    columns: Columns,
    state: ListState,
    timing: Timing,
    sequence: Any,
    trials: Trials,
    num_trials: int,
    temperature_s: float,
    may_recompute: bool,
) -> None:
    """Try changes of a choice; keep a worse one if it loses less than a random share of a falling temperature."""
    num_stages, num_ranks, num_layers = len(state.stages), len(columns.limit), ranges.static_bytes.shape[0] - 1
    for number in range(num_trials):
        trials.trial[:] = trials.current
        if number > 0:
            is_choice = _change(trials.trial, num_stages, num_ranks, num_layers, trials.random, may_recompute)
            if not is_choice:
                continue
        _fill(ranges, columns, state, trials)
        lost_s = temperature_s * (1.0 - number / num_trials) * draw(trials.random, CHANCE_STEPS) / CHANCE_STEPS
        if trials.cost_s[0] >= STUCK_S:  # on the way to what fits, a little may be lost as well
            lost_s = STUCK_S * draw(trials.random, 1 + len(sequence) // LOST_ON_THE_WAY)
        cost_s = _cost_of(columns, state, timing, sequence, trials.cost_s[0] + lost_s)
        if cost_s <= trials.cost_s[0] + lost_s:
            trials.cost_s[0] = cost_s
            trials.current[:] = trials.trial
        if cost_s < trials.cost_s[1]:
            trials.cost_s[1] = cost_s
            trials.best[:] = trials.trial


_HELPERS = (_change, _fill, fill_stage, fill_room, _cost_of, draw)
_ANNEAL = Hot(_anneal, *_HELPERS, *DECODER, inlines=True)
