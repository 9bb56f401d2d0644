"""Instructions: what a rank runs, as small values.

Text follows torch.distributed.pipelining: `3SEND_F1` sends stage 3's activation of microbatch 1 onward, `1RECV_F1`
receives stage 1's input.
"""

from dataclasses import dataclass

from penstock.ir.operations import OPERATIONS, Op


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
        operation = OPERATIONS[self.op]
        text = f"{self.stage}{operation.text}"
        if self.op is Op.REDUCE_TIED:
            return f"{text}{self.peer}"
        if operation.is_of_stage:
            return text
        return f"{text}{self.microbatch}.{self.slice}" if self.slice else f"{text}{self.microbatch}"


__all__ = ["Instruction", "Op"]
