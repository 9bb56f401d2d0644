"""For users of DeepSpeed's `PipeSchedule`: its base class, its instructions, and a reader of what a subclass yields.

Penstock makes the messages of a schedule itself. A subclass says by its messages and buffers which microbatch a forward
or a backward is of, so the reader follows them through the buffers, stage after stage:

    LoadMicroBatch    the next microbatch comes into a buffer: inputs on the first stage, labels on the last one
    SendActivation    the microbatch of the buffer is the next one that the next stage receives
    ForwardPass       runs the microbatch that its buffer holds

What DeepSpeed's engine would compute of a stale or an empty buffer is refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from numbers import Integral
from typing import Any, NoReturn

from penstock.errors import ConfigError, described, nearest


class PipeInstruction:
    """One instruction of a stage; keywords become attributes."""

    def __init__(self, **keywords: Any) -> None:
        for name, value in keywords.items():
            setattr(self, name, value)


class BufferOpInstruction(PipeInstruction):
    """An instruction that works on one buffer of its stage."""

    def __init__(self, buffer_id: int, **keywords: Any) -> None:
        super().__init__(buffer_id=buffer_id, **keywords)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next microbatch off the data: its inputs on the first stage, its labels on the last one."""


class ForwardPass(BufferOpInstruction):
    """Run the layers of the stage."""


class BackwardPass(BufferOpInstruction):
    """Run the backward of the stage."""


class SendActivation(BufferOpInstruction):
    """Send the output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the output of the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the output from the next stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over stages."""


class ReduceGrads(PipeInstruction):
    """Sum gradients over replicas."""


class OptimizerStep(PipeInstruction):
    """Change the weights."""


class PipeSchedule(ABC):
    """A schedule of one stage of a pipeline; a subclass yields lists of instructions, one per step, in `steps`.

    Every stage has as many steps as the others, so that all could wait for each other after each; a list may be empty.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterable[Sequence[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return how many buffers the stage has: by default one for each microbatch."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """Return the buffer of a microbatch where buffers take turns."""
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[Sequence[PipeInstruction]]:
        return iter(self.steps())


def is_pipe_schedule(schedule: type) -> bool:
    """Whether a class is read as a `PipeSchedule`, Penstock's or DeepSpeed's own."""
    return any(base.__name__ == PipeSchedule.__name__ for base in schedule.__mro__)


def rows_of_pipe_schedule(schedule: type, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """Return the actions of every rank, such as `1F0`, of a class like `PipeSchedule`, which has a stage per rank.

    Raises:
        ConfigError: an unknown instruction, one whose buffer does not hold what it needs, a message without its other
            end, steps that do not end, or other numbers of steps on other stages. It names class, stage and step.
    """
    readers: list[_StageReader] = []
    for stage in range(num_ranks):
        reader = _StageReader(schedule.__name__, stage, num_ranks, num_microbatches, readers[-1] if readers else None)
        reader.read(schedule(micro_batches=num_microbatches, stages=num_ranks, stage_id=stage))
        readers.append(reader)
    for reader, next_reader in pairwise(readers):
        next_reader.require_same_steps(readers[0])
        reader.require_exchanged(next_reader)
    return [reader.row for reader in readers]


MAX_PER_MICROBATCH = 6
"""Instructions of a stage between others for one microbatch: two passes, and two messages at either end."""
MAX_STEPS_PER_INSTRUCTION = 10
"""Steps per instruction of all stages: more of them, most of which are empty, are no schedule but an endless loop."""


@dataclass(slots=True)
class _Buffer:
    """The microbatch whose value each place of a buffer holds; None where it is empty."""

    inputs: int | None = None
    labels: int | None = None
    output: int | None = None
    """The output, with what its backward needs."""
    unsent_output: int | None = None
    output_gradient: int | None = None
    unsent_gradient: int | None = None


@dataclass(slots=True, eq=False)
class _StageReader:
    """What one stage does, read off its instructions in order."""

    name: str
    index: int
    num_stages: int
    num_microbatches: int
    previous: "_StageReader | None"
    row: list[str] = field(default_factory=list)
    """The actions of the stage."""
    sent_activations: list[int] = field(default_factory=list)
    """The microbatches whose activations go to the next stage, in order."""
    sent_gradients: list[int] = field(default_factory=list)
    """The microbatches whose gradients go to the previous stage, in order."""
    received_gradients: list[int] = field(default_factory=list)
    """The microbatches into whose buffers gradients come from the next stage, in order."""
    num_steps: int = 0
    num_loaded: int = 0
    """Microbatches that have come off the data."""
    num_received: int = 0
    """Activations that have come from the previous stage."""
    _buffers: list[_Buffer] = field(default_factory=list)
    _end_instruction: str = ""
    """The first instruction that comes when all gradients are there."""
    _instruction: str = ""
    """The words for the instruction that is read, for messages."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def read(self, schedule: Any) -> None:
        """Follow all instructions of this stage. Raises: ConfigError."""
        num_buffers = schedule.num_pipe_buffers()
        if not isinstance(num_buffers, Integral) or int(num_buffers) < 1:
            self.fail(f"num_pipe_buffers() returned {num_buffers!r}; expected a whole number, 1 or larger")
        self._buffers = [_Buffer() for _ in range(int(num_buffers))]
        # Steps may be empty while a stage waits for others, so their number is limited by the work of all stages.
        most_instructions = MAX_PER_MICROBATCH * self.num_microbatches + len(_AT_THE_END)
        most_steps = MAX_STEPS_PER_INSTRUCTION * self.num_stages * most_instructions
        num_instructions = 0
        for step in schedule.steps():
            self._instruction = f", step {self.num_steps}"
            if self.num_steps == most_steps:
                self.fail(f"{self._sizes()} take {most_steps} steps at most, and steps() goes on; let it end")
            if not isinstance(step, Iterable):
                self.fail(f"steps() yielded {described(step)}; expected a list of instructions, which may be empty")
            for instruction in islice(step, most_instructions + 1):
                num_instructions += 1
                if num_instructions > most_instructions:
                    self.fail(f"{self._sizes()} take {most_instructions} instructions of a stage at most, got more")
                self._follow(instruction)
            self.num_steps += 1
        self._instruction = ""

    def require_same_steps(self, first: "_StageReader") -> None:
        """Refuse another number of steps than stage 0 has: then the stages could not wait for each other after each."""
        if self.num_steps != first.num_steps:
            self.fail(
                f"{self.num_steps} steps, but stage {first.index} has {first.num_steps}; yield as many on every stage, "
                "an empty list where a stage waits"
            )

    def require_exchanged(self, next_reader: "_StageReader") -> None:
        """Refuse messages between this stage and the next one that do not arrive, or arrive in another's buffer."""
        num_sent, num_received = len(self.sent_activations), next_reader.num_received
        if num_sent > num_received:
            next_reader.fail(f"{num_received} RecvActivation, but stage {self.index} has {num_sent} SendActivation")
        if self.received_gradients != next_reader.sent_gradients:
            self.fail(
                f"RecvGrad takes the gradients of the microbatches {self.received_gradients}, but SendGrad of stage "
                f"{next_reader.index} sends those of {next_reader.sent_gradients}; keep the order of the other end"
            )

    def _sizes(self) -> str:
        return f"{self.num_microbatches} microbatches on {self.num_stages} stages"

    def fail(self, problem: str) -> NoReturn:
        """Raise a ConfigError that names class, stage, step and instruction."""
        raise ConfigError(f"{self.name}, stage {self.index}{self._instruction}: {problem}", key="schedule")

    def _follow(self, instruction: object) -> None:
        """Follow one instruction."""
        names = [base.__name__ for base in type(instruction).__mro__]
        name = next((name for name in names if name in _BUFFER_HANDLERS or name in _AT_THE_END), names[0])
        if name in _AT_THE_END:
            self._end_instruction = self._end_instruction or name
            return
        if name == "CommitP2P":
            self.fail(
                f"{name} is of schedules with two stages per rank, which are not read; of DeepSpeed's "
                'DualPipeVSchedule, give the name "dualpipe-v"'
            )
        if name not in _BUFFER_HANDLERS:
            known_names = [*_BUFFER_HANDLERS, *_AT_THE_END]
            self.fail(f"{name} is no instruction; known: {', '.join(known_names)}.{nearest(name, known_names)}")
        number = getattr(instruction, "buffer_id", None)
        self._instruction = f", step {self.num_steps}, {name}(buffer_id={number})"
        if not isinstance(number, Integral) or not 0 <= int(number) < len(self._buffers):
            self.fail(f"there are {len(self._buffers)} buffers, by num_pipe_buffers(), numbered from 0")
        if self._end_instruction:
            self.fail(f"{self._end_instruction} comes before it; a batch ends with one, behind its last backward")
        _BUFFER_HANDLERS[name](self, self._buffers[int(number)])


def _load(reader: _StageReader, buffer: _Buffer) -> None:
    if not (reader.is_first or reader.is_last):
        reader.fail("only the first and the last stage have data; leave it out")
    if reader.num_loaded == reader.num_microbatches:
        reader.fail(f"all {reader.num_microbatches} microbatches have been loaded; leave it out")
    microbatch, reader.num_loaded = reader.num_loaded, reader.num_loaded + 1
    if reader.is_first:
        _fill_inputs(reader, buffer, microbatch)
    if reader.is_last:
        if buffer.labels is not None:
            reader.fail(f"the labels of microbatch {buffer.labels} are in the buffer; run its ForwardPass first")
        buffer.labels = microbatch


def _receive_activation(reader: _StageReader, buffer: _Buffer) -> None:
    activations = [] if reader.previous is None else reader.previous.sent_activations
    if reader.num_received == len(activations):
        sender = (
            "there is no previous stage" if reader.is_first else f"stage {reader.index - 1} sends {len(activations)}"
        )
        reader.fail(f"{sender}, so nothing arrives; leave it out, or add the SendActivation")
    _fill_inputs(reader, buffer, activations[reader.num_received])
    reader.num_received += 1


def _fill_inputs(reader: _StageReader, buffer: _Buffer, microbatch: int) -> None:
    if buffer.inputs is not None:
        reader.fail(f"the inputs of microbatch {buffer.inputs} are in the buffer; run its ForwardPass first")
    # The gradient that is to be sent is that of the inputs, which are replaced now.
    if buffer.unsent_gradient is not None:
        reader.fail(f"the gradient of microbatch {buffer.unsent_gradient} is in the buffer; SendGrad comes first")
    # DeepSpeed's backward goes by the inputs that are in the buffer then, so an output without them has none.
    buffer.inputs, buffer.output, buffer.output_gradient = microbatch, None, None


def _forward(reader: _StageReader, buffer: _Buffer) -> None:
    if buffer.inputs is None:
        reader.fail(f"the buffer has no inputs; {'LoadMicroBatch' if reader.is_first else 'RecvActivation'} fills it")
    if reader.is_last and buffer.labels != buffer.inputs:
        labels = "no labels" if buffer.labels is None else f"the labels of microbatch {buffer.labels}"
        reader.fail(f"the buffer has the inputs of microbatch {buffer.inputs} and {labels}; LoadMicroBatch fills it")
    if buffer.unsent_output is not None:
        reader.fail(f"the output of microbatch {buffer.unsent_output} is in the buffer; SendActivation comes first")
    reader.row.append(f"{reader.index}F{buffer.inputs}")
    buffer.output, buffer.unsent_output = buffer.inputs, None if reader.is_last else buffer.inputs
    buffer.inputs, buffer.labels = None, None


def _send_activation(reader: _StageReader, buffer: _Buffer) -> None:
    if reader.is_last:
        reader.fail("there is no next stage; leave it out")
    if buffer.unsent_output is None:
        reader.fail("the buffer has no output that is to be sent; ForwardPass makes it")
    reader.sent_activations.append(buffer.unsent_output)
    buffer.unsent_output = None


def _receive_gradient(reader: _StageReader, buffer: _Buffer) -> None:
    if reader.is_last:
        reader.fail("there is no next stage; leave it out")
    if buffer.output is None or buffer.output_gradient is not None:
        reader.fail("the buffer has no output that waits for a gradient; ForwardPass makes it")
    reader.received_gradients.append(buffer.output)
    buffer.output_gradient = buffer.output


def _backward(reader: _StageReader, buffer: _Buffer) -> None:
    if buffer.output is None:
        reader.fail("the buffer has no output; ForwardPass makes it, and new inputs in the buffer take its place")
    if not reader.is_last and buffer.output_gradient is None:
        reader.fail(f"the gradient of the output of microbatch {buffer.output} is missing; RecvGrad comes first")
    if buffer.unsent_output is not None:
        reader.fail(f"the output of microbatch {buffer.unsent_output} has not been sent; SendActivation comes first")
    reader.row.append(f"{reader.index}B{buffer.output}")
    buffer.unsent_gradient = None if reader.is_first else buffer.output
    buffer.output, buffer.output_gradient = None, None


def _send_gradient(reader: _StageReader, buffer: _Buffer) -> None:
    if reader.is_first:
        reader.fail("there is no previous stage; leave it out")
    if buffer.unsent_gradient is None:
        reader.fail("the buffer has no gradient that is to be sent; BackwardPass makes it")
    reader.sent_gradients.append(buffer.unsent_gradient)
    buffer.unsent_gradient = None


_BUFFER_HANDLERS: dict[str, Callable[[_StageReader, _Buffer], None]] = {
    "LoadMicroBatch": _load,
    "RecvActivation": _receive_activation,
    "ForwardPass": _forward,
    "SendActivation": _send_activation,
    "RecvGrad": _receive_gradient,
    "BackwardPass": _backward,
    "SendGrad": _send_gradient,
}
"""What a stage does for the instructions on a buffer, by the names of DeepSpeed's classes."""
_AT_THE_END = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
"""Instructions that end a batch: Penstock does so after every batch of training."""
