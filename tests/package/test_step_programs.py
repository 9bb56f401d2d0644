"""The programs of a pipeline for any number of microbatches; tests/acceptance/steps/test_any_number.py runs them."""

import threading
import time

import pytest

from penstock import step_programs
from penstock.errors import ConfigError, ScheduleError
from penstock.execute.control.agreement import Mode
from penstock.execute.session import MOST_PROGRAMS, ProgramKey
from penstock.ir.rounds import in_rounds
from penstock.pipeline import Pipeline
from penstock.planning import prove_and_lower
from penstock.schedules import build
from penstock.step_programs import PlanningBeside
from tests.support.local_pipelines import float_layers, on_ranks, square_loss


def programs_of(schedule, ask, **options):
    """What `ask(programs)` returns for a pipeline of two ranks."""

    def case(wires):
        number = 4 if isinstance(schedule, str) else None
        with Pipeline(float_layers(num_layers=4), schedule, number, square_loss, transport=wires, **options) as own:
            return ask(own._session.programs)

    return on_ranks(2, case)[0]


def digest_of(mode, number, most=None, *, is_planned=False):
    key = ProgramKey(mode, number, most or number)
    return lambda programs: programs.of(key, is_planned=is_planned).actions().digest()


def test_a_family_is_planned_for_a_number_and_a_whole_schedule_runs_in_rounds():
    schedule = build("1f1b", ranks=2, microbatches=4)

    assert programs_of("1f1b", digest_of(Mode.TRAIN, 9)) == build("1f1b", ranks=2, microbatches=9).digest()
    assert programs_of(schedule, digest_of(Mode.TRAIN, 9)) == in_rounds(schedule, 9).digest()
    assert programs_of(prove_and_lower(schedule), digest_of(Mode.TRAIN, 2)) == in_rounds(schedule, 2).digest()


def test_an_evaluation_runs_the_forwards_in_rounds_cut_for_a_replica_with_fewer():
    forwards = build("1f1b", ranks=2, microbatches=4).forward_only()

    assert programs_of("1f1b", digest_of(Mode.EVALUATE, 9)) == in_rounds(forwards, 9).digest()
    expected = in_rounds(forwards, 9).first_microbatches(7).digest()
    assert programs_of("1f1b", digest_of(Mode.EVALUATE, 7, 9)) == expected


def test_a_family_that_takes_no_such_number_says_which_it_takes():
    with pytest.raises(ConfigError, match="needs at least 2 microbatches per rank, got 3 on 2 ranks; use 4 or more"):
        programs_of("dualpipe-v", digest_of(Mode.TRAIN, 3))


def test_a_program_that_is_made_is_made_once():
    def ask(programs):
        keys = [ProgramKey(Mode.TRAIN, number, number) for number in (5, 4, 6)]
        return all(programs.of(key) is programs.of(key) for key in keys)

    assert programs_of("1f1b", ask)


def test_no_rounds_run_where_planning_takes_no_longer(monkeypatch):
    monkeypatch.setattr(step_programs, "ROWS_PLANNED_AT_ONCE", 0)

    def ask(programs):
        first = digest_of(Mode.TRAIN, 9)(programs)
        while 9 not in programs.planned():
            time.sleep(0.001)
        return first, digest_of(Mode.TRAIN, 9)(programs), digest_of(Mode.TRAIN, 9, is_planned=True)(programs)

    rounds, again, planned = programs_of("1f1b", ask)

    assert rounds == again == in_rounds(build("1f1b", ranks=2, microbatches=4), 9).digest()
    assert planned == build("1f1b", ranks=2, microbatches=9).digest()


# ---- planning beside the steps


def eventually(is_so):
    begin_s = time.monotonic()
    while not is_so() and time.monotonic() < begin_s + 20:
        time.sleep(0.001)
    return is_so()


def test_numbers_are_planned_once_one_after_another_and_the_last_ones_are_kept():
    planned, may_plan = [], threading.Event()

    def plan(number):
        may_plan.wait(20)
        planned.append(number)
        if number == 3:
            raise ScheduleError("there is no memory for it")
        return f"program {number}"

    beside = PlanningBeside(plan)
    for number in (1, 2, 1, 3, *range(4, MOST_PROGRAMS + 5)):
        beside.ask(number)
    assert beside.numbers() == ()
    may_plan.set()

    assert eventually(lambda: MOST_PROGRAMS + 4 in beside.numbers())
    assert planned == list(range(1, MOST_PROGRAMS + 5))
    assert beside.numbers() == tuple(range(5, MOST_PROGRAMS + 5))
    assert beside.get(5) == "program 5"
    beside.ask(1)  # it was dropped, and is planned again, in a new thread
    assert eventually(lambda: 1 in beside.numbers())
    assert beside.numbers() == (*range(7, MOST_PROGRAMS + 5), 5, 1)


def test_a_number_that_was_told_stays_until_numbers_are_asked_for_again():
    may_plan = threading.Event()
    beside = PlanningBeside(lambda number: may_plan.wait(20) and f"program {number}")
    last = MOST_PROGRAMS + 1
    may_plan.set()
    for number in range(1, last):
        beside.ask(number)
    assert eventually(lambda: len(beside.numbers()) == MOST_PROGRAMS)
    may_plan.clear()
    beside.ask(last)
    told = beside.numbers()  # ranks agree to run one of these, and meanwhile the thread goes on
    may_plan.set()
    planning = [thread for thread in threading.enumerate() if thread.name == "penstock planning"]
    for thread in planning:
        thread.join(20)

    assert [beside.get(number) for number in told] == [f"program {number}" for number in range(1, last)]
    assert len(beside.numbers()) == MOST_PROGRAMS
