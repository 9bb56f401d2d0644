"""The wait for a message before a computation, and what gets the message once it is here."""

from collections.abc import Callable
from typing import Any

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.execute.transport.messages import Incoming

Take = Callable[[Step], Any]
"""Gets what a row works on."""


def wait_for(context: CompileContext, row: int, receive: int, take: Callable[[Incoming], Any]) -> Bound:
    """Return the wait for a message, which releases those sent ones that have arrived by then."""
    key, release = context.keys.message_of(receive), context.messenger.sender.release
    peer, num_arrived = context.rows.arrived[receive]

    def wait(step: Step) -> None:
        step.values[key] = take(step.values[key])
        release(peer, num_arrived)

    return Bound(row, wait, receive)


def take_arrived(context: CompileContext, receive: int) -> Take:
    """Return what gets a message that has arrived."""
    key = context.keys.message_of(receive)
    # Taken out as it is read: else the input would live as long as the step, not as its stage needs it.
    return lambda step: step.values.pop(key)
