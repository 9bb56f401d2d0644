"""The table of operations: what each is called, waits for, makes and frees. All other code reads it.

    F -- OUTPUT --> F of the next stage          B, I -- INPUT_GRADIENT --> B, I of the previous stage
    F -- ACTIVATION --> B, I of the same stage   I -- WEIGHT_INPUTS --> W of the same stage

A LOAD makes the DATA that an F at an end of its route reads. With a recomputation F keeps its inputs only, the
CHECKPOINT, and R makes the ACTIVATION again. OFFLOAD moves what F keeps to the host, and RELOAD moves it back. Each
(stage, microbatch, slice) has one F, at most one R, and either one B or one I and one W. A value that is made on one
rank and read on another travels as the message of a send and a receive. `ir.keeps` and `ir.awaits` derive the rest.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """The work of an action: the operations that a schedule may contain."""

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
    OFFLOAD = 14
    RELOAD = 15
    BARRIER = 16
    LOAD = 17

    @property
    def is_compute(self) -> bool:
        return OPERATIONS[self].lane is Lane.COMPUTE

    @property
    def is_send(self) -> bool:
        return OPERATIONS[self].lane is Lane.SEND

    @property
    def is_receive(self) -> bool:
        return OPERATIONS[self].lane is Lane.RECEIVE


class Lane(Enum):
    """The part of a machine that an operation keeps busy."""

    COMPUTE = auto()
    SEND = auto()
    RECEIVE = auto()
    COLLECTIVE = auto()
    """All members of a group run it in one order."""
    COPY = auto()
    """Between a device and its host, beside the computations."""
    LOCAL = auto()
    """Neither computes nor moves anything."""


class Group(Enum):
    """The ranks that run a collective together."""

    REPLICAS = auto()
    """The ranks that hold the same stage in other pipelines; they run the same program."""
    TIED = auto()
    """The ranks of this pipeline whose stages hold one parameter."""
    PIPELINE = auto()  # all ranks of this pipeline


class Value(IntEnum):
    """Things that operations make for each other: of one stage, microbatch and slice, or of one stage."""

    DATA = auto()
    """The part of a batch that a stage takes; there when a row needs it, where no row loads it."""
    OUTPUT = auto()
    CARRY = auto()
    """Values that a slice keeps for the next one, such as keys and values."""
    ACTIVATION = auto()
    """All that the backward needs of its forward."""
    CHECKPOINT = auto()
    """The inputs of a forward whose activation is computed again."""
    OFFLOADED = auto()
    """An activation or checkpoint on the host."""
    INPUT_GRADIENT = auto()
    CARRY_GRADIENT = auto()
    WEIGHT_INPUTS = auto()
    """All that the gradients of the weights need once those of the inputs are known."""
    GRADIENT = auto()
    """The gradient of the weights of a stage, which many rows add to; it stays until the optimizer step."""
    WEIGHTS = auto()
    """The whole weights of a stage; there from the start where no row gathers them."""


class At(Enum):
    """Where a value that an operation reads is made."""

    OWN = auto()
    UPSTREAM = auto()
    """The previous stage on the microbatch's route."""
    DOWNSTREAM = auto()
    EARLIER_SLICE = auto()
    LATER_SLICE = auto()
    BATCH = auto()
    """Outside, for the first and the last stage of a route: they take inputs and targets. Other stages read nothing."""


@dataclass(frozen=True, slots=True)
class Read:
    """A value that an operation reads."""

    value: Value
    at: At = At.OWN
    column: int | None = 0
    """The column of `deps.predecessors`, 0 for the data; None where the order of the rank says enough."""


class Size(Enum):
    """Bytes that costs give for a stage (`live.StageBytes`); a workspace is there while a row runs."""

    OUTPUT = auto()
    """The message of the stage's output, and that of the output's gradient."""
    INPUT = auto()
    """The message of the previous stage's output, and that of its gradient."""
    ACTIVATION = auto()
    CHECKPOINT = auto()
    WEIGHT_INPUTS = auto()
    WEIGHTS = auto()  # of a unit that is sharded, while they are whole
    FORWARD_WORKSPACE = auto()
    BACKWARD_WORKSPACE = auto()


Bytes = Mapping[Size, int]
"""How many times a row adds a size to what its rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of the table. Each column is written down; none follows from another."""

    text: str
    """The letters behind the stage in texts, such as F in `2F0`."""
    name: str
    """The name in traces and legends, in the words of the field's tools."""
    lane: Lane
    group: Group | None = None
    """The ranks that run it together; None unless it is a collective."""
    runs_forward: bool = False
    """Whether it runs the layers of its stage."""
    runs_autograd: bool = False
    """Whether it computes the gradients of the stage's inputs."""
    reads: tuple[Read, ...] = ()
    makes: tuple[Value, ...] = ()
    """The values that it makes; of several that a stage keeps for a backward, the one that `ir.keeps` says."""
    frees: tuple[Value, ...] = ()
    """The values that it reads and no later row may read."""
    at_start: Bytes = field(default_factory=dict)
    """Bytes that a row adds to its device at its start."""
    at_end: Bytes = field(default_factory=dict)
    """Bytes that a row adds to its device once it has ended."""
    on_host_at_start: Bytes = field(default_factory=dict)
    on_host_at_end: Bytes = field(default_factory=dict)
    begins_keeping: bool = False
    """Whether it takes the slot in which a stage keeps what its backward needs of one forward."""
    ends_keeping: bool = False
    """Whether the slot that a forward took is free again behind it."""
    instead_of: Op | None = None
    """The operation that it excludes: a (stage, microbatch, slice) has a row of one of the two."""
    remakes: bool = False
    """Whether it makes again what an earlier row made, so that readers wait for it."""
    units: int = 1
    """Its length in drawings and in untimed walks; only the order of magnitude matters."""
    label: str = ""
    """The name of a computation in legends."""
    colors: tuple[str, ...] = ()
    """The colors of a computation, from dark over the usual color to pale: one for each stage of a rank."""
    message: Value | None = None
    """The value that a send or receive moves."""
    is_of_stage: bool = False
    """Whether it names a stage alone, no microbatch."""
    needs_backward: bool = False
    """Whether it belongs to training: it makes no sense without a backward before it."""
    is_in_torch: bool = True
    """Whether texts of torch.distributed.pipelining may have it."""


_WEIGHTS, _GRADIENT = Read(Value.WEIGHTS, column=None), Read(Value.GRADIENT, column=None)
_DATA = Read(Value.DATA, At.BATCH, None)
_WHOLE, _ONE_MORE, _ONE_LESS = (Value.WEIGHTS,), {Size.WEIGHTS: 1}, {Size.WEIGHTS: -1}
_F_KEEPS, _MORE, _LESS = (Value.CHECKPOINT, Value.ACTIVATION), {Size.ACTIVATION: 1}, {Size.ACTIVATION: -1}


def _backward(*, also_makes: Value, **columns: Any) -> Operation:
    """B or I: both take and pass on gradients, and free what their forward has kept."""
    columns |= {"lane": Lane.COMPUTE, "runs_autograd": True, "at_start": {Size.INPUT: 1, Size.BACKWARD_WORKSPACE: 1}}
    columns["at_end"] |= {Size.BACKWARD_WORKSPACE: -1}
    gradient, carry = Read(Value.INPUT_GRADIENT, At.DOWNSTREAM), Read(Value.CARRY_GRADIENT, At.LATER_SLICE, 2)
    reads = gradient, Read(Value.ACTIVATION, column=1), carry
    makes = (Value.INPUT_GRADIENT, Value.CARRY_GRADIENT, also_makes)
    return Operation(reads=(*reads, _WEIGHTS), makes=makes, frees=tuple(read.value for read in reads), **columns)


def _send(text: str, name: str, value: Value, size: Size) -> Operation:
    reads, frees = (Read(value),), (value,)
    return Operation(text=text, name=name, lane=Lane.SEND, reads=reads, frees=frees, at_end={size: -1}, message=value)


def _receive(text: str, name: str, read: Read, size: Size) -> Operation:
    return Operation(text=text, name=name, lane=Lane.RECEIVE, reads=(read,), at_start={size: 1}, message=read.value)


def _of_stage(text: str, name: str, group: Group | None, lane: Lane = Lane.COLLECTIVE, **columns: Any) -> Operation:
    return Operation(text=text, name=name, lane=lane, group=group, is_of_stage=True, **columns)


def _reduce(text: str, name: str, group: Group, **columns: Any) -> Operation:
    return _of_stage(text, name, group, reads=(_GRADIENT,), needs_backward=True, **columns)


def _move(text: str, frees: tuple[Value, ...], makes: tuple[Value, ...], **columns: Any) -> Operation:
    columns |= {"text": text, "name": text.capitalize(), "lane": Lane.COPY, "is_in_torch": False}
    return Operation(reads=tuple(Read(value, column=None) for value in frees), frees=frees, makes=makes, **columns)


OPERATIONS: dict[Op, Operation] = {
    Op.FORWARD: Operation(
        text="F",
        name="Forward",
        label="forward",
        lane=Lane.COMPUTE,
        runs_forward=True,
        reads=(Read(Value.OUTPUT, At.UPSTREAM), Read(Value.CARRY, At.EARLIER_SLICE, 1), _WEIGHTS, _DATA),
        makes=(Value.OUTPUT, Value.CARRY, Value.CHECKPOINT, Value.ACTIVATION),
        frees=(Value.OUTPUT, Value.CARRY, Value.DATA),
        # From now on the inputs are a part of the activation, and count once.
        at_start={Size.OUTPUT: 1, Size.ACTIVATION: 1, Size.INPUT: -1, Size.FORWARD_WORKSPACE: 1},
        at_end={Size.FORWARD_WORKSPACE: -1},
        begins_keeping=True,
        colors=("#1F6FB5", "#4A9FE0", "#93C8F2"),
    ),
    Op.BACKWARD: _backward(
        text="B",
        name="Backward",
        label="backward",
        also_makes=Value.GRADIENT,
        at_end={Size.ACTIVATION: -1, Size.OUTPUT: -1},
        ends_keeping=True,
        units=2,
        colors=("#B35E00", "#F29D1F", "#FFC766"),
    ),
    Op.BACKWARD_INPUT: _backward(
        text="I",
        name="Backward input",
        label="input gradient",
        also_makes=Value.WEIGHT_INPUTS,
        at_end={Size.ACTIVATION: -1, Size.WEIGHT_INPUTS: 1, Size.OUTPUT: -1},
        instead_of=Op.BACKWARD,
        colors=("#3E9B77", "#74CDA6", "#B4EBD0"),
    ),
    Op.BACKWARD_WEIGHT: Operation(
        text="W",
        name="Backward weight",
        label="weight gradient",
        lane=Lane.COMPUTE,
        reads=(Read(Value.WEIGHT_INPUTS), _WEIGHTS),
        makes=(Value.GRADIENT,),
        frees=(Value.WEIGHT_INPUTS,),
        at_start={Size.BACKWARD_WORKSPACE: 1},
        at_end={Size.WEIGHT_INPUTS: -1, Size.BACKWARD_WORKSPACE: -1},
        ends_keeping=True,
        colors=("#6E2152", "#A8487F", "#D68FB5"),
    ),
    Op.SEND_FORWARD: _send("SEND_F", "Send forward", Value.OUTPUT, Size.OUTPUT),
    Op.RECEIVE_FORWARD: _receive("RECV_F", "Receive forward", Read(Value.OUTPUT, At.UPSTREAM), Size.INPUT),
    Op.SEND_BACKWARD: _send("SEND_B", "Send backward", Value.INPUT_GRADIENT, Size.INPUT),
    Op.RECEIVE_BACKWARD: _receive("RECV_B", "Receive backward", Read(Value.INPUT_GRADIENT, At.DOWNSTREAM), Size.OUTPUT),
    Op.UNSHARD: _of_stage("UNSHARD", "Unshard", Group.REPLICAS, makes=_WHOLE, at_start=_ONE_MORE),
    Op.RESHARD: _of_stage("RESHARD", "Reshard", None, Lane.LOCAL, reads=(_WEIGHTS,), frees=_WHOLE, at_end=_ONE_LESS),
    Op.REDUCE_GRADIENT: _reduce("REDUCE_GRAD", "Reduce gradients", Group.REPLICAS),
    Op.REDUCE_TIED: _reduce("REDUCE_TIED", "Reduce tied gradients", Group.TIED, is_in_torch=False),
    Op.OPTIMIZER_STEP: _of_stage("STEP", "Optimizer step", Group.PIPELINE, needs_backward=True, is_in_torch=False),
    Op.BARRIER: _of_stage("BARRIER", "Barrier", Group.PIPELINE, is_in_torch=False),
    Op.RECOMPUTE: Operation(
        text="R",
        name="Recompute",
        label="recomputation",
        lane=Lane.COMPUTE,
        runs_forward=True,
        reads=(Read(Value.CHECKPOINT), _WEIGHTS),
        makes=(Value.ACTIVATION,),
        frees=(Value.CHECKPOINT,),
        at_start={Size.ACTIVATION: 1, Size.CHECKPOINT: -1, Size.FORWARD_WORKSPACE: 1},
        at_end={Size.FORWARD_WORKSPACE: -1},
        remakes=True,
        is_in_torch=False,
        colors=("#0F0426", "#240959", "#502B99"),
    ),
    Op.LOAD: Operation(text="LOAD", name="Load", lane=Lane.LOCAL, makes=(Value.DATA,), is_in_torch=False),
    Op.OFFLOAD: _move("OFFLOAD", _F_KEEPS, (Value.OFFLOADED,), at_end=_LESS, on_host_at_start=_MORE),
    Op.RELOAD: _move("RELOAD", (Value.OFFLOADED,), _F_KEEPS, at_start=_MORE, on_host_at_end=_LESS, remakes=True),
}

*_first, _last = (kind.letter for kind in Kind)
KIND_LETTERS = f"{', '.join(_first)} or {_last}"
"""The letters of all kinds, as error messages list them: F, B, ... or R."""
OP_OF_TEXT = {operation.text: op for op, operation in OPERATIONS.items()}
NUM_OPS = len(Op)
_SENDS = {row.message: op for op, row in OPERATIONS.items() if row.lane is Lane.SEND}
MESSAGES = {row.message: (_SENDS[row.message], op) for op, row in OPERATIONS.items() if row.lane is Lane.RECEIVE}
"""The values that travel between ranks, with the operations at both ends."""

Flags = NDArray[np.bool_]
"""[NUM_OPS] by the number of an operation: `IS_COMPUTE[op]` are the rows of a column `op` that compute."""


def flags_where(holds: Callable[[Operation], bool]) -> Flags:
    flags = np.array([holds(OPERATIONS[op]) for op in Op])
    flags.flags.writeable = False
    return flags


IS_COMPUTE = flags_where(lambda operation: operation.lane is Lane.COMPUTE)
IS_SEND = flags_where(lambda operation: operation.lane is Lane.SEND)
IS_RECEIVE = flags_where(lambda operation: operation.lane is Lane.RECEIVE)
IS_MESSAGE = IS_SEND | IS_RECEIVE
IS_COPY = flags_where(lambda operation: operation.lane is Lane.COPY)
NAMES_MICROBATCH = flags_where(lambda operation: not operation.is_of_stage)
NEEDS_BACKWARD = flags_where(lambda operation: operation.needs_backward)
IS_IN_TORCH = flags_where(lambda operation: operation.is_in_torch)
RUNS_FORWARD = flags_where(lambda operation: operation.runs_forward)
RUNS_AUTOGRAD = flags_where(lambda operation: operation.runs_autograd)
IS_BACKWARD = flags_where(lambda operation: operation.lane is Lane.COMPUTE and not operation.runs_forward)
NAMES_SLOT = IS_COMPUTE | IS_COPY
"""Whether a row names the slot in which its stage keeps what a backward needs of one forward."""
MAKES_KEPT = flags_where(lambda operation: operation.begins_keeping or operation.lane is Lane.COPY)
"""Whether `ir.keeps` says which value a row makes, or reads, of those that a stage keeps."""
BEGINS_KEEPING = flags_where(lambda operation: operation.begins_keeping)
ENDS_KEEPING = flags_where(lambda operation: operation.ends_keeping)

KEPT = frozenset({Value.ACTIVATION, Value.CHECKPOINT, Value.WEIGHT_INPUTS})
"""The values that a stage keeps of a forward for later; they have one slot from the F to its B or W."""
OF_STAGE = frozenset({Value.GRADIENT, Value.WEIGHTS})
"""Values of a stage; the others are of one microbatch and slice too."""


def _message(value_of: Callable[[Operation], Iterable[Value | None]]) -> NDArray[np.int8]:
    """[NUM_OPS] the index of a message among `MESSAGES`, -1 for none."""
    indices_of_ops = ([n for n, value in enumerate(MESSAGES) if value in value_of(OPERATIONS[op])] for op in Op)
    return np.array([indices[0] if indices else -1 for indices in indices_of_ops], np.int8)


MOVED = _message(lambda operation: [operation.message])
MADE = _message(lambda operation: operation.makes)
TAKEN = _message(lambda row: [read.value for read in row.reads if row.lane is Lane.COMPUTE and read.at is not At.OWN])
"""By operation, the message that it sends or receives, that it makes, and that it takes."""

KIND_INDEX = np.array([list(Kind).index(Kind(op)) if op in set(map(int, Kind)) else -1 for op in Op], np.int8)
"""[NUM_OPS] the place of an operation among the kinds, for tables that have one row per kind."""


def exclusive(op: Op) -> Op:
    """Return the operation that stands for all of which there is one per (stage, microbatch, slice), B for B and I."""
    return OPERATIONS[op].instead_of or op


def peer_at(op: Op) -> At:
    """Return which neighbor is at the other end of a send or receive."""
    _, receive = MESSAGES[OPERATIONS[op].message]
    comes_from_upstream = OPERATIONS[receive].reads[0].at is At.UPSTREAM
    return At.UPSTREAM if comes_from_upstream == (op is receive) else At.DOWNSTREAM


def makers(value: Value) -> list[Op]:
    """Return the operations that make a value, those first that count where several of them ran: R before F."""
    return sorted((op for op in Op if value in OPERATIONS[op].makes), key=lambda op: not OPERATIONS[op].remakes)
