"""Families and plans in words."""

from penstock.check import check
from penstock.cli.describe import describe_family, describe_plan
from penstock.lower import lower
from penstock.schedules import FAMILIES, build


def test_a_family_is_told_with_limits_and_defaults():
    lines = describe_family(FAMILIES["1f1b"]).splitlines()

    assert lines[0].startswith("1f1b: ")
    assert "  limits     one stage per rank" in lines
    assert any(line.startswith("  option     warmup=standard|eager (default standard): ") for line in lines)


def test_a_schedule_is_told_by_its_size_and_peaks():
    schedule = build("1f1b", ranks=2, microbatches=3)

    assert (
        describe_plan(schedule, check(schedule))
        == "2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1"
    )


def test_a_program_is_told_by_its_instructions():
    program = lower(build("gpipe", ranks=2, microbatches=3))

    told = describe_plan(program, check(program))

    assert f"12 actions, {program.num_instructions} instructions; peak activations per rank 3, 3" in told
