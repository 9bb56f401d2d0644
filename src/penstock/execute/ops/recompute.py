"""R: runs a forward again; its activation takes the place of the inputs that the first run kept."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step


def recompute(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle R."""
    run, place, key = context.recomputation_of(row).run_again, context.place(row), context.keys.kept_by(row)

    def run_again(step: Step) -> None:
        step.values[key] = run(step, place, step.values[key])

    yield Bound(row, run_again)
