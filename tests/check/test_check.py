"""`check` returns what it found out, and says everything that is wrong at once."""

import time

import pytest

from penstock.check import Facts, check, peak_activations
from penstock.lower import lower
from penstock.schedules import build
from tests.check.tables import refusal, schedule_of


def test_the_facts_of_a_schedule():
    schedule = build("1f1b", ranks=2, microbatches=3)

    assert check(schedule, activation_bytes=4) == Facts(
        num_actions=12,
        num_messages=6,
        peak_activations=[2, 1],
        peak_bytes=[8, 4],
        peak_received=None,
        peak_unsent=None,
        transports=(),
    )


def test_a_program_has_the_actions_and_messages_of_its_schedule():
    schedule = build("1f1b", ranks=3, microbatches=4)

    of_schedule, of_program = check(schedule), check(lower(schedule))

    assert of_program.num_actions == of_schedule.num_actions
    assert of_program.num_messages == of_schedule.num_messages
    assert of_program.peak_activations == of_schedule.peak_activations == peak_activations(schedule)


def test_proofs_of_different_kinds_are_refused_together():
    error = refusal(schedule_of("0F0 0F1 0B0\n1F0 1B0 1B1 1F1"), memory_limit=1)

    problems = [violation.problem for violation in error.violations]
    assert any("has no backward" in problem for problem in problems)
    assert any("runs before its forward" in problem for problem in problems)
    assert any("the limit of rank 0 is 1" in problem for problem in problems)


def test_a_cycle_and_an_exceeded_limit_are_refused_together():
    error = refusal(schedule_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), memory_limit=1)

    assert sorted(violation.action for violation in error.violations) == ["0B0", "1F1"]


@pytest.mark.parametrize(("prepare", "limit_s"), [(lambda schedule: schedule, 0.08), (lower, 0.25)])
def test_a_common_shape_is_proved_fast(prepare, limit_s):
    table = prepare(build("1f1b", ranks=8, microbatches=64))

    durations_s = []
    for _ in range(3):
        start = time.perf_counter()
        check(table)
        durations_s.append(time.perf_counter() - start)

    # Ten times what it takes on an idle machine: this finds a loop over rows, not a busy neighbour.
    assert min(durations_s) < limit_s
