"""What kept the ranks before a step: a step begins together, so all wait for the last rank that asks for it.

    rank 0   [batch]|asks ~ ~ ~ ~ ~ ~ ~ ~|F0 F1 ...        rank 0 waits (~) for what rank 1 does in that second:
    rank 1      . . [ batch ............ ]|asks|F0 ...      here it waits for its own batch
             free                         begin

This is the time before the timeline's first computation; from there on `simulation.causes` counts. A step that is fed
by a stream waits for its first microbatch by itself, before it asks the others: that wait counts as the batch's, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.ir.timeline import Timeline
from penstock.simulation.causes import Cause, IdleTimes
from penstock.simulation.data_waits import waits_of_ranks


@dataclass(frozen=True, slots=True)
class LeadIn:
    """What one rank did before a step; moments of the step's timeline, so below 0."""

    free_s: float
    """It was done with what came before."""
    loaded_s: float
    """It had its batch."""
    asked_s: float
    """It asked for the step."""

    @property
    def data_s(self) -> float:
        """Seconds that it waited for its batch."""
        return self.loaded_s - self.free_s


@dataclass(frozen=True, slots=True)
class _Segment:
    begin_s: float
    end_s: float
    cause: Cause


def begin_of(timeline: Timeline, lead_ins: Sequence[LeadIn]) -> float:
    """Return when the first rank was free for the step; without lead-ins, its first computation."""
    return min((lead_in.free_s for lead_in in lead_ins), default=_first_s(timeline))


def idle_before(timeline: Timeline, lead_ins: Sequence[LeadIn]) -> IdleTimes:
    """Put every second of each rank, from when it was free to the step's first computation, down to a cause.

    What all ranks need between batch and step is the host's work; what one needs on top makes it a straggler.
    """
    table = np.zeros((timeline.num_ranks, len(Cause)))
    for rank, segments in enumerate(_segments(timeline, with_first_waits(timeline, lead_ins))):
        for segment in segments:
            table[rank, segment.cause] += segment.end_s - segment.begin_s
    return IdleTimes(table)


def with_first_waits(timeline: Timeline, lead_ins: Sequence[LeadIn]) -> list[LeadIn]:
    """Return the lead-ins as if what ranks waited for after their call, before any computed, had come with the batch.

    So `loaded_s` is later by these seconds, and a rank asks when the last of them is over.
    """
    return [*_with_first_waits(timeline, lead_ins)]


def _with_first_waits(timeline: Timeline, lead_ins: Sequence[LeadIn]) -> Iterator[LeadIn]:
    first_s, of_ranks = _first_s(timeline), waits_of_ranks(timeline)
    for lead_in, waits in zip(lead_ins, of_ranks, strict=False):  # there may be no lead-ins
        first = [wait for wait in waits if wait.end_s <= first_s]
        waited_s = sum(wait.end_s - wait.begin_s for wait in first)
        asked_s = max([lead_in.asked_s, *(wait.end_s for wait in first)])
        yield LeadIn(lead_in.free_s, min(lead_in.loaded_s + waited_s, asked_s), asked_s)


def last_to_ask(lead_ins: Sequence[LeadIn]) -> int:
    """Return the rank that all others waited for."""
    return max(range(len(lead_ins)), key=lambda rank: lead_ins[rank].asked_s)


def _segments(timeline: Timeline, lead_ins: Sequence[LeadIn]) -> list[list[_Segment]]:
    if not lead_ins:
        return []
    usual_s = min(lead_in.asked_s - lead_in.loaded_s for lead_in in lead_ins)
    last = last_to_ask(lead_ins)
    # What the others wait for: before it was free, the last rank was late with what came before.
    begin_s = begin_of(timeline, lead_ins)
    blame = [_Segment(begin_s, lead_ins[last].free_s, Cause.STRAGGLER), *_own(lead_ins[last], usual_s)]
    agreed_s, first_s = lead_ins[last].asked_s, _first_s(timeline)
    found = []
    for lead_in in lead_ins:
        waits = [_Segment(max(each.begin_s, lead_in.asked_s), each.end_s, each.cause) for each in blame]
        agreement = _Segment(agreed_s, max(first_s, agreed_s), Cause.SYNCHRONISATION)
        found.append([each for each in (*_own(lead_in, usual_s), *waits, agreement) if each.end_s > each.begin_s])
    return found


def _own(lead_in: LeadIn, usual_s: float) -> list[_Segment]:
    prepared_s = min(lead_in.loaded_s + usual_s, lead_in.asked_s)
    moments = (lead_in.free_s, lead_in.loaded_s, prepared_s, lead_in.asked_s)
    causes = (Cause.DATA, Cause.LAUNCH, Cause.STRAGGLER)
    return [_Segment(*pair, cause) for pair, cause in zip(pairwise(moments), causes, strict=True)]


def _first_s(timeline: Timeline) -> float:
    starts_s = timeline.start_s[timeline.program.is_compute]
    return float(starts_s.min()) if len(starts_s) else 0.0
