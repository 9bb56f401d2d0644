"""LOAD: what a stage takes of a microbatch is pulled off its stream, and begins its way to the device."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step


def load(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle LOAD: have a microbatch there, and those before it; a second LOAD of one on this rank does nothing.

    A batch that is there as a whole needs no loading. The data are dropped behind their last use (`compile.data`).
    """
    microbatch, _ = context.place(row)

    def load_microbatch(step: Step) -> None:
        if step.prefetcher is not None:
            step.prefetcher.pull(microbatch)

    yield Bound(row, load_microbatch)
