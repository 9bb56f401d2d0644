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

LATE_S = 1e300
"""Later than any time."""


class Columns(NamedTuple):
    """The columns of a problem that timing reads."""

    rank: Any
    seconds: Any
    source: Any
    activation_source: Any
    lag_s: Any
    link: Any
    wire_s: Any
    taken_bytes: Any
    freed_bytes: Any
    room_bytes: Any
    limit: Any
    launch_s: float

    @classmethod
    def of(cls, problem: Problem) -> "Columns":
        return cls(**{name: getattr(problem, name) for name in cls._fields})


class Timing(NamedTuple):
    """The columns that timing writes, with an entry per action, per rank or per link, and the sequence's result."""

    start_s: Any
    end_s: Any
    arrival_s: Any
    """[num_actions] when a result is with the rank that takes it, but for the message's latency."""
    first_s: Any
    """[num_ranks] when a rank's first action starts; -1 before that."""
    free_s: Any
    """[num_ranks] when a rank's last action so far ends; -1 before the first."""
    held_bytes: Any
    peak_bytes: Any
    link_free_s: Any
    makespan_s: Any
    """[1] the makespan of the whole sequence."""
    span_s: Any
    """[1] the span of the whole sequence."""

    @classmethod
    def of(cls, problem: Problem) -> "Timing":
        """Return columns of zeros for a problem."""
        start_s, end_s, arrival_s = np.zeros((3, problem.num_actions))
        first_s, free_s = np.zeros((2, problem.num_ranks))
        held_bytes, peak_bytes = np.zeros((2, problem.num_ranks), np.int64)
        link_free_s, (makespan_s, span_s) = np.zeros(problem.num_ranks**2), np.zeros((2, 1))
        return cls(start_s, end_s, arrival_s, first_s, free_s, held_bytes, peak_bytes, link_free_s, makespan_s, span_s)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The times and peaks of a sequence."""

    start_s: Seconds
    """[num_actions] the start of each action."""
    end_s: Seconds
    arrival_s: Seconds
    """[num_actions] when each result is with the rank that takes it, but for the message's latency."""
    peak_bytes: Bytes
    """[num_ranks] the most bytes that each rank holds."""
    makespan_s: float
    """Seconds from the first start to the last end."""
    span_s: float
    """The most seconds from the first start of a rank to its last end."""

    def fits(self, problem: Problem) -> bool:
        """Whether no rank holds more than it may."""
        return bool((self.peak_bytes <= problem.limit).all())

    def objective_s(self, *, by_span: bool) -> float:
        """Return the seconds that a search makes as few as it can."""
        return self.span_s if by_span else self.makespan_s


def run(problem: Problem, sequence: Ints) -> Run:
    """Return the times of a sequence, and what ranks hold."""
    timing = Timing.of(problem)
    TIME.compiled(sequence, Columns.of(problem), timing)
    makespan_s, span_s = float(timing.makespan_s[0]), float(timing.span_s[0])
    return Run(timing.start_s, timing.end_s, timing.arrival_s, timing.peak_bytes, makespan_s, span_s)


def sequence_of(schedule: Schedule) -> Ints:
    """Return the sequence of a schedule that can run, whose whole backwards are split."""
    split = with_split_backwards(schedule)
    walked = walk_untimed(split, predecessors(split))
    assert walked.is_complete, f"{schedule.name} cannot run"
    return numbers_of_rows(split)[linear_extension(whole_starts(walked))].astype(np.int32)


def earliest_s(columns: Any, timing: Any, action: int) -> float:
    """Return when an action can start, whose source and whose rank's earlier actions have been timed."""
    rank = columns.rank[action]
    start_s = timing.free_s[rank] if timing.free_s[rank] > 0.0 else 0.0
    source = columns.source[action]
    if source >= 0 and columns.rank[source] != rank:  # a source on the same rank has ended when the rank is free
        ready_s = timing.arrival_s[source] + columns.lag_s[action]
        if ready_s > start_s:
            start_s = ready_s
    return float(start_s)


def put(columns: Any, timing: Any, action: int, start_s: float) -> None:
    """Let an action run from a time on."""
    rank = columns.rank[action]
    end_s = start_s + columns.seconds[action]
    timing.free_s[rank] = end_s
    timing.held_bytes[rank] += columns.taken_bytes[action]
    if timing.held_bytes[rank] > timing.peak_bytes[rank]:
        timing.peak_bytes[rank] = timing.held_bytes[rank]
    timing.held_bytes[rank] -= columns.freed_bytes[action]
    arrival_s = end_s
    link = columns.link[action]
    if link >= 0:
        if timing.link_free_s[link] > arrival_s:
            arrival_s = timing.link_free_s[link]
        arrival_s += columns.wire_s[action]
        timing.link_free_s[link] = arrival_s
    timing.arrival_s[action] = arrival_s


def clear(timing: Any) -> None:
    """Reset the columns of ranks and links, so that another sequence can be timed."""
    for rank in range(len(timing.free_s)):
        timing.first_s[rank] = timing.free_s[rank] = -1.0  # has not begun
        timing.held_bytes[rank] = 0
        timing.peak_bytes[rank] = 0
    for link in range(len(timing.link_free_s)):
        timing.link_free_s[link] = 0.0


def time_sequence(sequence: Any, columns: Columns, timing: Timing) -> None:
    """Write into `timing` when each action of a sequence starts and ends, what ranks hold, and how long all takes.

    A sequence has all actions of all ranks in an order in which they can run. An action starts when its rank is free
    and the message that it takes has arrived; a message waits for its link, which carries one at a time. The body
    repeats `earliest_s` and `put`: compiled, calls with all columns take many times as long.
    """
    clear(timing)
    ranks, links, sources, seconds = columns.rank, columns.link, columns.source, columns.seconds
    lag_s, wire_s, taken_bytes, freed_bytes = columns.lag_s, columns.wire_s, columns.taken_bytes, columns.freed_bytes
    starts_s, ends_s, arrivals_s, held_bytes = timing.start_s, timing.end_s, timing.arrival_s, timing.held_bytes
    first_s, free_s, link_free_s, peak_bytes = timing.first_s, timing.free_s, timing.link_free_s, timing.peak_bytes
    first_start_s = LATE_S
    last_end_s = 0.0
    for index in range(len(sequence)):
        action = sequence[index]
        rank = ranks[action]
        # Start when the rank is free and the message is there. A source on the same rank has ended by then.
        start_s = free_s[rank] if free_s[rank] > 0.0 else 0.0
        source = sources[action]
        if source >= 0 and ranks[source] != rank:
            ready_s = arrivals_s[source] + lag_s[action]
            if ready_s > start_s:
                start_s = ready_s
        if free_s[rank] < 0.0:
            first_s[rank] = start_s
        end_s = start_s + seconds[action]
        starts_s[action] = start_s
        ends_s[action] = free_s[rank] = arrival_s = end_s
        # Take memory at the start, and free it at the end.
        held_bytes[rank] += taken_bytes[action]
        if held_bytes[rank] > peak_bytes[rank]:
            peak_bytes[rank] = held_bytes[rank]
        held_bytes[rank] -= freed_bytes[action]
        # Send the result when its link is free; -1 stands for a result that takes no such link.
        link = links[action]
        if link >= 0:
            if link_free_s[link] > arrival_s:
                arrival_s = link_free_s[link]
            arrival_s += wire_s[action]
            link_free_s[link] = arrival_s
        arrivals_s[action] = arrival_s
        if start_s < first_start_s:
            first_start_s = start_s
        if end_s > last_end_s:
            last_end_s = end_s
    # The span of a rank is from its first start to its last end.
    longest_span_s = 0.0
    for rank in range(len(free_s)):
        if free_s[rank] - first_s[rank] > longest_span_s:
            longest_span_s = free_s[rank] - first_s[rank]
    # The launch of the first action is before the makespan begins.
    timing.makespan_s[0] = last_end_s - first_start_s - columns.launch_s
    timing.span_s[0] = longest_span_s - columns.launch_s


TIMERS = (time_sequence, clear)
"""The loop that times a sequence, and its helpers."""
TIME = Hot(*TIMERS)
