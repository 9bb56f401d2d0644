"""A subclass of DeepSpeed's `PipeSchedule` becomes a schedule, or is refused by stage, step and instruction."""

import re
from itertools import count

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, ScheduleError
from penstock.ir.formats.deepspeed import to_deepspeed
from penstock.moving import deepspeed_schedule as instructions
from penstock.moving.deepspeed import initialize
from penstock.moving.deepspeed_schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from penstock.moving.schedule_classes import schedule_of_class
from tests.moving.test_deepspeed import check, model, one_process, train
from tests.support.local_pipelines import error_of, on_ranks

CODES = {
    "L": LoadMicroBatch,
    "F": ForwardPass,
    "B": BackwardPass,
    "SA": SendActivation,
    "RA": RecvActivation,
    "SG": SendGrad,
    "RG": RecvGrad,
}


def made(text):
    """An instruction of this text, such as `RG1`, as listings have it."""
    code, buffer = re.fullmatch(r"([A-Z]+?)(\d*)", text).groups()
    if code in CODES:
        return CODES[code](buffer_id=int(buffer))
    return {"OPT": OptimizerStep, "RDG": ReduceGrads, "RTG": instructions.ReduceTiedGrads}[code]()


def class_of(*lines, num_buffers=None):
    """A class whose stages have these steps, as text."""

    class Mine(PipeSchedule):
        def steps(self):
            for step in lines[self.stage_id].split("|"):
                yield [made(word) for word in step.split()]

        def num_pipe_buffers(self):
            return super().num_pipe_buffers() if num_buffers is None else num_buffers

    return Mine


class Halves(PipeSchedule):
    """Two microbatches forward, then both backward, the later one first; and again."""

    def steps(self):
        for first in range(0, self.micro_batches, 2):
            both = [first, first + 1]
            for buffer in both:
                ends = self.is_first_stage or self.is_last_stage
                yield [] if self.is_first_stage else [RecvActivation(buffer_id=buffer)]
                yield [LoadMicroBatch(buffer_id=buffer)] if ends else []
                yield [ForwardPass(buffer_id=buffer)]
                yield [] if self.is_last_stage else [SendActivation(buffer_id=buffer)]
            for buffer in reversed(both):
                yield [] if self.is_last_stage else [RecvGrad(buffer_id=buffer)]
                yield [BackwardPass(buffer_id=buffer)]
                yield [] if self.is_first_stage else [SendGrad(buffer_id=buffer)]
        yield [ReduceGrads(), OptimizerStep()]


def schedule_of(schedule, ranks=2, microbatches=2, **options):
    return schedule_of_class(schedule, ranks=ranks, microbatches=microbatches, **options)


@pytest.mark.feature("B17")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_class_becomes_a_schedule_that_is_proved(num_ranks):
    schedule = schedule_of(Halves, num_ranks, 4)

    ps.check(schedule)

    order = "F0 F1 B1 B0 F2 F3 B3 B2"
    assert [" ".join(map(str, row)) for row in schedule] == [
        order.replace("F", f"{rank}F").replace("B", f"{rank}B") for rank in range(num_ranks)
    ]
    assert schedule.name == "Halves"


@pytest.mark.feature("B17")
@pytest.mark.parametrize("schedule", ["1f1b", "forward-only", "old"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_streams_of_deepspeeds_own_classes_are_read_as_what_they_run(schedule, num_ranks):
    name = "1f1b" if schedule == "old" else schedule
    known = ps.build(name, ranks=num_ranks, microbatches=6)
    listing = to_deepspeed(known, old=schedule == "old").splitlines()[1:]
    streams = [line.partition(": ")[2] for line in listing]
    num_buffers = [int(re.search(r"(\d+) buffer", line)[1]) for line in listing]

    class Listed(class_of(*streams)):
        def num_pipe_buffers(self):
            return num_buffers[self.stage_id]

    assert schedule_of(Listed, num_ranks, 6).digest() == known.digest()


@pytest.mark.feature("B17")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_class_trains_as_one_process_does(num_ranks):
    outcomes = on_ranks(num_ranks, lambda wires: train(wires.rank, transport=wires, schedule=Halves))

    check(outcomes, one_process())


TRAINS = ("L0 F0|SA0||RG0 B0|OPT", "|RA0 L0|F0 B0|SG0|OPT")


def test_the_smallest_batch_on_two_stages():
    assert str(list(schedule_of(class_of(*TRAINS), 2, 1)[1])[1]) == "1B0"


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        ("L0|F0 SA0", "RA0 L0|F0 SB0", r"Mine failed: KeyError"),
        ("F0", "", r"stage 0, step 0, ForwardPass\(buffer_id=0\): the buffer has no inputs; LoadMicroBatch fills it"),
        ("L0 L0", "", r"the inputs of microbatch 0 are in the buffer; run its ForwardPass first"),
        ("L0 F0|L0 F0", "", r"the output of microbatch 0 is in the buffer; SendActivation comes first"),
        ("L0|F0|B0", "", r"the gradient of the output of microbatch 0 is missing; RecvGrad comes first"),
        ("L0|F0|RG0|B0", "", r"the output of microbatch 0 has not been sent; SendActivation comes first"),
        ("L0|RG0", "", r"the buffer has no output that waits for a gradient"),
        ("L0|SA0", "", r"the buffer has no output that is to be sent"),
        ("L2", "", r"step 0, LoadMicroBatch\(buffer_id=2\): there are 2 buffers, by num_pipe_buffers\(\)"),
        ("L0|F0|SA0|L0|F0|SA0|L0", "", r"all 2 microbatches have been loaded"),
        ("RA0", "", r"there is no previous stage, so nothing arrives"),
        ("SG0", "", r"SendGrad\(buffer_id=0\): there is no previous stage; leave it out"),
        ("L0|F0|SA0|L0|RG0|B0", "", r"the buffer has no output that waits for a gradient"),
        (
            "L0|F0|SA0|RG0|L0|B0",
            "",
            r"has no output; ForwardPass makes it, and new inputs in the buffer take its place",
        ),
        ("OPT|L0|F0", "", r"stage 0, step 1, LoadMicroBatch\(buffer_id=0\): OptimizerStep comes before it"),
        ("L0 F0 SA0", "RA0 F0", r"stage 1, step 0, ForwardPass.* the inputs of microbatch 0 and no labels"),
        ("L0 F0 SA0", "L1 RA0 L0 F0", r"the inputs of microbatch 0 and the labels of microbatch 1"),
        ("L0 F0 SA0", "L0 L0", r"the labels of microbatch 0 are in the buffer"),
        ("L0 F0 SA0", "RA0 RA1", r"RecvActivation\(buffer_id=1\): stage 0 sends 1, so nothing arrives"),
        ("L0 F0 SA0", "RA0 L0 F0 SA0", r"there is no next stage; leave it out"),
        ("L0 F0 SA0", "RA0 L0 F0 RG0", r"there is no next stage; leave it out"),
        ("L0 F0 SA0", "RA0 L0 F0 SG0", r"the buffer has no gradient that is to be sent"),
        ("L0 F0 SA0", "L0", r"Mine, stage 1: 0 RecvActivation, but stage 0 has 1 SendActivation"),
        (
            "L0 F0 SA0 L1 F1 SA1 RG0 B0",
            "RA0 L0 F0 B0 RA0",
            r"the gradient of microbatch 0 is in the buffer; SendGrad comes first",
        ),
        (
            "L0 F0 SA0 L1 F1 SA1 RG0 RG1 B0 B1",
            "RA0 L0 F0 RA1 L1 F1 B1 SG1 B0 SG0",
            r"stage 0: RecvGrad takes the gradients of the microbatches \[0, 1\], .* stage 1 sends those of \[1, 0\]",
        ),
        ("L0|F0|SA0", "RA0|L0 F0", r"stage 1: 2 steps, but stage 0 has 3; yield as many on every stage, an empty list"),
    ],
)
def test_what_deepspeeds_engine_would_compute_wrong_is_refused(first, last, text):
    with pytest.raises(ConfigError, match=text):
        schedule_of(class_of(first, last))


def test_a_stage_between_the_ends_has_no_data():
    with pytest.raises(ConfigError, match=r"stage 1, step 0.*only the first and the last stage have data"):
        schedule_of(class_of("L0 F0 SA0", "L0", ""), 3)


def test_a_batch_that_lacks_a_microbatch_or_a_backward_is_refused():
    with pytest.raises(ConfigError, match="Mine made a schedule with 1, but 2 were asked for"):
        schedule_of(class_of(*TRAINS))
    text = "L0|F0 SA0|L1|F1 SA1|RG0|B0", "RA0 L0|F0 B0 SG0|RA0 L0|F0 B0||"
    with pytest.raises(ScheduleError, match="0B1"):
        ps.check(schedule_of(class_of(*text)))


def steps_that(give):
    class Mine(PipeSchedule):
        def steps(self):
            return give()

    return Mine


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda: ([] for _ in count()), r"2 microbatches on 2 stages take 300 steps at most, and steps\(\) goes on"),
        (lambda: iter([(ReduceGrads() for _ in count())]), r"take 15 instructions of a stage at most, got more"),
        (lambda: iter([ReduceGrads()]), r"steps\(\) yielded .* of type ReduceGrads; expected a list of instructions"),
        (lambda: iter([["F0"]]), r"step 0: str is no instruction; known: LoadMicroBatch, RecvActivation"),
        (lambda: 1 / 0, r"Mine failed: ZeroDivisionError"),
    ],
)
def test_steps_that_never_end_or_are_none_are_refused(give, text):
    with pytest.raises(ConfigError, match=text):
        schedule_of(steps_that(give))


def test_an_instruction_of_ones_own_is_refused_by_name_unless_it_is_a_kind_of_a_known_one():
    class ForwardPas(instructions.PipeInstruction):
        """A class with a name that is nearly known."""

    class Noisy(ForwardPass):
        """A forward that prints."""

    class Mine(class_of(*TRAINS)):
        def steps(self):
            for step in super().steps():
                yield [Noisy(each.buffer_id) if type(each) is ForwardPass else each for each in step]

    assert schedule_of(Mine, 2, 1).num_actions == 4
    with pytest.raises(ConfigError, match=r"ForwardPas is no instruction; known: .* Did you mean"):
        schedule_of(steps_that(lambda: iter([[ForwardPas()]])))


def test_a_schedule_of_two_stages_per_rank_is_refused_by_what_takes_its_place():
    class CommitP2P(instructions.PipeInstruction):
        """An instruction of DeepSpeed's DualPipeVSchedule."""

    with pytest.raises(ConfigError, match=r"CommitP2P is of schedules with two stages per rank.* \"dualpipe-v\""):
        schedule_of(steps_that(lambda: iter([[CommitP2P()]])))


def test_buffers_are_numbered_by_any_integer():
    class Mine(class_of(*TRAINS)):
        def steps(self):
            for step in super().steps():
                yield [
                    type(each)(buffer_id=np.int64(each.buffer_id)) if hasattr(each, "buffer_id") else each
                    for each in step
                ]

        def num_pipe_buffers(self):
            return np.int64(1)

    assert schedule_of(Mine, 2, 1).num_actions == 4


@pytest.mark.parametrize("number", [0, "2", None])
def test_buffers_that_cannot_be_counted_are_refused(number):
    class Mine(Halves):
        def num_pipe_buffers(self):
            return number

    with pytest.raises(ConfigError, match=r"stage 0: num_pipe_buffers\(\) returned .*; expected a whole number"):
        schedule_of(Mine)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slices": 2}, "slices: 2, but Halves is a class that runs whole microbatches"),
        ({"num_stages": 4}, "Halves has one stage per rank, got 2 here"),
        ({"schedule": Halves(4, 2, 0)}, r"of type Halves; expected a name, .* or a class, not an object of one"),
        ({"schedule": int}, r"int has neither steps\(\) of DeepSpeed's PipeSchedule nor _step_microbatches\(\)"),
    ],
)
def test_an_engine_refuses_on_all_ranks_what_a_class_cannot_run(options, text):
    options = {"schedule": Halves, **options}
    module = model(num_stages=options.pop("num_stages", None))

    for error in on_ranks(2, lambda wires: error_of(initialize, module, transport=wires, **options)):
        assert isinstance(error, ConfigError)
        assert re.search(text, str(error))


def test_the_attributes_of_the_base_class_are_those_of_deepspeeds():
    first = Halves(micro_batches=4, stages=3, stage_id=0)
    last = Halves(4, 3, 2)

    assert (first.is_first_stage, first.is_last_stage, last.is_first_stage, last.is_last_stage) == (1, 0, 0, 1)
    assert (last.stage, last.num_stages, last.num_micro_batches, last.prev_stage, last.next_stage) == (2, 3, 4, 1, 3)
    assert [last._valid_stage(3), last._valid_micro_batch(3), last._buffer_idx(5)] == [False, True, 1]
    assert sum(len(step) for step in last) == 4 * 5 + 2
