"""OFFLOAD and RELOAD: what a forward keeps goes to the memory of the host, and comes back before it is read.

Both copy at once, so that a device waits for its copies.
"""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.stages.offloading import movable
from penstock.execute.step import Bound, Step


def offload(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle OFFLOAD."""
    key = context.keys.kept_by(row)

    def move_to_host(step: Step) -> None:
        # No name here holds what is kept: a frame that an error keeps would keep activations alive.
        movable(step.values[key]).offload(step.values[key])

    yield Bound(row, move_to_host)


def reload(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RELOAD."""
    key = context.keys.kept_by(row)

    def move_back(step: Step) -> None:
        movable(step.values[key]).reload()

    yield Bound(row, move_back)
