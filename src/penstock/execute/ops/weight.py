"""W: the part of a split backward that computes the gradients of weights, from what I has left."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step


def weight(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle W."""
    run, key = context.passes_of(row).gradients.add, context.keys.kept_by(row)

    def run_weight(step: Step) -> None:
        run(step.values.pop(key))

    yield Bound(row, run_weight)
