"""Instructions: what a rank runs, one row of `INSTRUCTIONS` each.

The first four are the kinds of actions, with the same numbers. Text follows torch.distributed.pipelining:
`3SEND_F1` sends stage 3's activation of microbatch 1 onward, `1RECV_F1` receives stage 1's input.
"""

from dataclasses import dataclass
from enum import IntEnum

from penstock.ir.action import Kind


class Op(IntEnum):
    """The operation of an instruction."""

    FORWARD = Kind.FORWARD
    BACKWARD = Kind.BACKWARD
    BACKWARD_INPUT = Kind.BACKWARD_INPUT
    BACKWARD_WEIGHT = Kind.BACKWARD_WEIGHT
    SEND_FORWARD = 4
    RECEIVE_FORWARD = 5
    SEND_BACKWARD = 6
    RECEIVE_BACKWARD = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRADIENT = 10
    REDUCE_TIED = 11
    OPTIMIZER_STEP = 12

    @property
    def is_compute(self) -> bool:
        return self <= Op.BACKWARD_WEIGHT

    @property
    def is_send(self) -> bool:
        return self in (Op.SEND_FORWARD, Op.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        return self in (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One row of the table of instructions."""

    text: str
    names_microbatch: bool
    """Whether the text ends in a microbatch (and slice)."""
    is_collective: bool
    """Whether all members of a group must run it in one order."""


INSTRUCTIONS: dict[Op, OpInfo] = {
    Op.FORWARD: OpInfo("F", True, False),
    Op.BACKWARD: OpInfo("B", True, False),
    Op.BACKWARD_INPUT: OpInfo("I", True, False),
    Op.BACKWARD_WEIGHT: OpInfo("W", True, False),
    Op.SEND_FORWARD: OpInfo("SEND_F", True, False),
    Op.RECEIVE_FORWARD: OpInfo("RECV_F", True, False),
    Op.SEND_BACKWARD: OpInfo("SEND_B", True, False),
    Op.RECEIVE_BACKWARD: OpInfo("RECV_B", True, False),
    Op.UNSHARD: OpInfo("UNSHARD", False, True),
    Op.RESHARD: OpInfo("RESHARD", False, False),
    Op.REDUCE_GRADIENT: OpInfo("REDUCE_GRAD", False, True),
    Op.REDUCE_TIED: OpInfo("REDUCE_TIED", False, True),
    Op.OPTIMIZER_STEP: OpInfo("STEP", False, True),
}

OP_OF_TEXT = {info.text: op for op, info in INSTRUCTIONS.items()}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of one rank."""

    op: Op
    stage: int
    microbatch: int
    """0 where the operation names none."""
    slice: int
    peer: int
    """Sends and receives: the stage at the other end. REDUCE_TIED: the index of the tied group. Else the own stage."""
    slot: int
    """Computes: where the stage's saved activation lives. Receives and sends: the message buffer. Else 0."""

    def __str__(self) -> str:
        info = INSTRUCTIONS[self.op]
        text = f"{self.stage}{info.text}"
        if self.op is Op.REDUCE_TIED:
            return f"{text}{self.peer}"
        if not info.names_microbatch:
            return text
        return f"{text}{self.microbatch}.{self.slice}" if self.slice else f"{text}{self.microbatch}"
