"""Which observers look at every step of a pipeline, as its options ask for (part 4 of a step); see `Observer`.

    buffers     has the step changed a buffer that several ranks hold; only where there is one
    declared    debug="values": does each call take and leave what its row declares
    values      debug="values": are all values finite, and all copies equal
    messages    debug="messages" or "values": does each message say what is expected
    ranges      ranges=True: names for profilers
    own         observers=[...]
    outermost   run_ahead=N: how far the host may be ahead of its device

Those of one step (a recording, the memory report, the log of messages) come before all of these.
"""

from collections.abc import Sequence

import torch

from penstock.execute.control.collectives import Control
from penstock.execute.observing.checked_messages import CheckedMessages
from penstock.execute.observing.checked_values import ValueChecks
from penstock.execute.observing.copies import CopyChecks
from penstock.execute.observing.declared_values import DeclaredValues
from penstock.execute.observing.observer import Observer
from penstock.execute.observing.ranges import Ranges
from penstock.execute.observing.run_ahead import throttle_for
from penstock.execute.observing.shared_buffers import SharedBuffers
from penstock.execute.stages.assemble import Assembly
from penstock.execute.transport.protocol import Messages, Transport
from penstock.execute.transport.rank_names import rank_names


def observers_for(
    control: Control,
    device: torch.device,
    assembly: Assembly,
    *,
    debug: str,
    ranges: bool,
    run_ahead: int | None,
    own: Sequence[Observer],
    gradient_attribute: str,
) -> list[Observer]:
    """Return the observers of one rank, the innermost first; the keywords are those of `Pipeline`."""
    transport = control.transport
    found: list[Observer] = []
    if assembly.shared_buffers:
        found.append(SharedBuffers(assembly.stages, assembly.shared_buffers))
    if debug == "values":
        found.append(DeclaredValues(transport.rank))
        found.append(CopyChecks(control, assembly, gradient_attribute))
        found.append(ValueChecks(transport.rank, assembly.stages, gradient_attribute, names=rank_names(transport)))
    if debug != "off":
        found.append(CheckedMessages(transport, device))
    if ranges:
        found.append(Ranges(device))
    found += own
    throttle = throttle_for(device, run_ahead, transport)
    return found if throttle is None else [*found, throttle]


def transport_of_messages(observers: Sequence[Observer], transport: Transport) -> Messages:
    """Return what the messages of a step go over: the one that checks them, if any does."""
    return next((each for each in observers if isinstance(each, CheckedMessages)), transport)
