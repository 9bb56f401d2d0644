"""What computations wait for that their rank has launched: messages, gathers and reloads."""

from dataclasses import replace

from penstock.ir.awaits import (
    copies_of_row,
    gather_of_row,
    receive_of_row,
    reduction_of_row,
    reductions_of_row,
    reload_of_row,
)
from penstock.ir.deps import NONE, predecessors
from penstock.ir.recompute import with_recompute
from penstock.ir.split_backwards import with_split_backwards
from penstock.lowering import lower
from penstock.schedules import build
from tests.simulation.drawing import sharded


def texts(program, awaited):
    """By the text of a row, that of the row that it awaits."""
    found = {row: int(other) for row, other in enumerate(awaited) if other != NONE}
    return {str(program.instruction(row)): str(program.instruction(other)) for row, other in found.items()}


def test_a_computation_awaits_the_receive_of_its_message_and_nothing_of_its_own_rank():
    program = lower(build("1f1b", ranks=2, microbatches=2))

    assert texts(program, receive_of_row(program, predecessors(program)[:, 0])) == {
        "1F0": "1RECV_F0",
        "1F1": "1RECV_F1",
        "0B0": "0RECV_B0",
        "0B1": "0RECV_B1",
    }
    program = lower(build("looped-bfs", ranks=1, microbatches=1, stages_per_rank=2))
    assert texts(program, receive_of_row(program, predecessors(program)[:, 0])) == {}


def test_the_first_computation_of_a_unit_awaits_its_gather_whatever_its_stage():
    program = replace(sharded("0UNSHARD 1F0 0F0 2UNSHARD 2F0"), units=((0, 1),))

    assert texts(program, gather_of_row(program)) == {"1F0": "0UNSHARD", "2F0": "2UNSHARD"}
    other = replace(sharded("1UNSHARD 0F0 1F0"), units=((0, 1),))
    assert texts(other, gather_of_row(other)) == {"0F0": "1UNSHARD"}


def test_what_joins_ranks_awaits_the_last_reduction_of_its_rank_since_another_did():
    program = sharded(
        "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0REDUCE_TIED0 1REDUCE_TIED1 0STEP",
        "2F0 2B0 2REDUCE_TIED0 2REDUCE_GRAD 2STEP",
        "3REDUCE_GRAD",
        "4STEP",
    )

    assert texts(program, reduction_of_row(program)) == {"0REDUCE_TIED0": "0REDUCE_GRAD", "2STEP": "2REDUCE_GRAD"}
    for rank in range(4):
        found = {row: max(rows) for row, rows in reductions_of_row(program, rank).items() if rows}
        own = range(*program.offsets[rank : rank + 2])
        assert found == {row: int(reduction_of_row(program)[row]) for row in own if reduction_of_row(program)[row] >= 0}


def test_what_first_reads_what_was_reloaded_awaits_it():
    schedule = build("gpipe", ranks=1, microbatches=3)
    expected = {"0B0": "0RELOAD0", "0B1": "0RELOAD1", "0B2": "0RELOAD2"}

    for each, letter in ((schedule, "B"), (with_recompute(schedule), "R"), (with_split_backwards(schedule), "I")):
        program = lower(each, offload=[0])
        found = texts(program, reload_of_row(program))
        assert found == {reader.replace("B", letter): reload for reader, reload in expected.items()}


def test_memory_of_an_offload_is_taken_until_the_second_computation_and_no_longer_than_its_reload():
    program = lower(build("zb-h1", ranks=2, microbatches=4), offload=[0])

    waits = {
        str(program.instruction(row)): [str(program.instruction(copy)) for copy in copies]
        for row, copies in copies_of_row(program, 0).items()
    }

    # ... F1 OFFLOAD1 I0 W0 RELOAD1 F2 OFFLOAD2 I1 W1 RELOAD2 F3 OFFLOAD3 I2 RELOAD3 W2 I3 W3
    assert waits == {
        "0W0": ["0OFFLOAD1"],
        "0I1": ["0RELOAD1"],
        "0W1": ["0OFFLOAD2"],
        "0I2": ["0RELOAD2"],
        "0RELOAD3": ["0OFFLOAD3"],
        "0I3": ["0RELOAD3"],
    }
    assert copies_of_row(program, 1) == {}


def test_an_overlapped_pair_is_one_computation_behind_an_offload():
    program = lower(build("dualpipe", ranks=2, microbatches=8), offload=range(4))

    for rank in range(2):
        copies = copies_of_row(program, rank)
        launches = [copy for copies_of_one in copies.values() for copy in copies_of_one]
        assert len(launches) == len(set(launches)) == sum("LOAD" in str(row) for row in program[rank])
        for row, copies_of_one in copies.items():
            assert max(copies_of_one) < row
            is_second = bool(program.joined[row - 1])
            assert not is_second or all("RELOAD" in str(program.instruction(copy)) for copy in copies_of_one)
