"""REDUCE_TIED: the ranks whose stages hold one parameter add its gradients up."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step


def reduce_tied(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle REDUCE_TIED."""
    group = int(context.program.peer[row])
    messenger, copy, store = context.messenger, context.parameters.copies[group], context.parameters.store_of(group)

    def reduce_copy(step: Step) -> None:
        for peer in copy.ranks:
            messenger.receiver.post_waiting(peer)  # the exchange goes behind them, on the same channels
        copy.reduce(messenger.transport, store if step.sums_tied else None)

    yield Bound(row, reduce_copy)
