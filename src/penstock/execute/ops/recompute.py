"""R: runs a forward again; its activation takes the place of what the first run saved."""

from collections.abc import Iterator

from penstock.errors import PipelineError
from penstock.execute.ops.context import CompileContext
from penstock.execute.stages.recompute import RecomputedPasses
from penstock.execute.step import Bound, Step


def recompute(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle R."""
    passes, place, slot = context.passes_of(row), context.place(row), context.slot(row)
    if not isinstance(passes, RecomputedPasses):
        action = context.text(context.rows.source(row))
        raise PipelineError(f"{action}: its forward keeps no inputs; run the program that was checked")

    def run_again(step: Step) -> None:
        step.saved[slot] = passes.recompute(step, place, step.saved[slot])

    yield Bound(row, run_again)
