"""Plans in words."""

from penstock.cli.describe import describe_plan
from penstock.lowering import lower
from penstock.proofs import check
from penstock.schedules import build


def test_a_schedule_is_told_by_its_size_and_peaks():
    schedule = build("1f1b", ranks=2, microbatches=3)

    assert (
        describe_plan(schedule, check(schedule))
        == "2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1"
    )


def test_one_of_a_kind_is_told_as_one():
    schedule = build("1f1b", ranks=1, microbatches=1)

    assert describe_plan(schedule, check(schedule)).startswith("1 rank, 1 stage, 1 microbatch, 2 actions;")


def test_a_program_is_told_by_its_instructions():
    program = lower(build("gpipe", ranks=2, microbatches=3))

    told = describe_plan(program, check(program))

    assert f"12 actions, {program.num_instructions} instructions; peak activations per rank 3, 3" in told
