"""SEND_F, SEND_B, RECV_F and RECV_B. A receive is posted here; the computation that needs the message waits for it.

Where messages are launched in groups, `begin_group` and `end_group` make the calls around the rows of one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound, Step
from penstock.execute.transport.agreed_layouts import PassKey
from penstock.execute.transport.messages import Incoming
from penstock.ir.operations import IS_MESSAGE


def send_forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle SEND_F: send a stage's outputs, unless they were changed in place since."""
    peer, key, source = context.peer(row), context.key(row), context.rows.source[row]
    result_key, action = context.keys.result_of(source), context.text(source)
    send = context.messenger.sender.send_forward
    release_arrived = _release_arrived(context, peer)

    def send_outputs(step: Step) -> None:
        send(peer, key, step.values.pop(result_key).checked(action))
        release_arrived()  # after the send, which must not wait for it

    yield Bound(row, send_outputs)


def send_backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle SEND_B: send the gradients of a stage's inputs."""
    peer, key, source = context.peer(row), context.key(row), context.rows.source[row]
    result_key = context.keys.result_of(source)
    send = context.messenger.sender.send_backward
    release_arrived = _release_arrived(context, peer)

    def send_gradients(step: Step) -> None:
        send(peer, step.values.pop(result_key), key)
        release_arrived()

    yield Bound(row, send_gradients)


def receive_forward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RECV_F: post the receive of a stage's inputs."""
    return _receive(context, row, context.messenger.receiver.post_forward)


def receive_backward(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RECV_B: post the receive of the gradients of a stage's outputs."""
    return _receive(context, row, context.messenger.receiver.post_backward)


def begin_group(context: CompileContext, row: int) -> Iterator[Bound]:
    """Return the call in front of a row that is the first of its group; a message in group 0 is a group by itself."""
    if not context.messenger.launches_groups or not _begins_group(context, row):
        return
    begin = context.messenger.begin_group
    yield Bound(row, lambda step: begin())


def end_group(context: CompileContext, row: int) -> Iterator[Bound]:
    """Return the call behind a row that is the last of its group."""
    if context.messenger.launches_groups and _ends_group(context, row):
        end = context.messenger.end_group
        yield Bound(row, lambda step: end())


def _begins_group(context: CompileContext, row: int) -> bool:
    program, group = context.program, context.program.group
    is_first = row == context.rows.rows.start or group[row] == 0 or group[row - 1] != group[row]
    return bool(IS_MESSAGE[program.op[row]]) and is_first


def _ends_group(context: CompileContext, row: int) -> bool:
    program, group = context.program, context.program.group
    is_last = row + 1 == context.rows.rows.stop or group[row] == 0 or group[row + 1] != group[row]
    return bool(IS_MESSAGE[program.op[row]]) and is_last


def _receive(context: CompileContext, row: int, post: Callable[[int, PassKey], Incoming]) -> Iterator[Bound]:
    # A gradient belongs to the outputs of this stage, an input to this stage: the key is this stage's both times.
    peer, key, message = context.peer(row), context.key(row), context.keys.message_of(row)

    def post_receive(step: Step) -> None:
        step.values[message] = post(peer, key)

    yield Bound(row, post_receive)


def _release_arrived(context: CompileContext, peer: int) -> Callable[[], None]:
    """Return a call that releases what was sent to a peer and is seen to have been used there."""
    row_of, used = context.row_of, context.rows.used[peer]
    release = context.messenger.sender.release
    if row_of is None:
        return lambda: None
    return lambda: release(peer, bisect_left(used, row_of(peer)))
