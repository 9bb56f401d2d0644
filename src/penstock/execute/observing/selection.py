"""Which observers look at the steps of a pipeline, as its options and calls ask for (part 4 of a step); see `Observer`.

Those of one step (a recording, the memory report, a look at all values, the log of messages) come before all others.
"""

from collections.abc import Sequence
from functools import partial

from penstock.execute.control.agreement import Extra
from penstock.execute.control.collectives import Control
from penstock.execute.observing.checked_messages import CheckedMessages
from penstock.execute.observing.checked_values import ValueChecks
from penstock.execute.observing.clock import ClockComparison
from penstock.execute.observing.copies import CopyChecks
from penstock.execute.observing.declared_values import DeclaredValues
from penstock.execute.observing.log import message_log
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.execute.observing.observer import Observer
from penstock.execute.observing.ranges import Ranges
from penstock.execute.observing.recorder import StepRecording, recorder_for
from penstock.execute.observing.run_ahead import Throttle, throttle_for
from penstock.execute.observing.shared_buffers import SharedBuffers
from penstock.execute.stages.assemble import Assembly
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.protocol import Messages
from penstock.ir.program import Program


class Observers:
    """The observers of the steps of one rank."""

    of_all_steps: Sequence[Observer]
    """The innermost first."""
    throttle: Throttle | None
    """The bound of the host's lead on its device; None where the host waits for each receive."""
    messages: Messages
    """The transport that the messages of a step take: the observer that checks them, if any does."""

    def __init__(
        self,
        control: Control,
        assembly: Assembly,
        clocks: ClockComparison,
        *,
        debug: str,
        ranges: bool,
        run_ahead: int | None,
        user_observers: Sequence[Observer],
        gradient_attribute: str,
    ) -> None:
        """Make the observers that look at every step of this rank, by the options of the pipeline.

        `assembly` is the part of the model on this rank. `clocks` compares the clocks of all ranks, around a step whose
        times the user records. `debug` is "off", "messages" or "values". `run_ahead` is the number of computations that
        the host may be ahead of its device, or None. Gradients are in the attribute `gradient_attribute` of parameters.

        Each observer puts a context around every call of a step, the first one innermost. So the checks see a call
        alone, and the user's observers and the throttle also see the time that the checks take.
        """
        # Those observers that a call of one step asks for, by a recording or a check of values, are made in `of_step`.
        self._assembly, self._clocks, device = assembly, clocks, clocks.device
        self.messages = transport = control.transport
        self._make_value_checks = partial(ValueChecks, transport, assembly.stages, gradient_attribute)
        observers: list[Observer] = []
        if assembly.shared_buffers:
            # Refuses a step that changes a buffer, such as a running mean, that layers of several ranks hold.
            observers.append(SharedBuffers(assembly.stages, assembly.shared_buffers))
        if debug == "values":
            # Each call takes and leaves the values that its instruction of the program declares; copies of tied
            # parameters are equal on all ranks; all values are finite.
            observers.append(DeclaredValues(transport.rank))
            observers.append(CopyChecks(control, assembly, gradient_attribute))
            observers.append(self._make_value_checks())
        if debug != "off":
            # The observer is a transport, too: it sends a header before each message, and compares it at arrival.
            observers.append(checked := CheckedMessages(transport, device))
            self.messages = checked
        if ranges:
            observers.append(Ranges(device))  # names each call for profilers such as Nsight
        # The throttle, outermost, keeps the host from running further ahead of the device than `run_ahead`.
        self.throttle = throttle_for(device, run_ahead, transport)
        self.of_all_steps = [*observers, *user_observers, *([] if self.throttle is None else [self.throttle])]

    def of_step(
        self, extra: Extra, program: Program, messenger: Messenger, memory: MemoryWatch | None = None
    ) -> list[Observer]:
        """Return what looks at one step besides, which was asked for an `extra`; `memory` if this is memory."""
        observers: list[Observer] = [*message_log(), *([] if memory is None else [memory])]
        if extra is Extra.VALUES:
            observers.append(self._make_value_checks())
        if extra is not Extra.RECORDING:
            return observers
        rank = self._clocks.transport.rank
        recorder = recorder_for(self._clocks, range(*program.offsets[rank : rank + 2].tolist()))
        output_bytes, early_weights = messenger.layouts.output_bytes, self._assembly.early_weights
        recording = StepRecording(program, recorder, self._clocks, output_bytes, early_weights)
        return [recording, recorder, *observers]
