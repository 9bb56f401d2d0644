"""Programs that move activations to the host and back: where their rows are, their times, their bytes, and errors."""

from functools import partial

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, ScheduleError
from penstock.ir.program import Program
from penstock.schedules import FAMILIES
from tests.exactness.combinations import schedule_of
from tests.lowering.programs import groups
from tests.lowering.test_add_offloads import assert_rules, without_copies
from tests.proofs.tables import schedule_of as drawn
from tests.proofs.tables import swapped, without
from tests.simulation.drawing import ends
from tests.support.local_pipelines import error_of

TRAINING = [name for name in FAMILIES if name != "forward-only"]
SHAPES = [(4, 8), (3, 6), (2, 6), (1, 6)]
WITH_R = {False: lambda schedule: schedule, True: ps.with_recompute}
GPIPE = partial(ps.build, "gpipe", ranks=1)


def copies(program):
    """The texts of all copies, rank by rank."""
    return [text for rank in range(program.num_ranks) for row in program[rank] if "LOAD" in (text := str(row))]


def moving(schedule, **more):
    """The program that moves what every stage keeps."""
    return ps.lower(schedule, offload=range(schedule.num_stages), **more)


@pytest.mark.parametrize("again", WITH_R, ids="again={}".format)
@pytest.mark.parametrize("name", TRAINING)
def test_programs_of_every_family_are_right_and_else_as_before(name, again):
    for schedule in filter(None, (schedule_of(name, *shape) for shape in SHAPES[again::2])):
        schedule = WITH_R[again](schedule)
        program = moving(schedule)

        ps.check(program)
        ps.check(moving(schedule, transport="coalesced"), transport="all")
        assert Program.from_json(program.to_json()) == program
        assert without_copies(program) == ps.lower(schedule)
        for rank in range(program.num_ranks):
            assert_rules(groups(program, rank), range(schedule.num_stages))


def test_stages_may_come_in_any_collection_and_twice():
    schedule = ps.build("seq1f1b", ranks=3, microbatches=4, slices=2)
    program = ps.lower(schedule, offload=[1])

    assert ps.lower(schedule, offload=np.array([1])) == ps.lower(schedule, offload=iter([1, 1])) == program
    assert {text[0] for text in copies(program)} == {"1"}
    assert program.actions() == schedule


@pytest.mark.parametrize(
    ("copy_s", "expected"),
    [
        (0.5, "F0 1 OFFLOAD0 1.5 F1 2 OFFLOAD1 2.5 RELOAD0 3 F2 3 OFFLOAD2 3.5 RELOAD1 4 B0 5 RELOAD2 5.5 B1 7 B2 9"),
        (2.0, "F0 1 OFFLOAD0 3 F1 2 OFFLOAD1 5 RELOAD0 7 F2 3 OFFLOAD2 9 RELOAD1 11 B0 9 RELOAD2 13 B1 13 B2 15"),
    ],
    ids=["hidden", "not hidden"],
)
def test_a_timeline_is_as_computed_by_hand(copy_s, expected):
    program = ps.lower(drawn("0F0 0F1 0F2 0B0 0B1 0B2"), offload=[0])
    timeline = ps.simulate(program, ps.Costs.uniform(offload_s=copy_s, reload_s=copy_s))

    words = expected.split()
    ends_s = {f"0{text}": float(end_s) for text, end_s in zip(words[::2], words[1::2], strict=True)}
    assert {text: end_s for text, end_s in ends(timeline).items() if text in ends_s} == ends_s
    assert timeline.makespan_s == ends_s["0B2"]
    assert timeline.work_s.tolist() == [9.0]


def test_a_copy_of_one_stage_takes_no_time_of_another_rank():
    program = moving(ps.build("1f1b", ranks=2, microbatches=8))
    plain = ps.simulate(ps.lower(program.actions()), ps.Costs.uniform())
    timeline = ps.simulate(program, ps.Costs.uniform(offload_s=(0.25, 100.0), reload_s=(0.5, 100.0)))

    assert {text[0] for text in copies(program)} == {"0"}  # the last stage runs a backward after each forward
    assert timeline.makespan_s == plain.makespan_s


@pytest.mark.parametrize("again", WITH_R, ids="again={}".format)
@pytest.mark.parametrize("num_microbatches", [3, 4, 6])
def test_bytes_of_the_device_and_of_the_host_are_as_counted_by_hand(num_microbatches, again):
    """Two are on the device: the one that is needed, and one that is made or comes back."""
    program = moving(WITH_R[again](GPIPE(microbatches=num_microbatches)))
    costs = ps.Costs.uniform(activation_bytes=100, checkpoint_bytes=10)
    timeline = ps.simulate(program, costs)

    assert timeline.peak_bytes == ps.check(program, costs=costs).peak_bytes == ([110] if again else [200])
    assert timeline.peak_host_bytes == [(num_microbatches - 1) * (10 if again else 100)]
    limit = timeline.peak_bytes[0]
    ps.check(program, costs=costs, memory_limit=limit)
    with pytest.raises(ScheduleError):
        ps.check(program, costs=costs, memory_limit=limit - 1)


# ---- what is refused


@pytest.mark.parametrize("stages", [[2], [-1], [True], [1.0], ["0"], "0", 0, None, [[0]]], ids=repr)
def test_a_bad_index_is_one_error_that_names_the_option(stages):
    error = error_of(ps.lower, ps.build("1f1b", ranks=2, microbatches=4), offload=stages)

    assert isinstance(error, ConfigError)
    assert "offload" in str(error)
    assert "0 to 1" in str(error)


BROKEN = {
    "no reload": lambda program: without(program, "0RELOAD1"),
    "no offload": lambda program: without(program, "0OFFLOAD1"),
    "a reload too late": lambda program: swapped(program, "0RELOAD0", "0B0"),
    "an offload too early": lambda program: swapped(program, "0OFFLOAD1", "0F1"),
    "a reload too early": lambda program: swapped(program, "0OFFLOAD1", "0RELOAD1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_program_that_moves_wrongly_is_refused(name):
    program = BROKEN[name](moving(GPIPE(microbatches=4)))

    with pytest.raises(ScheduleError, match=r"OFFLOAD|RELOAD|[BF][01]"):
        ps.check(program)
