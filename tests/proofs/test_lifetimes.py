"""A row that is missing, doubled or too early is found by what it reads, makes and frees alone."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.ir.collectives import LOADS_DATA
from penstock.ir.operations import IS_COMPUTE, IS_COPY, IS_MESSAGE, Op
from penstock.ir.recompute import with_recompute
from penstock.ir.split_backwards import with_split_backwards
from penstock.lowering import assign_slots, lower
from penstock.proofs import check, lifetimes
from penstock.proofs.lifetimes import check_lifetimes
from penstock.proofs.report import Subject
from penstock.schedules import build
from tests.proofs.tables import assert_refused, edited, find, lowered, swapped
from tests.simulation.drawing import sharded
from tests.support.mutated_programs import cases

PROGRAMS = {
    "1f1b": lowered(),
    "two stages on a rank": lower(build("looped-bfs", ranks=2, microbatches=2, stages_per_rank=2)),
    "slices": lower(build("seq1f1b", ranks=2, microbatches=2, slices=2)),
    "split": lower(with_split_backwards(build("1f1b", ranks=2, microbatches=2))),
    "recomputed": lower(with_recompute(build("1f1b", ranks=2, microbatches=2), stages=[0])),
    "forwards": lower(build("zbv", ranks=2, microbatches=2, forward_only=True)),
    "pairs": lower(build("dualpipe-v", ranks=2, microbatches=4)),
    "copies": lower(build("dualpipe", ranks=2, microbatches=4)),
    "offloaded": lower(build("gpipe", ranks=2, microbatches=3), offload=[0, 1]),
    "offloaded slices": lower(build("seq1f1b", ranks=2, microbatches=3, slices=2), offload=[0, 1]),
    "loads": lower(build("zbv", ranks=2, microbatches=3), loads=True),
    "loads of slices": lower(with_recompute(build("seq1f1b", ranks=2, microbatches=2, slices=2)), loads=True),
    "recomputed and offloaded": lower(with_recompute(build("gpipe", ranks=2, microbatches=3)), offload=[0]),
}


def findings_of(program):
    subject = Subject(program)
    check_lifetimes(subject)
    return [f"{found.action} {found.problem}" for found in subject.violations]


@contextmanager
def walked_first():
    """Let small tables be walked like large ones, by the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetimes, "is_large", lambda num_rows: True)
        yield


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_that_is_right_is_found_right_by_sorting_and_by_the_walk(program):
    assert findings_of(program) == []
    assert lifetimes._Lifetimes(program).wrong_kinds() == []


def test_what_is_wrong_with_a_mutated_program_is_told_alike_after_a_walk():
    for case in cases(50, seed=1):
        sorted_at_once = findings_of(case.program)
        with walked_first():
            assert findings_of(case.program) == sorted_at_once
        assert bool(lifetimes._Lifetimes(case.program).wrong_kinds()) == bool(sorted_at_once)


@pytest.mark.parametrize(
    "line",
    [
        "0UNSHARD 0F0 0RESHARD 0B0",
        "0F0 0UNSHARD 0B0",
        "0UNSHARD 0F0 0UNSHARD 0B0",
        "0UNSHARD 0F0 0B0 0RESHARD 0RESHARD",
        "0REDUCE_GRAD 0F0 0B0",
        "0UNSHARD 0F0 (0F1;0B1)OVERLAP_F_B 0B0",
        "0F0 0F1 0OFFLOAD0 0R0 0RELOAD0 0B0 0B1",
    ],
)
def test_what_is_wrong_with_values_that_may_stay_is_told_alike_after_a_walk(line):
    sorted_at_once = findings_of(sharded(line))

    assert sorted_at_once != []
    with walked_first():
        assert findings_of(sharded(line)) == sorted_at_once


def left_out(program, rank, place):
    return edited(program, lambda orders: orders[rank].pop(place))


def doubled(program, rank, place):
    return edited(program, lambda orders: orders[rank].insert(place, orders[rank][place]))


@pytest.mark.parametrize("program", [PROGRAMS[name] for name in PROGRAMS if name not in ("pairs", "copies")])
def test_whichever_computation_or_message_is_left_out_or_doubled_is_found(program):
    for row in program.rows_of(IS_COMPUTE | IS_MESSAGE | IS_COPY | LOADS_DATA).tolist():
        rank = int(program.rank_of_row[row])
        place = row - int(program.offsets[rank])
        is_needed = program.op[row] != Op.RECOMPUTE  # without it, its forward keeps all that the backward reads
        assert bool(findings_of(left_out(program, rank, place))) == is_needed
        assert findings_of(doubled(program, rank, place)) != []


def test_what_reads_too_early_is_told_with_the_value():
    assert findings_of(swapped(PROGRAMS["1f1b"], "1F1", "1B1")) == [
        "1B1 reads the activation of stage 1, microbatch 1, which no row before it makes",
        "1F1 makes the activation of stage 1, microbatch 1, which nothing uses",
    ]


def test_what_is_made_or_used_twice_is_told_with_both_rows():
    program = PROGRAMS["slices"]
    rank, position = find(program, "1B0.1")
    twice = edited(program, lambda orders: orders[rank].insert(position, orders[rank][position]))

    found = findings_of(twice)

    place = f"1B0.1 (position {position})"
    assert f"1B0.1 reads the activation of stage 1, microbatch 0, slice 1, which {place} has freed before" in found
    assert any(f"which {place} has made, and nothing has used" in each for each in found)


def test_both_members_of_a_pair_read_before_either_frees():
    program = sharded("0UNSHARD 0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2")
    wrong = sharded("0UNSHARD 0F0 0F1 (0F2;0B2)OVERLAP_F_B 0B1 0B0")

    assert findings_of(program) == []
    assert findings_of(wrong)[0] == "0B2 reads the activation of stage 0, microbatch 2, which no row before it makes"


def test_computing_without_gathered_weights_is_refused():
    freed = sharded("0UNSHARD 0F0 0RESHARD 0B0")
    late = sharded("0F0 0UNSHARD 0B0")

    error = assert_refused(freed, (0, 3, "0B0"), "reads the weights of stage 0, which 0RESHARD (position 2) has freed")
    assert error.violations[0].fix == "Move it before 0RESHARD (position 2)"
    error = assert_refused(late, (0, 0, "0F0"), "reads the weights of stage 0, which no row before it makes")
    assert error.violations[0].fix == "Add what makes it"


def test_gathering_what_is_whole_is_refused():
    twice = sharded("0UNSHARD 0F0 0UNSHARD 0B0")
    together = replace(sharded("0UNSHARD 0F0 1UNSHARD 1F0 1B0 0B0"), units=((0, 1),))

    made = "makes the weights of stage 0, which 0UNSHARD (position 0) has made, and nothing has dropped since"
    assert_refused(twice, (0, 2, "0UNSHARD"), made)
    assert_refused(assign_slots(together), (0, 2, "1UNSHARD"), made)


def test_a_unit_is_whole_for_all_its_stages_from_one_gather_to_one_reshard():
    line = "0UNSHARD 0F0 1F0 1B0 0B0 0RESHARD"

    check(replace(assign_slots(sharded(line)), units=((0, 1),)))
    freed = replace(assign_slots(sharded("0UNSHARD 0F0 1F0 1B0 1RESHARD 0B0")), units=((0, 1),))
    assert_refused(freed, (0, 5, "0B0"), "reads the weights of stage 0, which 1RESHARD (position 4) has freed")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("0F0 0OFFLOAD0 0F1 0B0 0B1", "0B0 reads the activation of stage 0, microbatch 0, which 0OFFLOAD0"),
        ("0F0 0F1 0RELOAD0 0B0 0B1", "0RELOAD0 reads the offloaded of stage 0, microbatch 0, which no row before it"),
        ("0OFFLOAD0 0F0 0F1 0RELOAD0 0B0 0B1", "0OFFLOAD0 reads the activation of stage 0, microbatch 0, which no row"),
        ("0F0 0F1 0B0 0OFFLOAD0 0B1", "0OFFLOAD0 reads the activation of stage 0, microbatch 0, which 0B0"),
        ("0F0 0F1 0OFFLOAD0 0OFFLOAD0 0RELOAD0 0B0 0B1", "0OFFLOAD0 reads the activation .* which 0OFFLOAD0"),
        ("0F0 0F1 0OFFLOAD0 0RELOAD0 0RELOAD0 0B0 0B1", "0RELOAD0 reads the offloaded .* which 0RELOAD0"),
        ("0F0 0F1 0OFFLOAD0 0R0 0RELOAD0 0B0 0B1", "0R0 reads the checkpoint of stage 0, .* which 0OFFLOAD0"),
        ("0F0 0F1 0OFFLOAD0 0RELOAD0", "0OFFLOAD0 reads the activation of stage 0, microbatch 0, which no row before"),
    ],
)
def test_a_copy_of_what_is_not_there_or_left_on_the_host_is_refused(line, told):
    with pytest.raises(ScheduleError, match=told):
        check(sharded(line))


@pytest.mark.parametrize(
    "line",
    [
        "0F0 0B0 0F1 0B1",
        "0UNSHARD 0F0 0B0 0F1 0B1 0RESHARD",
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0F1 0B1",
        "0F0 0B0 0F1 0B1 0RESHARD",
        "0F0 0F1 0OFFLOAD0 0F2 0RELOAD0 0OFFLOAD0 0RELOAD0 0B0 0B1 0B2",
        "0F0 0OFFLOAD0 0RELOAD0 0B0",
        "0F0 0F1 0OFFLOAD1 0OFFLOAD0 0RELOAD0 0I0 0RELOAD1 0W0 0I1 0W1",
    ],
)
def test_weights_may_be_gathered_again_and_stay_and_what_is_kept_may_be_moved_more_than_once(line):
    check(assign_slots(sharded(line)))


LOADED = lower(build("1f1b", ranks=2, microbatches=3), loads=True)


@pytest.mark.feature("B14")
def test_a_load_that_is_missing_doubled_or_behind_its_forward_is_refused():
    rank, position = find(LOADED, "1LOAD1")

    lacking, twice = left_out(LOADED, rank, position), doubled(LOADED, rank, position)
    late = edited(LOADED, lambda orders: orders[rank].insert(position + 1, orders[rank].pop(position)))

    assert_refused(lacking, (rank, position, "1F1"), "reads the data of stage 1, microbatch 1, which no row before it")
    assert_refused(twice, (rank, position + 1, "1LOAD1"), "which 1LOAD1", "has made, and nothing has used")
    assert_refused(late, (rank, position, "1F1"), "reads the data of stage 1")
