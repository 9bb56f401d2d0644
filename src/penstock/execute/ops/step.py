"""STEP: all ranks take the optimizer step that the pipeline was given."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound


def optimizer_step(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle STEP."""
    step_optimizer = context.parameters.step_optimizer
    yield Bound(row, lambda step: step_optimizer())
