"""Listings of DeepSpeed's streams as text: as drawn, read back, and refused with the place."""

from textwrap import dedent

import pytest

from penstock.errors import FormatError
from penstock.ir.formats import deepspeed
from penstock.ir.formats.deepspeed import from_deepspeed, to_deepspeed
from penstock.schedules import build

LISTING = """\
DeepSpeed TrainSchedule
rank 0, 2 buffers: L0 F0|SA0|L1 F1|RG0 SA1 B0|L0 F0|RG1 SA0 B1||RG0 B0 RTG RDG OPT
rank 1, 2 buffers: |RA0 L0 F0|B0|SG0 RA1 L1 F1|B1|SG1 RA0 L0 F0|B0|SG0 RTG RDG OPT
"""
OLD = """\
DeepSpeed TrainSchedule (old)
rank 0, 3 buffers: L0 F0|SA0|L1 F1|SA1 RG0 B0|L2 F2|SA2 RG1 B1||RG2 B2 RTG RDG OPT
rank 1, 2 buffers: |RA0 L0 F0|B0|RA1 SG0 L1 F1|B1|RA0 SG1 L0 F0|B0|SG0 RTG RDG OPT
"""
INFERENCE = """\
DeepSpeed InferenceSchedule
rank 0, 2 buffers: L0 F0|L1 SA0 F1|L0 SA1 F0|SA0
rank 1, 2 buffers: |L0 RA0 F0|L1 RA1 F1|L0 RA0 F0
"""
DATA_PARALLEL = """\
DeepSpeed DataParallelSchedule
rank 0, 1 buffer: L0 F0 B0|L0 F0 B0|L0 F0 B0 RDG OPT
"""
SCHEDULE = build("1f1b", ranks=2, microbatches=3)


def test_the_docstring_shows_a_listing():
    drawn = [line for line in dedent(deepspeed.__doc__).splitlines() if "rank " in line and "buffers:" in line]

    assert [line.strip() for line in drawn] == to_deepspeed(build("1f1b", ranks=2, microbatches=2)).splitlines()[1:]


@pytest.mark.feature("B14")
@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (LISTING, SCHEDULE),
        (OLD, SCHEDULE),
        (INFERENCE, build("1f1b", ranks=2, microbatches=3, forward_only=True)),
        (DATA_PARALLEL, build("sequential", ranks=1, microbatches=3)),
    ],
)
def test_a_listing_is_written_and_read_as_its_schedule(text, schedule):
    assert to_deepspeed(schedule, old=text is OLD) == text
    assert from_deepspeed(text) == schedule


def test_blanks_and_empty_lines_do_not_count():
    loose = LISTING.replace("|", " |\t").replace("\n", "\r\n\r\n").replace("rank 0,", "  rank  0,")

    assert from_deepspeed("\n" + loose.replace("DeepSpeed Train", "deepspeed  train")) == SCHEDULE


def test_a_data_parallel_schedule_keeps_the_name_by_which_it_is_written():
    assert to_deepspeed(from_deepspeed(DATA_PARALLEL, name="mine")) == DATA_PARALLEL


@pytest.mark.parametrize(
    ("right", "wrong", "place", "told"),
    [
        (LISTING, "", "1:1", "no title; expected DeepSpeed and one of TrainSchedule, "),
        ("TrainSchedule", "BestSchedule", "1:1", "'DeepSpeed BestSchedule' is no title"),
        (LISTING, "DeepSpeed TrainSchedule", "2:1", "there is no rank"),
        ("rank 1", "rank 2", "3:1", "no line of rank 1"),
        ("rank 0, 2 buffers:", "rank 0:", "2:1", "no line of rank 0; expected such as rank 0, 2 buffers: L0 F0|SA0"),
        ("rank 0, 2", "rank 0, 3", "2:50", "F0; expected F2, as 3 buffers take turns"),
        ("SA0|L1", "SX0|L1", "2:26", "'SX0' is no instruction"),
        ("SA0|L1", "|L1", "2:26", "the end of the step in step 1 of rank 0; expected SA0"),
        ("RG0 SA1 B0", "SA1 RG0 B0", "2:36", "SA1 in step 3 of rank 0; expected RG0"),
        ("|RA0 L0 F0|B0", "|RA0 L0 F0|B1", "3:31", "B1: nothing is in buffer 1; expected F1 before it"),
        ("SG0 RTG RDG OPT", "SG0 RTG RDG OPT|", "3:84", "9 steps; expected 8 for this order"),
        ("L0 F0|RG1 SA0 B1||RG0 B0", "RG1 SA0 B1||", "3:1", "rank 1 has 3 F; expected 2, as rank 0 has"),
        ("RG1 SA0 B1||RG0 B0", "RG0 SA0 B0||RG1 B1", "1:1", "0B1 cannot run in the step after 1B1"),
        (
            "1, 2 buffers: |RA0 L0 F0|B0|SG0 RA1 L1 F1|B1|SG1 RA0 L0 F0|B0|",
            "1, 3 buffers: |F0|B0|F1|B1|F2|B2|",
            "3:1",
            "3 buf",
        ),
        ("|RA0 L0 F0|B0|SG0 RA1 L1 F1|B1|SG1 RA0 L0 F0|B0|SG0", "RTG", "3:1", "rank 1 has no F"),
    ],
)
def test_what_is_no_listing_is_refused_with_its_place(right, wrong, place, told):
    assert right in LISTING

    with pytest.raises(FormatError) as error:
        from_deepspeed(LISTING.replace(right, wrong, 1), file="plan")

    assert str(error.value).startswith(f"plan:{place}: ")
    assert told in str(error.value)


def test_an_order_that_is_not_the_one_of_the_title_is_refused():
    with pytest.raises(FormatError, match="is listed without a pipeline"):
        from_deepspeed(LISTING.replace("TrainSchedule", "DataParallelSchedule"))
    with pytest.raises(FormatError, match=r"rank 0 has 3 backwards; expected 0"):
        from_deepspeed(LISTING.replace("TrainSchedule", "InferenceSchedule"))
