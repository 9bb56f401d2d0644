"""Rows that compute: forward, recomputation, backward, and the two parts of a split backward.

A row that computes on a received message is two calls, the wait and the computation, so that a recorded step can tell
them apart.
"""

from collections.abc import Iterator

from penstock.errors import PipelineError
from penstock.execute.calls import Bound
from penstock.execute.compile.context import CompileContext
from penstock.execute.compile.values import put_gradients, put_outputs, take_gradients, take_inputs
from penstock.execute.stages.recompute import RecomputedPasses, checkpoint_of
from penstock.execute.step import Step


def compile_forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a stage forward; what it saves waits for the backward, and its outputs for the next stage."""
    run, place, slot = context.passes_of(row).forward, context.place(row), context.slot(row)
    microbatch, index = place
    take, waits = take_inputs(context, row)
    put = put_outputs(context, row)

    def forward(step: Step) -> None:
        outputs, step.saved[slot] = run(step, place, take(step), step.slices[microbatch][index].kwargs)
        put(step, outputs)

    yield from waits
    yield Bound(row, forward)


def compile_recompute(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a forward again; its activation takes the place of what the first run saved."""
    passes, place, slot = context.passes_of(row), context.place(row), context.slot(row)
    action = context.text(context.rows.source(row))
    if not isinstance(passes, RecomputedPasses):
        raise PipelineError(f"{action}: its forward keeps no inputs; run the program that was checked")

    def run_again(step: Step) -> None:
        step.saved[slot] = passes.recompute(step, place, checkpoint_of(step.saved[slot], action))

    yield Bound(row, run_again)


def compile_backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run a whole backward."""
    run, slot = context.passes_of(row).backward, context.slot(row)
    take, waits = take_gradients(context, row)
    put = put_gradients(context, row)

    def backward(step: Step) -> None:
        put(step, run(step, step.saved[slot], take(step)))
        step.saved[slot] = None

    yield from waits
    yield Bound(row, backward)


def compile_backward_input(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run the part of a backward that computes the gradients of inputs."""
    run, slot = context.passes_of(row).backward_input, context.slot(row)
    take, waits = take_gradients(context, row)
    put = put_gradients(context, row)

    def backward_input(step: Step) -> None:
        put(step, run(step, step.saved[slot], take(step)))

    yield from waits
    yield Bound(row, backward_input)


def compile_backward_weight(context: CompileContext, row: int) -> Iterator[Bound]:
    """Run the part of a backward that computes the gradients of weights."""
    run, slot = context.passes_of(row).backward_weight, context.slot(row)

    def backward_weight(step: Step) -> None:
        run(step.saved[slot])
        step.saved[slot] = None

    yield Bound(row, backward_weight)
