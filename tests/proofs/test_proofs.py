"""`check` returns what it found out, and says everything that is wrong at once."""

import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.ir import hot
from penstock.lowering import lower
from penstock.proofs import Demand, Facts, Limit, check, peak_activations, prove
from penstock.schedules import build
from penstock.simulation import Costs
from tests.proofs.tables import feasible_cases, refusal, schedule_of, swapped, violations_of, without
from tests.support.work import lines_run

NOT_GIVEN = (
    *("weight_context", "message", "forward_workspace", "backward_workspace"),
    *("parameter", "gradient", "optimizer", "checkpoint"),
)


@pytest.mark.feature("X44")
def test_the_facts_of_a_schedule():
    schedule = build("1f1b", ranks=2, microbatches=3)

    assert check(schedule, costs=Costs(activation_bytes=(4,))) == Facts(
        num_actions=12,
        num_messages=6,
        peak_activations=[2, 1],
        peak_bytes=[8, 4],
        static_bytes=[0, 0],
        not_counted=tuple(f"{name}_bytes" for name in NOT_GIVEN),
        peak_received=None,
        peak_unsent=None,
        transports=(),
        omits_reductions=False,
    )


def test_a_program_has_the_actions_and_messages_of_its_schedule():
    schedule = build("1f1b", ranks=3, microbatches=4)

    of_schedule, of_program = check(schedule), check(lower(schedule))

    assert of_program.num_actions == of_schedule.num_actions
    assert of_program.num_messages == of_schedule.num_messages
    assert of_program.peak_activations == of_schedule.peak_activations == peak_activations(schedule)


def test_proofs_of_different_kinds_are_refused_together():
    error = refusal(schedule_of("0F0 0F1 0B0\n1F0 1B0 1B1 1F1"), memory_limit="1 activation")

    problems = [violation.problem for violation in error.violations]
    assert any("has no backward" in problem for problem in problems)
    assert any("runs before its forward" in problem for problem in problems)
    assert any("the limit of rank 0 is 1" in problem for problem in problems)
    error = refusal(schedule_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), memory_limit="1 activation")
    assert sorted(violation.action for violation in error.violations) == ["0B0", "1F1"]


@given(feasible_cases())
def test_what_is_known_of_the_actions_changes_no_fact_of_their_program(case):
    known = prove(case.schedule)
    program = lower(case.schedule)

    assert prove(program, earlier_proof=known).facts == check(program)


def test_what_is_known_of_the_actions_says_nothing_of_messages_other_actions_and_limits():
    schedule = build("gpipe", ranks=2, microbatches=2)
    broken = without(lower(schedule), "0SEND_F1")

    with pytest.raises(ScheduleError, match="1RECV_F1 has no send on rank 0"):
        prove(broken, earlier_proof=prove(schedule))
    crossing = swapped(lower(schedule), "0F0", "0B0")
    with pytest.raises(ScheduleError, match="0B0 runs before its forward"):
        prove(crossing, earlier_proof=prove(schedule))
    with pytest.raises(ScheduleError, match="the limit of rank 0 is 1"):
        prove(lower(schedule), Demand(Limit.read("1 activation")), earlier_proof=prove(schedule))


@pytest.mark.slow
@given(case=feasible_cases())
def test_the_verdict_is_the_same_compiled(case):
    program = lower(case.schedule)
    tables = [case.schedule, program, without(program, str(program[0][-1]))]
    interpreted = [violations_of(table) for table in tables], check(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)
        assert ([violations_of(table) for table in tables], check(program)) == interpreted


@pytest.mark.parametrize("prepare", [lambda schedule: schedule, lower])
def test_the_lines_that_run_to_prove_a_table_grow_with_its_rows_and_not_with_the_square(prepare):
    def num_lines(num_microbatches):
        table = prepare(build("1f1b", ranks=8, microbatches=num_microbatches))
        return lines_run(lambda: check(table))

    assert num_lines(64) < 1.1 * 4 * num_lines(16)
