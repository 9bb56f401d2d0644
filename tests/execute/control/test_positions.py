"""Positions: what one rank writes is what the others read, and nothing stays behind."""

import os
import time

import pytest

from penstock.execute.control.collectives import Control
from penstock.execute.control.hosts import host_of_processes
from penstock.execute.control.positions import TEXT_BYTES, Failure, PositionMemory, State, first_verdict, read_all
from penstock.execute.transport import TorchTransport
from penstock.execute.transport.rank_names import RankNames
from tests.support.boards import boards_of_threads
from tests.support.ranks import run_ranks
from tests.support.work import lines_run


def test_a_peer_reads_state_row_and_whom_a_rank_waits_for_from_before_a_step_to_its_end():
    writer, reader = boards_of_threads(2)
    life = [
        (lambda: None, State.IDLE, -1, None),
        (lambda: writer.note_step(7), State.RUNNING, -1, None),
        (lambda: writer.note(300), State.RUNNING, 300, None),
        (lambda: writer.note_wait(1), State.WAITING, 300, 1),
        (writer.note_run, State.RUNNING, 300, None),
        (writer.note_idle, State.IDLE, -1, None),
        (lambda: writer.note_state(State.DONE), State.DONE, -1, None),
    ]

    for act, *expected in life:
        before_s = time.monotonic()
        act()
        found = reader.read(0)
        assert found.since_s <= time.monotonic()
        assert found.since_s >= before_s or act is life[0][0]
        assert [found.state, found.row, found.peer] == expected
        assert reader.row_of(0) == found.row
    assert (found.step, found.pid) == (7, os.getpid())


def test_long_texts_are_cut_and_the_next_slot_stays_whole():
    first, second = boards_of_threads(2)
    second.note(4)
    first.note_failure(Failure("ä" * TEXT_BYTES, "", "layer 3", "", "calls"))
    first.note_stack("s" * TEXT_BYTES * 2)
    first.note_verdict("v" * 100_000)

    position = second.read(0)
    assert position.failure == Failure("ä" * (TEXT_BYTES // 2), "", "", "", "")
    assert position.stack == "s" * TEXT_BYTES
    assert position.state is State.FAILED
    assert second.read(1).row == 4
    assert first_verdict(second).strip("v") == ""


def test_texts_of_an_earlier_epoch_no_longer_count():
    early, late = boards_of_threads(2)
    early.note_failure(Failure("old failure"))
    late.note_failure(Failure("old failure"))
    late.note_verdict("old verdict")
    early.begin_epoch()

    assert not first_verdict(early)
    assert [early.read(rank).failure for rank in range(2)] == [None, None]
    assert early.read(0).state is State.IDLE


def test_a_peer_has_given_up_the_step_at_hand_once_it_has_failed_or_found_who_did():
    boards = boards_of_threads(3)
    for board in boards:
        board.note_step(4)
    assert boards[0].gave_up() is None

    boards[1].note_failure(Failure("ValueError: no"))
    assert [board.gave_up() for board in boards] == [1, None, 1]
    boards[2].note_verdict("rank 1 failed")
    assert [board.gave_up() for board in boards] == [1, 2, 1]

    boards[0].begin_epoch()
    boards[0].note_step(5)
    assert boards[0].gave_up() is None  # of ranks that lag behind the recovery
    for board in boards[1:]:
        board.begin_epoch()
        board.note_step(5)
    assert [board.gave_up() for board in boards] == [None] * 3
    boards[1].note_step(6)
    boards[1].note_failure(Failure("ValueError: no"))
    assert boards[0].gave_up() is None  # of another step


def test_noting_an_instruction_runs_at_most_three_lines():
    """It is noted before every instruction of a step; bench/overhead.py measures what a step costs."""
    (board,) = boards_of_threads(1)

    assert lines_run(lambda: board.note(3)) <= 3


def is_positions(path):
    """Whether a number of a process's files leads to a memory of positions; it may be that of another file by now."""
    try:
        return "penstock-positions" in os.readlink(path)
    except OSError:
        return False


def share_a_board(rank):
    transport = TorchTransport(deadline_s=20)
    control = Control(transport)
    with PositionMemory(RankNames.plain(3)) as memory:
        told = control.all_gather_object([host_of_processes(), memory.path])
        board = memory.board(rank, *zip(*told, strict=True))
        was_open = is_positions(told[0][1])
        control.all_gather_object("mapped")
    board.note(10 + rank)
    control.all_gather_object("noted")
    rows = [position.row for position in read_all(board)]
    pids = [position.pid for position in read_all(board)]
    transport.close()
    return rows, pids, was_open, is_positions(told[0][1])


@pytest.mark.slow
def test_processes_see_each_other_after_the_memory_has_no_file_any_more():
    answers = run_ranks(3, share_a_board)

    assert [rows for rows, *_ in answers] == [[10, 11, 12]] * 3
    assert len(set(answers[0][1])) == 3
    assert [(was_open, is_open) for *_, was_open, is_open in answers] == [(True, False)] * 3


def test_a_rank_of_another_host_is_unknown():
    with PositionMemory(RankNames.plain(2)) as memory:
        board = memory.board(0, ["here", "elsewhere"], [memory.path, "/proc/1/fd/3"])

    assert [position.state for position in read_all(board)] == [State.IDLE, State.UNKNOWN]


def no_memory(name):
    raise OSError


@pytest.mark.parametrize("is_made", [False, True], ids=["not made", "not opened"])
def test_where_there_is_no_memory_a_rank_sees_only_itself(monkeypatch, is_made):
    if not is_made:
        monkeypatch.setattr(os, "memfd_create", no_memory)
    with PositionMemory(RankNames.plain(2)) as memory:
        board = memory.board(1, ["here", "here"], ["/proc/0/fd/3" if is_made else memory.path] * 2)
    board.note(2)

    assert [position.state for position in read_all(board)] == [State.UNKNOWN, State.RUNNING]
    assert board.read(1).row == 2


def test_ranks_of_a_mesh_have_the_slots_of_their_numbers():
    names = RankNames.on_mesh([4, 6], [{"pipeline": place, "data": 1} for place in range(2)])
    with PositionMemory(names) as memory:
        first, other = (memory.board(index, ["here"] * 2, [memory.path] * 2) for index in range(2))
        for board in (first, other):
            board.note_step(3)
        assert first.gave_up() is None
        other.note_failure(Failure("ValueError: no"))

        assert (first.rank, first.name) == (4, "rank 4 (pipeline 0, data 1)")
        assert first.gave_up() == 6
        assert [(each.rank, each.name) for each in read_all(first)][1] == (6, "rank 6 (pipeline 1, data 1)")
