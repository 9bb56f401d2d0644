"""Bound calls: what a row of a program has become on its rank, ready to be called, and ways to change a list of them.

A row that computes on a received message is two calls, the wait and the computation. What takes part in a step, such
as the hook for overlapped pairs, changes the list of calls when the program is compiled, and observers put a context
around each (`observing.observer`): so nothing is asked per call, and what is off costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.execute.step import Step

Call = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """One call of a row; `receive_row` is set where it waits for a message, and is that message's receive."""

    row: int
    call: Call
    receive_row: int | None = None


Change = Callable[[Sequence[Bound]], list[Bound]]
"""From the calls of a rank, in order, those that run in their place."""


def changed(bounds: Sequence[Bound], changes: Sequence[Change]) -> list[Bound]:
    """Return the calls after all changes; the first is the innermost."""
    for change in changes:
        bounds = change(bounds)
    return list(bounds)
