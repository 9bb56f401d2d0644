"""`Inspection`: what the options of a pipeline ask to see, or to hold back, of the steps of one rank.

    innermost   the instruction itself, and its recording
    values      debug="values": are all values finite
    messages    debug="messages" or "values": does each message say what is expected
    ranges      ranges=True: names for profilers
    throttle    run_ahead=N: how far the host may be ahead of its device
    outermost   overlap=hook: the two computations of a pair, with all of the above around each

Each is a change to the list of bound calls, made when a program is compiled; what is off leaves nothing there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from penstock.execute.calls import Change
from penstock.execute.observing.checked_values import ValueChecks
from penstock.execute.observing.checked_wires import CheckedWires
from penstock.execute.observing.copies import gradient_of, require_equal_copies, value_of
from penstock.execute.observing.log import log_norms, message_log
from penstock.execute.observing.ranges import ranges
from penstock.execute.options import PipelineOptions
from penstock.execute.overlap import overlapping
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.main_gradients import ATTRIBUTE
from penstock.execute.throttle import throttle_for
from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program


class Inspection:
    """What one rank's steps are looked at with. Every rank has the same, but for `ranges` and `run_ahead`."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        assembly: Assembly,
        options: PipelineOptions,
        note: Callable[[int], None],
    ) -> None:
        """Take what a pipeline was given; `note` is told the position of an instruction that fails in a pair."""
        self._transport = transport
        self._device = device
        self._assembly = assembly
        self._options = options
        self._note = note
        self._throttle = throttle_for(device, options.run_ahead, rank=transport.rank, deadline_s=transport.deadline_s)
        self._checked = CheckedWires(transport, device) if options.debug != "off" else None
        self._gradient_attribute = ATTRIBUTE if options.main_gradients else "grad"
        self._values = None
        if options.debug == "values":
            self._values = ValueChecks(transport.rank, assembly.stages, self._gradient_attribute)
        self._number = -1

    @property
    def wires(self) -> Transport:
        """What the messages of a step go over."""
        return self._transport if self._checked is None else self._checked

    def begin(self) -> None:
        """Count a step, before any message of it."""
        self._number += 1
        if self._checked is not None:
            self._checked.begin(self._number)
        if self._throttle is not None:
            self._throttle.clear()  # of an earlier step that failed

    def recover(self) -> None:
        """After a failure, let all ranks number their steps alike again, whatever one has tried alone; a collective."""
        numbers = self._transport.all_gather_object(self._number)
        self._number = max([number for number in numbers if isinstance(number, int)])

    def changes(self, program: Program) -> list[Change]:
        """Return what is changed in every step of a program."""
        found: list[Change] = []
        if self._values is not None:
            found.append(self._values.change(program))
        if self._checked is not None:
            found.append(self._checked.change(program))
        if self._options.ranges:
            found.append(ranges(program, self._device))
        if self._throttle is not None:
            found.append(self._throttle.change(program))
        if self._options.overlap is not None:
            first = int(program.offsets[self._transport.rank])
            note = self._note
            found.append(overlapping(program, self._options.overlap, self._device, lambda row: note(row - first)))
        return found

    def changes_of_step(self, program: Program) -> list[Change]:
        """Return what is changed in the step that begins, and in no other."""
        return message_log(program, self._number)

    @contextmanager
    def watching(self, *, is_training: bool) -> Iterator[None]:
        """Look at the values of a step while it runs, and at what it began and ended with."""
        self._look_before(is_training)
        with nullcontext() if self._values is None else self._values.watching():
            yield
        self._look_after(is_training)

    def _look_before(self, is_training: bool) -> None:
        if self._values is None:
            return
        require_equal_copies(self._transport, self._assembly.tied_copies, "parameter", value_of)
        if is_training:
            self._values.require_finite_gradients("before the step")

    def _look_after(self, is_training: bool) -> None:
        if self._values is None or not is_training:
            return
        self._values.require_finite_gradients("after the step")
        gradient = gradient_of(self._gradient_attribute)
        require_equal_copies(self._transport, self._assembly.tied_copies, "the gradient of", gradient)
        self._log_norms()

    def _log_norms(self) -> None:
        log_norms(
            self._transport,
            self._number,
            self._assembly.named_parameters(),
            copied=self._assembly.copied_names,
            gradient_attribute=self._gradient_attribute,
        )
