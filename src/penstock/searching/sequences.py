"""Candidates of a search: sequences of all actions of all ranks, each behind what it waits for, and what they come to.

    sequence      0F0  1F0  0F1  1I0  1W0  0I0 ...       what each rank runs of it, in this order, is the rank's order

So no candidate can deadlock, and one pass gives times and bytes, of messages on serialized links too: these leave in
the order in which a rank makes them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.deps import predecessors
from penstock.ir.hot import Hot
from penstock.ir.linear_extension import linear_extension, walk_untimed, whole_starts
from penstock.ir.schedule import Schedule
from penstock.ir.split_backwards import with_split_backwards
from penstock.searching.problem import Bytes, Ints, Problem, Seconds, numbers_of_rows


class Columns(NamedTuple):
    """The columns of a problem that timing reads."""

    rank: Any
    seconds: Any
    source: Any
    saved: Any
    lag_s: Any
    link: Any
    wire_s: Any
    taken: Any
    freed: Any
    limit: Any
    launch_s: float

    @classmethod
    def of(cls, problem: Problem) -> "Columns":
        return cls(**{name: getattr(problem, name) for name in cls._fields})


class Timing(NamedTuple):
    """The columns that timing writes: per action, per rank, per link, and the result of the sequence."""

    start_s: Any
    end_s: Any
    arrival_s: Any
    """When the result of an action is with the rank that takes it, but for its latency."""
    first_s: Any
    free_s: Any
    held: Any
    peak: Any
    link_free_s: Any
    makespan_s: Any
    """[1]"""
    span_s: Any
    """[1]"""

    @classmethod
    def of(cls, problem: Problem) -> "Timing":
        """Make room for a problem."""
        start_s, end_s, arrival_s = np.zeros((3, problem.num_actions))
        first_s, free_s = np.zeros((2, problem.num_ranks))
        held, peak = np.zeros((2, problem.num_ranks), np.int64)
        links, (makespan_s, span_s) = np.zeros(problem.num_ranks**2), np.zeros((2, 1))
        return cls(start_s, end_s, arrival_s, first_s, free_s, held, peak, links, makespan_s, span_s)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The result of a sequence."""

    start_s: Seconds
    """By action."""
    end_s: Seconds
    arrival_s: Seconds
    """That of `Timing`."""
    peak: Bytes
    """[num_ranks]"""
    makespan_s: float
    """From the first start to the last end."""
    span_s: float
    """The longest of a rank, from its first start to its last end."""

    def fits(self, problem: Problem) -> bool:
        """Whether no rank holds more than it may."""
        return bool((self.peak <= problem.limit).all())

    def objective_s(self, *, by_span: bool) -> float:
        """Return what is to be as small as it can be."""
        return self.span_s if by_span else self.makespan_s


def run(problem: Problem, sequence: Ints) -> Run:
    """Time a sequence, and count what ranks hold."""
    timing = Timing.of(problem)
    TIME.compiled(sequence, Columns.of(problem), timing)
    makespan_s, span_s = float(timing.makespan_s[0]), float(timing.span_s[0])
    return Run(timing.start_s, timing.end_s, timing.arrival_s, timing.peak, makespan_s, span_s)


def sequence_of(schedule: Schedule) -> Ints:
    """Return the sequence of a schedule that can run, whose whole backwards are split."""
    split = with_split_backwards(schedule)
    walked = walk_untimed(split, predecessors(split))
    assert walked.is_complete, f"{schedule.name} cannot run"
    return numbers_of_rows(split)[linear_extension(whole_starts(walked))].astype(np.int32)


def earliest_s(of: Any, timing: Any, action: int) -> float:
    """Return when an action can start, whose source and whose rank's earlier actions have been timed."""
    own = of.rank[action]
    at = timing.free_s[own] if timing.free_s[own] > 0.0 else 0.0
    before = of.source[action]
    if before >= 0 and of.rank[before] != own:  # its own rank has run it
        ready = timing.arrival_s[before] + of.lag_s[action]
        if ready > at:
            at = ready
    return float(at)


def put(of: Any, timing: Any, action: int, at: float) -> float:
    """Let an action run from a time on; return when it ends."""
    own = of.rank[action]
    end = at + of.seconds[action]
    timing.free_s[own] = end
    timing.held[own] += of.taken[action]
    if timing.held[own] > timing.peak[own]:
        timing.peak[own] = timing.held[own]
    timing.held[own] -= of.freed[action]
    arrives = end
    wire = of.link[action]
    if wire >= 0:
        if timing.link_free_s[wire] > arrives:
            arrives = timing.link_free_s[wire]
        arrives += of.wire_s[action]
        timing.link_free_s[wire] = arrives
    timing.arrival_s[action] = arrives
    return float(end)


def clear(timing: Any) -> None:
    """Begin anew."""
    for own in range(len(timing.free_s)):
        timing.first_s[own] = timing.free_s[own] = -1.0  # has not begun
        timing.held[own] = 0
        timing.peak[own] = 0
    for link in range(len(timing.link_free_s)):
        timing.link_free_s[link] = 0.0


def time_sequence(sequence: Any, of: Any, timing: Any) -> None:
    """Time all actions of a sequence, one after the other.

    It does itself what `earliest_s` and `put` do: compiled, calls with all columns take many times as long.
    """
    clear(timing)
    rank, seconds, source, lag_s, link, wire_s = of.rank, of.seconds, of.source, of.lag_s, of.link, of.wire_s
    taken, freed, held, peak = of.taken, of.freed, timing.held, timing.peak
    start_s, end_s, arrival_s, link_free_s = timing.start_s, timing.end_s, timing.arrival_s, timing.link_free_s
    first_s, free_s = timing.first_s, timing.free_s
    begin_s = 1e300
    last_s = 0.0
    for index in range(len(sequence)):
        action = sequence[index]
        own = rank[action]
        at = free_s[own] if free_s[own] > 0.0 else 0.0
        before = source[action]
        if before >= 0 and rank[before] != own:
            ready = arrival_s[before] + lag_s[action]
            if ready > at:
                at = ready
        if free_s[own] < 0.0:
            first_s[own] = at
        end = at + seconds[action]
        start_s[action] = at
        end_s[action] = free_s[own] = arrives = end
        held[own] += taken[action]
        if held[own] > peak[own]:
            peak[own] = held[own]
        held[own] -= freed[action]
        wire = link[action]
        if wire >= 0:
            if link_free_s[wire] > arrives:
                arrives = link_free_s[wire]
            arrives += wire_s[action]
            link_free_s[wire] = arrives
        arrival_s[action] = arrives
        if at < begin_s:
            begin_s = at
        if end > last_s:
            last_s = end
    longest_s = 0.0
    for own in range(len(free_s)):
        if free_s[own] - first_s[own] > longest_s:
            longest_s = free_s[own] - first_s[own]
    timing.makespan_s[0] = last_s - begin_s - of.launch_s
    timing.span_s[0] = longest_s - of.launch_s


TIMERS = (time_sequence, clear)
"""The loop that times a sequence, and its helpers."""
TIME = Hot(*TIMERS)
