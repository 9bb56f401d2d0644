"""The passes of a stage: F, R, B, I and W; and OFFLOAD and RELOAD, which move what it keeps between them.

A forward works on the batch, on a message, or on what another stage of this rank made. It keeps its activation, its
inputs where it runs again, and nothing in an evaluation. A backward takes what was kept, and gradients from the same
three places; I leaves for W what W needs.

No name in a call holds what is kept: a frame that an error or a log keeps would keep activations alive.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.execute.ops.context import CompileContext
from penstock.execute.stages.offloading import movable
from penstock.execute.step import Bound, Step
from penstock.execute.transport.messages import Incoming
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.deps import NONE
from penstock.ir.keeps import NOTHING
from penstock.ir.operations import Value
from penstock.microbatch_place import MICROBATCH_PLACE, MicrobatchPlace

Take = Callable[[Step], Any]
"""Returns the inputs or gradients that a row works on."""


def forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle F: run a stage. Its saved tensors wait for the backward, its outputs for the next stage."""
    value, place = context.rows.keeps[row], context.place(row)
    run = (context.recomputation_of if value == Value.CHECKPOINT else context.passes_of)(row).forward
    activation_key, result_key = context.keys.activation_of(row), context.keys.result_of(row)
    take, take_keywords = _take_inputs(context, row), _take_keywords(context, row)
    key, action = context.key(row), context.text(row)
    note_outputs = context.messenger.layouts.note_outputs
    is_last = context.program.placement.next_stage[key[0]] == NONE

    def run_forward(step: Step) -> None:
        if value == NOTHING:
            outputs, _ = run(step, place, take(step), take_keywords(step))
        else:
            outputs, step.values[activation_key] = run(step, place, take(step), take_keywords(step))
        if not is_last:
            note_outputs(key, outputs, action)
            step.values[result_key] = VersionGuard.detached(outputs)

    yield from wait_for_message(context, row, context.messenger.receiver.take_tree)
    yield Bound(row, run_forward)


def recompute(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle R: run a forward again; its activation takes the place of the inputs that the first run kept."""
    run = context.recomputation_of(row).run_again
    place, activation_key = context.place(row), context.keys.activation_of(row)

    def run_again(step: Step) -> None:
        step.values[activation_key] = run(step, place, step.values[activation_key])

    yield Bound(row, run_again)


def backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle B: run a whole backward."""
    run = _whole_backward(context, row)
    take, is_first = _take_gradients(context, row), _is_first(context, row)
    activation_key, result_key = context.keys.activation_of(row), context.keys.result_of(row)

    def run_backward(step: Step) -> None:
        gradients = run(step.values.pop(activation_key), take(step))
        if not is_first:
            step.values[result_key] = gradients

    yield from wait_for_message(context, row, context.messenger.receiver.take_gradients)
    yield Bound(row, run_backward)


def backward_input(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle I: the part of a backward that computes the gradients of inputs."""
    run = context.passes_of(row).backward_input
    take, is_first = _take_gradients(context, row), _is_first(context, row)
    activation_key, result_key = context.keys.activation_of(row), context.keys.result_of(row)

    def run_backward_input(step: Step) -> None:
        gradients, step.values[activation_key] = run(step.values.pop(activation_key), take(step))
        if not is_first:
            step.values[result_key] = gradients

    yield from wait_for_message(context, row, context.messenger.receiver.take_gradients)
    yield Bound(row, run_backward_input)


def weight(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle W: the part of a backward that computes the gradients of weights, from what I has left."""
    run, activation_key = context.passes_of(row).gradients.add, context.keys.activation_of(row)
    yield Bound(row, lambda step: run(step.values.pop(activation_key)))


def offload(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle OFFLOAD: what a forward keeps goes to the memory of the host; a device goes on beside its copies."""
    activation_key = context.keys.activation_of(row)

    def launch(step: Step) -> None:
        if (copy := movable(step.values[activation_key]).offload(step.values[activation_key])) is not None:
            step.tickets[row] = copy

    yield Bound(row, launch)


def reload(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RELOAD: what was offloaded comes back to the device before it is read."""
    activation_key = context.keys.activation_of(row)

    def launch(step: Step) -> None:
        if (copy := movable(step.values[activation_key]).reload()) is not None:
            step.tickets[row] = copy

    yield Bound(row, launch)


def wait_for_message(context: CompileContext, row: int, take: Callable[[Incoming], Any]) -> Iterator[Bound]:
    """Make the wait for the message that a row works on, if any; it releases the sent ones that have arrived by then.

    `take` gets the message, which then waits for the row.
    """
    receive = context.rows.awaits[row]
    if receive == NONE:
        return
    key, release = context.keys.message_of(receive), context.messenger.sender.release
    peer, num_arrived = context.rows.arrived[receive]

    def wait(step: Step) -> None:
        step.values[key] = take(step.values[key])
        release(peer, num_arrived)

    yield Bound(row, wait, receive)


def _take_inputs(context: CompileContext, row: int) -> Take:
    """Return what gets the inputs of a stage, as a tuple."""
    receive, source = context.rows.awaits[row], context.rows.source[row]
    if receive != NONE:
        message = context.keys.message_of(receive)
        return lambda step: (step.values.pop(message),)
    if source == NONE:
        microbatch, index = context.place(row)
        return lambda step: step.slices[microbatch][index].args
    action, result_key = context.text(source), context.keys.result_of(source)
    return lambda step: (step.values.pop(result_key).checked(action),)


def _take_keywords(context: CompileContext, row: int) -> Callable[[Step], Mapping[str, Any]]:
    """Return what gets the keyword arguments of a forward; a stage that asks for it is told the microbatch too."""
    microbatch, index = context.place(row)
    if not context.passes_of(row).stage.takes_microbatch_place:
        return lambda step: step.slices[microbatch][index].kwargs

    def with_place(step: Step) -> Mapping[str, Any]:
        weight = step.losses.auxiliary_shares.factor(microbatch, index)
        place = MicrobatchPlace(microbatch, step.losses.num_microbatches, index, weight)
        return {**step.slices[microbatch][index].kwargs, MICROBATCH_PLACE: place}

    return with_place


def _take_gradients(context: CompileContext, row: int) -> Take:
    """Return what gets the gradients of a stage's outputs."""
    receive, source = context.rows.awaits[row], context.rows.source[row]
    if receive == source == NONE:
        return lambda step: ()  # a last stage begins at its loss
    # The gradients leave `step.values` as they are read: else they would live as long as the step.
    key = context.keys.message_of(receive) if receive != NONE else context.keys.result_of(source)
    return lambda step: step.values.pop(key)


def _whole_backward(context: CompileContext, row: int) -> Callable[..., Any]:
    """Return what runs a whole backward; a layout that reduces within the last one of a stage is told before it."""
    run, stage = context.passes_of(row).backward, int(context.program.stage[row])
    layout = context.parameters.unit_of[stage].layout
    if not (layout.reduces_in_backward and _is_last_of_its_kind(context, row)):
        return run

    def run_last(*args: Any) -> Any:
        layout.begin_last_backward(stage)
        return run(*args)

    return run_last


def _is_last_of_its_kind(context: CompileContext, row: int) -> bool:
    """Whether no later row of this rank has the operation and the stage of a row."""
    program, later_rows = context.program, slice(row + 1, context.rows.rows.stop)
    is_same = (program.op[later_rows] == program.op[row]) & (program.stage[later_rows] == program.stage[row])
    return not is_same.any()


def _is_first(context: CompileContext, row: int) -> bool:
    """Whether nobody waits for the gradients of the stage's inputs."""
    return context.program.placement.previous_stage[int(context.program.stage[row])] == NONE
