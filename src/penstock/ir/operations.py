"""The table of operations: what each is called, waits for, makes and frees. All other code reads it.

    F -- OUTPUT --> F of the next stage          B, I -- INPUT_GRADIENT --> B, I of the previous stage
    F -- ACTIVATION --> B, I of the same stage   I -- WGRAD_INPUTS --> W of the same stage

With a recomputation F keeps its inputs only, the CHECKPOINT, and R makes the ACTIVATION again. Each (stage, microbatch,
slice) has one F, at most one R, and either one B or one I and one W. A value that is made on one rank and awaited on
another travels as the message of a send and a receive.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import cache

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """What an action computes: the operations that a schedule may contain."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of inputs and weights at once."""
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    RECOMPUTE = 13
    """The forward once more, right before a backward, because the first run kept its inputs only."""

    @property
    def letter(self) -> str:
        return OPERATIONS[Op(self)].text


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
    RECOMPUTE = Kind.RECOMPUTE

    @property
    def is_compute(self) -> bool:
        return OPERATIONS[self].role is Role.COMPUTE

    @property
    def is_send(self) -> bool:
        return OPERATIONS[self].role is Role.SEND

    @property
    def is_receive(self) -> bool:
        return OPERATIONS[self].role is Role.RECEIVE


class Role(Enum):
    """What running an operation means."""

    COMPUTE = auto()
    SEND = auto()
    RECEIVE = auto()
    COLLECTIVE = auto()
    """All members of a group run it in one order."""
    LOCAL = auto()


class Value(Enum):
    """What operations make for each other, of one stage, microbatch and slice."""

    OUTPUT = auto()
    CARRY = auto()
    """What a slice leaves for the next one, such as keys and values."""
    ACTIVATION = auto()
    """All that the backward needs of its forward."""
    CHECKPOINT = auto()
    """The inputs of a forward whose activation is computed again."""
    INPUT_GRADIENT = auto()
    CARRY_GRADIENT = auto()
    WGRAD_INPUTS = auto()
    """What the gradients of the weights need once those of the inputs are known."""
    GRADIENT = auto()
    """Of the weights; it stays until the optimizer step."""


class At(Enum):
    """Where a value that an operation waits for is made."""

    OWN = auto()
    UPSTREAM = auto()
    """The previous stage on the microbatch's route."""
    DOWNSTREAM = auto()
    EARLIER_SLICE = auto()
    LATER_SLICE = auto()


@dataclass(frozen=True, slots=True)
class Wait:
    """A value that an operation waits for."""

    value: Value
    at: At
    column: int = 0
    """Of `deps.predecessors`: 0 is where the data comes from."""


Colors = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of the table."""

    text: str
    """What follows the stage in texts, such as F in `2F0`."""
    name: str
    """In traces and legends, in the words of the field's tools."""
    role: Role
    waits: tuple[Wait, ...] = ()
    makes: tuple[Value, ...] = ()
    """The first is what tells its row from others of the same (stage, microbatch, slice)."""
    frees: tuple[Value, ...] = ()
    units: int = 1
    """Its length in drawings and in untimed walks; only the order of magnitude matters."""
    label: str = ""
    """Of a computation, in legends."""
    colors: Colors = ()
    """Of a computation, from dark over the usual color to pale: one for each stage of a rank."""
    message: Value | None = None
    """What a send or receive moves."""
    is_of_stage: bool = False
    """Whether it names a stage alone, no microbatch."""
    needs_backward: bool = False
    """Whether it belongs to training: it makes no sense without a backward before it."""
    is_in_torch: bool = True
    """Whether texts of torch.distributed.pipelining may have it."""
    joins_ranks: bool = False
    """Whether all members wait for each other, and are ranks of one pipeline."""


_BACKWARD_WAITS = (
    Wait(Value.INPUT_GRADIENT, At.DOWNSTREAM),
    Wait(Value.ACTIVATION, At.OWN, 1),
    Wait(Value.CARRY_GRADIENT, At.LATER_SLICE, 2),
)

OPERATIONS: dict[Op, Operation] = {
    Op.FORWARD: Operation(
        text="F",
        name="Forward",
        label="forward",
        role=Role.COMPUTE,
        waits=(Wait(Value.OUTPUT, At.UPSTREAM), Wait(Value.CARRY, At.EARLIER_SLICE, 1)),
        makes=(Value.OUTPUT, Value.CARRY, Value.CHECKPOINT, Value.ACTIVATION),
        colors=("#1F6FB5", "#4A9FE0", "#93C8F2"),
    ),
    Op.BACKWARD: Operation(
        text="B",
        name="Backward",
        label="backward",
        role=Role.COMPUTE,
        waits=_BACKWARD_WAITS,
        makes=(Value.INPUT_GRADIENT, Value.CARRY_GRADIENT, Value.GRADIENT),
        frees=(Value.ACTIVATION,),
        units=2,
        colors=("#B35E00", "#F29D1F", "#FFC766"),
    ),
    Op.BACKWARD_INPUT: Operation(
        text="I",
        name="Backward input",
        label="input gradient",
        role=Role.COMPUTE,
        waits=_BACKWARD_WAITS,
        makes=(Value.INPUT_GRADIENT, Value.CARRY_GRADIENT, Value.WGRAD_INPUTS),
        frees=(Value.ACTIVATION,),
        colors=("#3E9B77", "#74CDA6", "#B4EBD0"),
    ),
    Op.BACKWARD_WEIGHT: Operation(
        text="W",
        name="Backward weight",
        label="weight gradient",
        role=Role.COMPUTE,
        waits=(Wait(Value.WGRAD_INPUTS, At.OWN),),
        makes=(Value.GRADIENT,),
        frees=(Value.WGRAD_INPUTS,),
        colors=("#6E2152", "#A8487F", "#D68FB5"),
    ),
    Op.SEND_FORWARD: Operation(
        text="SEND_F",
        name="Send forward",
        role=Role.SEND,
        waits=(Wait(Value.OUTPUT, At.OWN),),
        message=Value.OUTPUT,
    ),
    Op.RECEIVE_FORWARD: Operation(
        text="RECV_F",
        name="Receive forward",
        role=Role.RECEIVE,
        waits=(Wait(Value.OUTPUT, At.UPSTREAM),),
        message=Value.OUTPUT,
    ),
    Op.SEND_BACKWARD: Operation(
        text="SEND_B",
        name="Send backward",
        role=Role.SEND,
        waits=(Wait(Value.INPUT_GRADIENT, At.OWN),),
        message=Value.INPUT_GRADIENT,
    ),
    Op.RECEIVE_BACKWARD: Operation(
        text="RECV_B",
        name="Receive backward",
        role=Role.RECEIVE,
        waits=(Wait(Value.INPUT_GRADIENT, At.DOWNSTREAM),),
        message=Value.INPUT_GRADIENT,
    ),
    Op.UNSHARD: Operation(text="UNSHARD", name="Unshard", role=Role.COLLECTIVE, is_of_stage=True),
    Op.RESHARD: Operation(text="RESHARD", name="Reshard", role=Role.LOCAL, is_of_stage=True),
    Op.REDUCE_GRADIENT: Operation(
        text="REDUCE_GRAD", name="Reduce gradients", role=Role.COLLECTIVE, is_of_stage=True, needs_backward=True
    ),
    Op.REDUCE_TIED: Operation(
        text="REDUCE_TIED",
        name="Reduce tied gradients",
        role=Role.COLLECTIVE,
        is_of_stage=True,
        needs_backward=True,
        joins_ranks=True,
        is_in_torch=False,
    ),
    Op.OPTIMIZER_STEP: Operation(
        text="STEP",
        name="Optimizer step",
        role=Role.COLLECTIVE,
        is_of_stage=True,
        needs_backward=True,
        joins_ranks=True,
        is_in_torch=False,
    ),
    Op.RECOMPUTE: Operation(
        text="R",
        name="Recompute",
        label="recomputation",
        role=Role.COMPUTE,
        waits=(Wait(Value.CHECKPOINT, At.OWN),),
        makes=(Value.ACTIVATION,),
        frees=(Value.CHECKPOINT,),
        is_in_torch=False,
        colors=("#0F0426", "#240959", "#502B99"),
    ),
}

*_first, _last = (kind.letter for kind in Kind)
KIND_LETTERS = f"{', '.join(_first)} or {_last}"
"""For messages: F, B, ... or R."""
OP_OF_TEXT = {operation.text: op for op, operation in OPERATIONS.items()}
NUM_OPS = len(Op)
MESSAGES = {
    operation.message: (send, receive)
    for send, operation in OPERATIONS.items()
    for receive, other in OPERATIONS.items()
    if operation.role is Role.SEND and other.role is Role.RECEIVE and operation.message is other.message
}
"""The values that travel between ranks, with the operations at both ends."""

Flags = NDArray[np.bool_]
"""[NUM_OPS] by the number of an operation: `IS_COMPUTE[op]` are the rows of a column `op` that compute."""


def _flags(holds: Callable[[Operation], bool]) -> Flags:
    flags = np.array([holds(OPERATIONS[op]) for op in Op])
    flags.flags.writeable = False
    return flags


IS_COMPUTE = _flags(lambda operation: operation.role is Role.COMPUTE)
IS_SEND = _flags(lambda operation: operation.role is Role.SEND)
IS_RECEIVE = _flags(lambda operation: operation.role is Role.RECEIVE)
IS_MESSAGE = IS_SEND | IS_RECEIVE
NAMES_MICROBATCH = _flags(lambda operation: not operation.is_of_stage)
NEEDS_BACKWARD = _flags(lambda operation: operation.needs_backward)
IS_IN_TORCH = _flags(lambda operation: operation.is_in_torch)
JOINS_RANKS = _flags(lambda operation: operation.joins_ranks)
RUNS_FORWARD = _flags(lambda operation: Value.ACTIVATION in operation.makes)
"""Forwards, and those that run again."""
RUNS_AUTOGRAD = _flags(lambda operation: Value.ACTIVATION in operation.frees)
"""Whole backwards, and the parts of split ones that compute the gradients of inputs."""
IS_BACKWARD = _flags(lambda operation: bool({Value.INPUT_GRADIENT, Value.GRADIENT} & set(operation.makes)))
"""Whole backwards and the parts of split ones."""

_MESSAGE_VALUES = list(MESSAGES)
KEPT = {Value.ACTIVATION, Value.CHECKPOINT, Value.WGRAD_INPUTS}
"""What a stage keeps of a forward for later; it has one place from the F to its B or W."""

BEGINS_KEEPING = _flags(lambda operation: bool(KEPT & set(operation.makes)) and not KEPT & set(operation.frees))
ENDS_KEEPING = _flags(lambda operation: bool(KEPT & set(operation.frees)) and not KEPT & set(operation.makes))


def _message(value_of: Callable[[Operation], Iterable[Value | None]]) -> NDArray[np.int8]:
    """[NUM_OPS] the index of a message among `MESSAGES`, -1 for none."""
    of_op = ([value for value in value_of(OPERATIONS[op]) if value in MESSAGES] for op in Op)
    return np.array([_MESSAGE_VALUES.index(values[0]) if values else -1 for values in of_op], np.int8)


MOVED = _message(lambda operation: [operation.message])
MADE = _message(lambda operation: operation.makes)
TAKEN = _message(
    lambda operation: [
        wait.value for wait in operation.waits if operation.role is Role.COMPUTE and wait.at is not At.OWN
    ]
)
"""By operation, the message that it sends or receives, that it makes, and that it takes."""

KIND_INDEX = np.array([list(Kind).index(Kind(op)) if op in set(map(int, Kind)) else -1 for op in Op], np.int8)
"""[NUM_OPS] the place of an operation among the kinds, for tables that have one row per kind."""


@cache
def exclusive(op: Op) -> Op:
    """Return the operation that stands for all of which there is one per (stage, microbatch, slice), B for B and I."""
    first = OPERATIONS[op].makes[:1]
    return next(other for other in Op if other is op or (first and OPERATIONS[other].makes[:1] == first))


def peer_at(op: Op) -> At:
    """Return which neighbor is at the other end of a send or receive."""
    _, receive = MESSAGES[OPERATIONS[op].message]
    comes_from = OPERATIONS[receive].waits[0].at
    if op is receive:
        return comes_from
    return At.DOWNSTREAM if comes_from is At.UPSTREAM else At.UPSTREAM


def makers(value: Value) -> Iterator[Op]:
    """Yield the operations that make a value, those first that count where several of them ran: R before F."""
    return (op for op in reversed(Op) if value in OPERATIONS[op].makes)
