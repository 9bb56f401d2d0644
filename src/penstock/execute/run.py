"""The loop: runs the bound calls of one rank on one step (part 5 of a step)."""

from collections.abc import Callable, Sequence

import torch

from penstock.errors import MAX_SHOWN, PipelineError
from penstock.execute.compile.data import with_data_calls
from penstock.execute.compile.program import CompiledProgram
from penstock.execute.step import Bound, Step

Note = Callable[[int], None]
"""Called with the number of each row, from 0, before it runs."""


def run_step(compiled: CompiledProgram, step: Step, note: Note, bounds: Sequence[Bound] | None = None) -> None:
    """Run all rows on a step; `bounds` are the calls, if they are others in this step than the program's own.

    Raises:
        PipelineError: if anything stays alive behind the step.
    """
    bounds = compiled.bounds if bounds is None else bounds
    if step.prefetcher is not None:
        bounds = with_data_calls(bounds, compiled.data_rows, compiled.load_rows)
    is_training, first = not compiled.program.is_forward_only, compiled.rows.start
    # Pairs made ahead: the loop itself reads no attribute, and holds nothing that a call has made.
    calls = [(bound.row - first, bound.call) for bound in bounds]
    try:
        for passes in compiled.passes:
            passes.begin()
        with torch.set_grad_enabled(is_training):
            for row, call in calls:
                note(row)  # first, so that a call that hangs or raises is found at its own row
                call(step)
    finally:
        for passes in compiled.passes:
            passes.end()
    _require_empty(compiled, step)


def _require_empty(compiled: CompiledProgram, step: Step) -> None:
    """Refuse values that nobody has used."""
    values = list(map(compiled.keys.name, step.values))  # each is named by the instruction that left it there
    values += [f"what slices of microbatch {index} carried on stage {stage}" for stage, index in step.carried]
    if values:
        raise PipelineError(
            f"rank {compiled.rank}: {len(values)} values stay alive behind the step: "
            f"{', '.join(values[:MAX_SHOWN])}; the program does not free what it makes. Check it with penstock.check",
            rank=compiled.rank,
        )
