"""Listings of DeepSpeed's instruction streams: what every rank does in every step, and with which of its buffers.

    DeepSpeed TrainSchedule
    rank 0, 2 buffers: L0 F0|SA0|L1 F1|RG0 SA1 B0||RG1 B1 RTG RDG OPT
    rank 1, 2 buffers: |RA0 L0 F0|B0|SG0 RA1 L1 F1|B1|SG1 RTG RDG OPT

    L LoadMicroBatch     F ForwardPass       B BackwardPass     RTG ReduceTiedGrads
    SA SendActivation    RA RecvActivation                      RDG ReduceGrads
    SG SendGrad          RG RecvGrad                            OPT OptimizerStep

`|` ends a step; the number after an instruction is its buffer. The title names the class of DeepSpeed's:
`TrainSchedule`, `TrainSchedule (old)` for its order before it sent gradients first, `InferenceSchedule` for forwards
alone, `DataParallelSchedule` for `sequential` on one rank. All of it follows from the order of the actions (see
`deepspeed_streams`), so a reader takes that order and refuses a text that says anything else.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from penstock.errors import ConfigError, FormatError
from penstock.ir.formats.deepspeed_streams import SEQUENTIAL, Listing, Stream, listing_of, streams
from penstock.ir.hot import Int32s
from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement

TITLE = "DeepSpeed"

_RANK = re.compile(r"\s*rank\s+([0-9]{1,9}),\s*([1-9][0-9]{0,8})\s+buffers?:")
_WORD = re.compile(r"\S+")
_COMPUTE = re.compile(r"([FB])([0-9]{1,9})")
_INSTRUCTION = re.compile(r"(?:[LFB]|[SR][AG])[0-9]{1,9}|RTG|RDG|OPT")

_Word = tuple[int, str]
"""An instruction, with its column."""


def to_deepspeed(schedule: Schedule, *, old: bool = False) -> str:
    """Write the streams of a schedule; `old` is the order of DeepSpeed before it sent gradients first.

    Raises:
        ConfigError: if DeepSpeed's streams cannot express the schedule.
    """
    listing = listing_of(schedule, old=old)
    lines = [f"{TITLE} {listing.value}"]
    for rank, stream in enumerate(streams(schedule, listing)):
        steps = "|".join(" ".join(step) for step in stream.steps)
        lines.append(f"rank {rank}, {stream.num_buffers} buffer{'s' * (stream.num_buffers > 1)}: {steps}")
    return "\n".join(lines) + "\n"


def from_deepspeed(text: str, *, file: str = "<text>", name: str = "from DeepSpeed") -> Schedule:
    """Read DeepSpeed's lists of instructions, as `to_deepspeed` writes them, into a schedule; empty lines do not count.

    Each line holds the instructions of one rank. Only forwards and backwards say the order; the schedule that they give
    is written again, and the text must be equal to that. The schedule is called `name`; that of a
    `DataParallelSchedule` is called `sequential`, so that it is written as one again.

    Raises:
        FormatError: with line and column of the first place that is not what the order of the actions asks for.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    listing = _read_title(lines, file)
    ranks = [_read_line(rank, number, line, file) for rank, (number, line) in enumerate(lines[1:])]
    if not ranks:
        problem = "there is no rank; expected lines such as rank 0, 2 buffers: L0 F0|B0"
        raise FormatError(problem, file=file, line=2)
    orders = [rank.order() for rank in ranks]
    num_forwards = [int((order[:, 0] == Kind.FORWARD).sum()) for order in orders]
    for rank, num in zip(ranks, num_forwards, strict=True):
        if num != num_forwards[0]:
            raise rank.fail(1, f"rank {rank.rank} has {num} F; expected {num_forwards[0]}, as rank 0 has")
    schedule_name = SEQUENTIAL if listing is Listing.DATA_PARALLEL else name
    schedule = Schedule.from_arrays(schedule_name, Placement.line(len(ranks)), orders, num_microbatches=num_forwards[0])
    try:
        expected = streams(schedule, listing)
    except ConfigError as error:
        raise FormatError(str(error).removeprefix("format: "), file=file) from None
    for rank, stream in zip(ranks, expected, strict=True):
        rank.compare(stream)
    return schedule


def _read_title(lines: list[tuple[int, str]], file: str) -> Listing:
    number, line = lines[0] if lines else (1, "")
    title = " ".join(line.split())
    for listing in Listing:
        if title.lower() == f"{TITLE} {listing.value}".lower():
            return listing
    names = ", ".join(listing.value for listing in Listing)
    problem = f"{title[:60]!r} is no title; expected {TITLE} and one of {names}"
    raise FormatError(problem, file=file, line=number)


@dataclass(frozen=True, slots=True)
class _RankLine:
    """The stream of one rank as it was read; `fail` makes the error for a problem at a column."""

    rank: int
    num_buffers: int
    steps: list[list[_Word]]
    end_columns: list[int]
    """The column after each step."""
    fail: Callable[[int, str], FormatError]

    def order(self) -> Int32s:
        """[num_actions, 3] kind, stage, microbatch; forwards are in order, a backward is of what its buffer holds."""
        microbatch_of_buffer: dict[int, int] = {}
        rows: list[tuple[int, int, int]] = []
        num_forwards = 0
        for column, word in (word for step in self.steps for word in step):
            match = _COMPUTE.fullmatch(word)
            if match is None:
                continue
            buffer = int(match[2])
            if match[1] == "F" and buffer == num_forwards % self.num_buffers:
                microbatch_of_buffer[buffer] = num_forwards
                num_forwards += 1
                rows.append((Kind.FORWARD, self.rank, microbatch_of_buffer[buffer]))
            elif match[1] == "F":
                expected = num_forwards % self.num_buffers
                raise self.fail(column, f"{word}; expected F{expected}, as {self.num_buffers} buffers take turns")
            elif buffer in microbatch_of_buffer:
                rows.append((Kind.BACKWARD, self.rank, microbatch_of_buffer.pop(buffer)))
            else:
                raise self.fail(column, f"{word}: nothing is in buffer {buffer}; expected F{buffer} before it")
        if not num_forwards:
            raise self.fail(1, f"rank {self.rank} has no F; expected one for each microbatch")
        return np.array(rows, np.int32)

    def compare(self, expected: Stream) -> None:
        """Refuse the first difference from what the order asks for."""
        if self.num_buffers != expected.num_buffers:
            raise self.fail(1, f"{self.num_buffers} buffers; expected {expected.num_buffers} for this order")
        for step, word_pairs in enumerate(zip(self.steps, expected.steps, strict=False)):
            for column_and_word, text in zip_longest(*word_pairs, fillvalue=None):
                column, word = column_and_word or (self.end_columns[step], "the end of the step")
                if word != text:
                    problem = f"{word} in step {step} of rank {self.rank}; expected {text or 'the end of the step'}"
                    raise self.fail(column, f"{problem}, as the order of F and B asks for")
        if len(self.steps) != len(expected.steps):
            raise self.fail(
                self.end_columns[-1], f"{len(self.steps)} steps; expected {len(expected.steps)} for this order"
            )


def _read_line(rank: int, number: int, line: str, file: str) -> _RankLine:
    def fail(column: int, problem: str) -> FormatError:
        return FormatError(problem, file=file, line=number, column=column)

    label = _RANK.match(line)
    if label is None or int(label[1]) != rank:
        raise fail(1, f"this is no line of rank {rank}; expected such as rank {rank}, 2 buffers: L0 F0|SA0")
    steps, begins_of_steps = [], [label.end() + 1]
    for step in line[label.end() :].split("|"):
        begin = begins_of_steps[-1]
        words = [(begin + word.start(), word.group()) for word in _WORD.finditer(step)]
        for column, word in words:
            if not _INSTRUCTION.fullmatch(word):
                raise fail(column, f"{word[:60]!r} is no instruction; expected such as L0, F0, SA0, RG0, RTG or OPT")
        steps.append(words)
        begins_of_steps.append(begin + len(step) + 1)
    return _RankLine(rank, int(label[2]), steps, [end - 1 for end in begins_of_steps[1:]], fail)
