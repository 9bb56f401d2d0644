"""`Step`: all that one step of one rank works on (part 3 of a step), and `Bound`: one call of it.

Every call of a step gets the `Step`, and nothing of it lives elsewhere. Each wait of a row is a call of its own, before
the work. A part of a step, such as the hook for overlapped pairs, changes the list of calls when a program is
compiled, and observers put a context around each (`observing.observer`): so nothing is asked per call, and what is off
costs nothing.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

from penstock.execute.batch.microbatch import Microbatch, MicrobatchKey
from penstock.execute.batch.prefetcher import Prefetcher
from penstock.execute.losses.step_losses import StepLosses


class LaunchedWork(Protocol):
    """What a row has launched and left: an exchange between replicas, or a copy between a device and its host."""

    def wait(self) -> None:
        """Go on when it is over, or let the device do so."""

    def give_up(self) -> None:
        """Leave it as it is; nothing that it still writes to or reads may be used again before it is over."""


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way through the stages of one rank.

    A program that frees what it makes leaves `values` empty. As
    a context, a step drops all that it holds if it fails, so that whoever keeps the error does not keep activations
    alive.
    """

    slices: Sequence[Sequence[Microbatch]]
    """Per microbatch its slices; one, the microbatch itself, where it is not cut. Without data where a prefetcher
    has not pulled them yet, or has dropped them."""
    losses: StepLosses
    output_ranks: Collection[int] = ()
    """Ranks to which the outputs of last stages go; empty where none were asked for."""
    outputs: dict[MicrobatchKey, Any] = field(default_factory=dict)
    """The detached outputs, if asked for; filled on the ranks of last stages."""
    prefetcher: Prefetcher | None = None
    """Has data there before their use and drops them after it; None where a batch is there as a whole."""
    number: int = 0
    """Training steps that came before: what layers draw at random depends on it."""
    serial: int = 0
    """Counts the steps that were tried, of all modes, from 0; the same on every rank."""
    is_training: bool = False
    is_frozen: bool = False
    """Whether all parameters of all ranks are frozen."""
    is_synced: bool = True
    """Whether gradients are averaged over replicas; not within `Pipeline.no_sync()`."""
    sums_tied: bool = True
    """Whether those of tied parameters are summed over ranks; not within `Pipeline.no_sync(tied=False)`."""

    values: dict[int, Any] = field(default_factory=dict)
    """Values that rows leave for later rows, by the numbers of `ops.keys`."""
    carried: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Per stage and microbatch, what slices carry to later slices."""
    tickets: dict[int, LaunchedWork] = field(default_factory=dict)
    """By row, what it has launched and nobody has waited for."""

    def wait_for(self, row: int) -> None:
        """Wait for what a row has launched, if anything."""
        ticket = self.tickets.pop(row, None)
        if ticket is not None:
            ticket.wait()

    def again(self) -> "Step":
        """Return this step for a forward that runs again: it has the same values, but what it notes is dropped."""
        return replace(self, losses=self.losses.forgetting(), outputs={}, output_ranks=())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.slices, self.prefetcher = (), None
            with suppress(RuntimeError):  # a device that has failed runs nothing more
                for ticket in self.tickets.values():
                    ticket.give_up()
            for values in (self.values, self.outputs, self.carried, self.tickets):
                values.clear()


Call = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """One call of a row; `awaits` is set where it is a wait: the row launched earlier, such as a receive."""

    row: int
    call: Call
    awaits: int | None = None


Change = Callable[[Sequence[Bound]], list[Bound]]
"""From the calls of a rank, in order, those that run in their place."""
