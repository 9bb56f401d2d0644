"""Positions: what one rank writes is what the others read, and nothing stays behind."""

import os
import time
import timeit
from pathlib import Path

import pytest

from penstock.execute.failures.positions import TEXT_BYTES, PositionBoard, State
from penstock.execute.transport import LocalTransport, TorchTransport
from tests.ranks import run_ranks


def test_a_peer_reads_state_row_step_and_whom_a_rank_waits_for():
    writer, reader = PositionBoard.in_process(2)
    writer.note_step(7)
    writer.note(3)
    running = reader.read(0)
    writer.note_wait(1)
    waiting = reader.read(0)
    writer.note_run()
    again = reader.read(0)

    assert (running.state, running.row, running.peer, running.step) == (State.RUNNING, 3, None, 7)
    assert (waiting.state, waiting.row, waiting.peer) == (State.WAITING, 3, 1)
    assert (again.state, again.row, again.peer) == (State.RUNNING, 3, None)
    assert waiting.pid == os.getpid()


def test_the_row_alone_is_read_before_a_step_in_it_in_a_wait_and_after_it():
    writer, reader = PositionBoard.in_process(2)
    rows = [reader.row_of(0)]
    writer.note_step(7)
    rows.append(reader.row_of(0))
    writer.note(300)
    writer.note_wait(1)
    rows.append(reader.row_of(0))
    writer.note_idle()
    rows.append(reader.row_of(0))

    assert rows == [-1, -1, 300, -1]


def test_since_is_the_moment_at_which_the_state_began():
    (board,) = PositionBoard.in_process(1)
    before_s = time.monotonic()
    board.note(0)
    after_s = time.monotonic()

    assert before_s <= board.read(0).since_s <= after_s


def test_a_fresh_or_finished_rank_is_idle_and_a_closed_one_done():
    (board,) = PositionBoard.in_process(1)
    fresh = board.read(0)
    board.note_step(0)
    board.note(5)
    board.note_idle()
    finished = board.read(0)
    board.note_done()

    assert [fresh.state, finished.state, board.read(0).state] == [State.IDLE, State.IDLE, State.DONE]
    assert (fresh.row, finished.row) == (-1, -1)


def test_long_texts_are_cut_and_the_next_slot_stays_whole():
    first, second = PositionBoard.in_process(2)
    second.note(4)
    first.note_failure("ä" * TEXT_BYTES)
    first.note_stack("s" * TEXT_BYTES * 2)
    first.note_verdict("v" * 100_000)

    position = second.read(0)
    assert position.failure == "ä" * (TEXT_BYTES // 2)
    assert position.stack == "s" * TEXT_BYTES
    assert position.state is State.FAILED
    assert second.read(1).row == 4
    assert second.first_verdict().text.strip("v") == ""


def test_the_earliest_verdict_is_the_one_for_all():
    boards = PositionBoard.in_process(3)
    boards[2].note_verdict("first")
    boards[0].note_verdict("second")

    assert [board.first_verdict().text for board in boards] == ["first"] * 3


def test_texts_of_an_earlier_epoch_no_longer_count():
    early, late = PositionBoard.in_process(2)
    early.note_failure("old failure")
    late.note_failure("old failure")
    late.note_verdict("old verdict")
    early.begin_epoch()

    assert early.first_verdict() is None
    assert [early.read(rank).failure for rank in range(2)] == ["", ""]
    assert early.read(0).state is State.IDLE


@pytest.mark.slow
def test_noting_an_instruction_takes_about_a_microsecond():
    (board,) = PositionBoard.in_process(1)

    best_s = min(timeit.repeat(lambda: board.note(3), number=20_000, repeat=7)) / 20_000

    assert best_s < 5e-6  # measured 0.15 microseconds on an idle machine


def share_a_board(rank, folder):
    transport = TorchTransport(deadline_s=20)
    board = PositionBoard.shared(transport, Path(folder))
    board.note(10 + rank)
    transport.all_gather_object("noted")
    rows = [position.row for position in board.read_all()]
    pids = [position.pid for position in board.read_all()]
    transport.close()
    return rows, pids, os.listdir(folder)


@pytest.mark.slow
def test_processes_see_each_other_and_the_file_is_gone_before_the_board_is_returned(tmp_path):
    answers = run_ranks(3, share_a_board, str(tmp_path))

    assert [rows for rows, _, _ in answers] == [[10, 11, 12]] * 3
    assert len(set(answers[0][1])) == 3
    assert [files for _, _, files in answers] == [[]] * 3


class TwoHosts:
    """Gathers as the first of two ranks whose second one runs on another host."""

    rank = 0
    num_ranks = 2

    def all_gather_object(self, value):
        return [value, "elsewhere"]


def test_a_rank_of_another_host_is_unknown(tmp_path):
    board = PositionBoard.shared(TwoHosts(), tmp_path)

    assert [position.state for position in board.read_all()] == [State.IDLE, State.UNKNOWN]


def test_where_no_file_can_be_made_a_rank_sees_only_itself(tmp_path):
    (transport,) = LocalTransport.create(1)
    board = PositionBoard.shared(transport, tmp_path / "missing")
    board.note(2)

    assert board.read(0).row == 2
