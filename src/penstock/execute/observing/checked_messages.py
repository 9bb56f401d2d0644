"""`CheckedMessages`: a transport that says with every message what it is, and refuses one that is not what is expected.

    sender    [step, instruction, what, numel]  values        what: the operation with its stage, microbatch and slice
    receiver  compares with what its own program takes next, and only then takes the values

That sends and receives match in order is proved before a step. This is for finding out whether a transport, or a
program that was changed by hand, keeps to it. A receive is posted once its header has come, so that a message of
another size can do no harm; that costs the time which receives posted ahead would save.

[1] An instruction may send several tensors, or none. They are its parts, counted from 0; for none, a header goes alone.
[2] A receive is announced by its instruction, and taken when its values are needed, which may be in another order.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.observing.observer import Around, Observer, once_per_program
from penstock.execute.step import Bound, Step
from penstock.execute.transport.protocol import Messages, Tag, Ticket
from penstock.execute.transport.rank_names import rank_names
from penstock.ir.collectives import IS_BARRIER
from penstock.ir.deps import predecessors
from penstock.ir.instruction import Instruction, Op
from penstock.ir.operations import IS_RECEIVE, OPERATIONS, Group
from penstock.ir.program import Program

_NO_OP = -1
_NOTHING = -1
"""In place of a number of values: the header goes alone."""


class _Header(NamedTuple):
    """Goes in front of a message; both ends know the fields up to `position` from their own instruction."""

    op: int = _NO_OP
    """Number of the sending operation; `_NO_OP` for a message outside all instructions."""
    stage: int = 0
    """Stage of the sender; the index of the tied group in a message of a reduction."""
    microbatch: int = 0
    slice: int = 0
    position: int = -1
    """The sender's instruction, counted from 0; -1 where the receiver cannot know it."""
    step: int = 0
    part: int = 0
    """Index of this tensor among those of its instruction [1]."""
    numel: int = _NOTHING

    @property
    def instruction(self) -> str:
        if self.op == _NO_OP:
            return "a message outside all instructions"
        if _is_exchange(Op(self.op)):
            return f"a gradient of tied group {self.stage}"
        place = (self.stage, self.microbatch, self.slice)
        return str(Instruction(Op(self.op), *place, self.stage, 0))

    def __str__(self) -> str:
        place = f"instruction {self.position}, " if self.position >= 0 else ""
        size = "nothing" if self.numel == _NOTHING else f"{self.numel} values"
        return f"{self.instruction} ({place}step {self.step}, part {self.part}, {size})"


_OUTSIDE = _Header()


class _Awaited(NamedTuple):
    """A tensor that was asked for and has not been taken."""

    serial: int
    tensor: Tensor
    header: _Header | None
    """The header to expect; None means that of the announced receive whose turn it is [2]."""


@dataclass(slots=True, eq=False)
class _Channel:
    """The messages that are to come from one rank, in order."""

    awaited: deque[_Awaited] = field(default_factory=deque)
    announced: deque[_Header] = field(default_factory=deque)
    current: _Header = _OUTSIDE
    """The announced receive whose parts are coming."""
    part: int = -1
    """Index of the last part of `current` that has come."""

    def turn_to(self, part: int) -> _Header:
        """Return the header of the message that the next part belongs to; a part 0 begins another message."""
        if part == 0 or part != self.part + 1:
            self.current = self.announced.popleft() if self.announced else _OUTSIDE
        self.part = part
        return self.current


class CheckedMessages(Observer):
    """A transport around another one, for the messages of a step, which observes what instruction each belongs to."""

    needs_all_ranks = True  # both ends send and expect headers, or neither

    def __init__(self, transport: Messages, device: torch.device) -> None:
        self.rank = transport.rank
        self._names = rank_names(transport)
        self.num_ranks = transport.num_ranks
        self._transport = transport
        self._device = device
        self._part = 0
        self._serials = count()
        self._senders = once_per_program(partial(_senders, self.rank))
        self._begin(0)

    def _begin(self, serial: int) -> None:
        """Begin a step, with nothing under way from before."""
        self._step, self._sending = serial, _OUTSIDE
        self._receiving: _Header | None = _OUTSIDE
        self._tickets: dict[int, list[Ticket]] = {}
        """Those of the transport, by the serial number of one that was given for them."""
        self._channels = {peer: _Channel() for peer in range(self.num_ranks)}

    def begin(self, step: Step) -> None:
        self._begin(step.serial)

    def around(self, program: Program, bound: Bound) -> Around | None:
        row, is_wait = (bound.row, False) if bound.awaits is None else (bound.awaits, True)
        op = Op(int(program.op[row]))
        if op.is_receive:
            send = self._senders(program)[row]
            sender = int(program.rank_of_row[send])
            return partial(self._receiving_from, sender, _header_of(program, send), is_wait)
        if is_wait:
            return None
        if IS_BARRIER[op]:
            return partial(self._within, _OUTSIDE, None)  # it takes the receives that are due
        if op.is_send:
            receiver = program.placement.rank_of_stage[int(program.peer[bound.row])]
            return partial(self._sending_to, receiver, _header_of(program, bound.row))
        header = _header_of(program, bound.row)
        return partial(self._within, header, header) if _is_exchange(op) else None

    # ---- the messages of a step

    def post_send(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        # A message between hosts, as those of a barrier, has no header.
        tickets = [] if tag is Tag.CONTROL else [self._post_header(peer, tensor.numel())]
        tickets.append(self._transport.post_send(peer, tensor, tag))
        open_tickets = [ticket for ticket in tickets if not ticket.is_over]
        joint_ticket = Ticket(peer, True, next(self._serials), is_over=not open_tickets)
        self._tickets[joint_ticket.serial] = open_tickets
        return joint_ticket

    def post_receive(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        ticket = Ticket(peer, False, next(self._serials))
        if tag is Tag.CONTROL:
            self._tickets[ticket.serial] = [self._transport.post_receive(peer, tensor, tag)]
        else:
            self._channels[peer].awaited.append(_Awaited(ticket.serial, tensor, self._receiving))
        return ticket

    def wait(self, ticket: Ticket, limit_s: float | None = None) -> None:
        tickets = self._tickets.pop(ticket.serial, None)
        for message_ticket in tickets or ():  # of a send, one of the header, and one of the values
            self._transport.wait(message_ticket, limit_s)
        if ticket.is_send or tickets is not None:
            return
        awaited = self._channels[ticket.peer].awaited
        while awaited and awaited[0].serial <= ticket.serial:  # a channel delivers in order
            self._take_next(ticket.peer)

    def begin_group(self) -> None:
        """Do nothing: messages that say what they are travel one by one."""

    def end_group(self) -> None:
        """Do nothing."""

    # ---- which instruction a message belongs to

    @contextmanager
    def _sending_to(self, peer: int, header: _Header, step: Step) -> Iterator[None]:
        self._sending, self._part = header, 0
        yield
        if self._part == 0:  # [1]
            self._post_header(peer, _NOTHING)
        self._sending = _OUTSIDE

    @contextmanager
    def _receiving_from(self, peer: int, header: _Header, is_wait: bool, step: Step) -> Iterator[None]:
        announced = self._channels[peer].announced
        if not is_wait:
            announced.append(header)
        self._receiving = None
        yield
        self._receiving = _OUTSIDE
        while is_wait and header in announced:  # [1] nothing was taken of it
            self._take_next(peer)

    @contextmanager
    def _within(self, sending: _Header, receiving: _Header | None, step: Step) -> Iterator[None]:
        self._sending, self._receiving = sending, receiving
        yield
        self._sending = self._receiving = _OUTSIDE

    # ---- the headers

    def _post_header(self, peer: int, numel: int) -> Ticket:
        header = self._sending._replace(step=self._step, part=self._part, numel=numel)
        self._part += 1
        return self._transport.post_send(peer, torch.tensor(header, device=self._device))

    def _take_next(self, peer: int) -> None:
        """Receive the next header from a peer, compare it with the expected one, and receive the values behind it.

        A header says which instruction the values belong to, and how many they are. An instruction that sends no tensor
        sends a header alone. Messages of a peer arrive in order, so this may be an earlier message than the one that
        the caller waits for; its values go into the tensor of its own receive.

        Raises:
            PipelineError: the header is not the expected one; no value is received then, as their size may be wrong.
        """
        header_values = torch.tensor(_OUTSIDE, device=self._device)  # room for one header
        self._transport.wait(self._transport.post_receive(peer, header_values))
        received_header = _Header(*header_values.tolist())
        # The oldest receive that this rank has posted for the peer is for these values, if there are any.
        channel = self._channels[peer]
        is_alone = received_header.numel == _NOTHING or not channel.awaited
        awaited = None if is_alone else channel.awaited.popleft()
        numel = _NOTHING if awaited is None else awaited.tensor.numel()
        # A receive that was posted within a reduction has its header. Any other belongs to the oldest receive
        # instruction of the program whose parts, one per tensor, have not all come.
        expected_header = (awaited and awaited.header) or channel.turn_to(received_header.part)
        expected_header = expected_header._replace(step=self._step, part=received_header.part, numel=numel)
        if received_header != expected_header:
            raise PipelineError(
                f"{self._names[self.rank]}: expected {expected_header} next from {self._names[peer]}, but "
                f"{received_header} came. The two ranks do not send and take their messages in one order: run the same "
                "program on both, or look for a transport that changes it",
                rank=self._names.numbers[self.rank],
                instruction=expected_header.instruction,
                peer=self._names.numbers[peer],
            )
        if awaited is not None:
            self._transport.wait(self._transport.post_receive(peer, awaited.tensor))


def _senders(rank: int, program: Program) -> dict[int, int]:
    """Return the row of the matching send, by the row of each receive of a rank."""
    local_rows = slice(*program.offsets[rank : rank + 2])
    receives = local_rows.start + np.flatnonzero(IS_RECEIVE[program.op[local_rows]])
    return dict(zip(receives.tolist(), predecessors(program)[receives, 0].tolist(), strict=True))


def _is_exchange(op: Op) -> bool:
    """Whether ranks of the pipeline send each other messages within one instruction."""
    return OPERATIONS[op].group is Group.TIED


def _header_of(program: Program, row: int) -> _Header:
    """Return the header that the messages of a row have in common."""
    instruction = program.instruction(row)
    if _is_exchange(instruction.op):
        return _Header(instruction.op, instruction.peer)
    position = row - int(program.offsets[program.rank_of_row[row]])
    place = (instruction.stage, instruction.microbatch, instruction.slice)
    return _Header(instruction.op, *place, position)
