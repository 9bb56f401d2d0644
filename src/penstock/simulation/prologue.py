"""The prologue of a step: what each rank did before it. All ranks wait for the last one that asks for the step.

    rank 0   [batch]|asks ~ ~ ~ ~ ~ ~ ~ ~|F0 F1 ...        rank 0 waits (~) for what rank 1 does in that second:
    rank 1      . . [ batch ............ ]|asks|F0 ...      here it waits for its own batch
             free                         begin

This is the time before the timeline's first computation; from there on `simulation.causes` counts. A step with
streamed data waits for its first microbatch by itself, before it asks the others: that wait counts as the batch's, too.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.ir.measured import Prologue
from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import waits_of_ranks
from penstock.simulation.causes import Cause, IdleSpan, IdleTimes


def begin_of(timeline: Timeline, prologues: Sequence[Prologue]) -> float:
    """Return when the first rank was free for the step; without prologues, its first computation."""
    return min((prologue.free_s for prologue in prologues), default=_first_s(timeline))


def idle_before(timeline: Timeline, prologues: Sequence[Prologue]) -> IdleTimes:
    """Put every second of each rank, from when it was free to the step's first computation, down to a cause.

    The time that all ranks need between batch and step is the host's work; a rank that needs more is a straggler.
    """
    table = np.zeros((timeline.num_ranks, len(Cause)))
    for rank, segments in enumerate(_segments(timeline, with_first_waits(timeline, prologues))):
        for segment in segments:
            table[rank, segment.cause] += segment.end_s - segment.begin_s
    return IdleTimes(table)


def with_first_waits(timeline: Timeline, prologues: Sequence[Prologue]) -> list[Prologue]:
    """Return the prologues as if what ranks waited for after their call, before any computed, had come with the batch.

    So `loaded_s` is later by these seconds, and a rank asks when the last of them is over.
    """
    first_s, of_ranks = _first_s(timeline), waits_of_ranks(timeline)
    prologues_with_waits = []
    for prologue, waits in zip(prologues, of_ranks, strict=False):  # there may be no prologues
        first_waits = [wait for wait in waits if wait.end_s <= first_s]
        waited_s = sum(wait.end_s - wait.begin_s for wait in first_waits)
        asked_s = max([prologue.asked_s, *(wait.end_s for wait in first_waits)])
        prologues_with_waits.append(Prologue(prologue.free_s, min(prologue.loaded_s + waited_s, asked_s), asked_s))
    return prologues_with_waits


def last_to_ask(prologues: Sequence[Prologue]) -> int:
    """Return the rank that all others waited for."""
    return max(range(len(prologues)), key=lambda rank: prologues[rank].asked_s)


def _segments(timeline: Timeline, prologues: Sequence[Prologue]) -> list[list[IdleSpan]]:
    """Return for each rank the spans between its earlier work and the step's first computation, with their causes.

    A rank first spends time of its own; once it has asked for the step, it waits for what the last rank to ask does;
    and once all have asked, for the start.
    """
    if not prologues:
        return []
    shortest_s = min(prologue.asked_s - prologue.loaded_s for prologue in prologues)
    last = prologues[last_to_ask(prologues)]
    # The others wait for the last rank: before it was free, it was late with its earlier work.
    begin_s = begin_of(timeline, prologues)
    spans_of_last = [IdleSpan(begin_s, last.free_s, Cause.STRAGGLER), *_local_spans(last, shortest_s)]
    agreement = IdleSpan(last.asked_s, max(_first_s(timeline), last.asked_s), Cause.SYNCHRONISATION)
    spans_of_ranks = []
    for prologue in prologues:
        waits = [IdleSpan(max(span.begin_s, prologue.asked_s), span.end_s, span.cause) for span in spans_of_last]
        spans = (*_local_spans(prologue, shortest_s), *waits, agreement)
        spans_of_ranks.append([span for span in spans if span.end_s > span.begin_s])
    return spans_of_ranks


def _local_spans(prologue: Prologue, shortest_s: float) -> list[IdleSpan]:
    """Return the spans of a rank until it asks: it waits for its batch, its host works, and it is late.

    `shortest_s` are the seconds of host work between batch and request that no rank can do without.
    """
    prepared_s = min(prologue.loaded_s + shortest_s, prologue.asked_s)
    moments = (prologue.free_s, prologue.loaded_s, prepared_s, prologue.asked_s)
    causes = (Cause.DATA, Cause.LAUNCH, Cause.STRAGGLER)
    return [IdleSpan(*pair, cause) for pair, cause in zip(pairwise(moments), causes, strict=True)]


def _first_s(timeline: Timeline) -> float:
    """Return the start of the step's first computation; 0 without any."""
    starts_s = timeline.start_s[timeline.program.is_compute]
    return float(starts_s.min()) if len(starts_s) else 0.0
