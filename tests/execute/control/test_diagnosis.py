"""Diagnosis: the right culprit, the same one on every rank."""

import mmap
import os
import re
import signal
import subprocess
import sys
from struct import pack_into

import pytest

from penstock.execute.control.diagnosis import LEGEND, Cause, Verdict, diagnose, process_trouble
from penstock.execute.control.positions import SLOT_BYTES, VERDICT_BYTES, Failure, PositionBoard, State, first_verdict
from penstock.execute.transport.rank_names import RankNames
from tests.support.boards import boards_of_threads


def describe(rank, row):
    return f"instruction {row} of rank {rank}"


def text_of(verdict):
    return f"{verdict.heading}\n\n{verdict.details}"


@pytest.mark.parametrize("peer", [None, 1], ids=["of a wait", "of an error at posting"])
def test_the_chain_of_waits_leads_to_the_rank_that_does_not_wait_and_all_ranks_are_shown(peer):
    boards = boards_of_threads(4)
    if peer is None:
        boards[0].note_step(4)
    boards[0].note(10)
    boards[1].note(11)
    boards[1].note_wait(2)
    if peer is None:
        boards[0].note_wait(1)
    boards[2].note(5)
    boards[2].note_stack("  File model.py, line 3 in spin")

    verdict = diagnose(boards[0], describe, peer=peer)

    assert verdict.culprit == 2
    assert verdict.reason.startswith("it has been in instruction 5 of rank 2 for ")
    assert text_of(verdict).startswith("rank 2 is the culprit: it has been in instruction 5 of rank 2 for ")
    assert "line 3 in spin" in text_of(verdict)
    table = [re.sub(r"\d\.\d s", "? s", " ".join(line.split())) for line in verdict.positions.splitlines()[:-1]]
    assert table == [
        "rank step state for waits for instruction",
        "0 5 waiting ? s rank 1 instruction 10 of rank 0" if peer is None else "0 running ? s instruction 10 of rank 0",
        "1 waiting ? s rank 2 instruction 11 of rank 1",
        "2 running ? s instruction 5 of rank 2",
        "3 idle ? s",
    ]


def test_a_cycle_of_waits_has_no_culprit_and_is_printed():
    boards = boards_of_threads(3)
    for rank, peer in ((0, 1), (1, 2), (2, 1)):
        boards[rank].note(rank)
        boards[rank].note_wait(peer)

    verdict = diagnose(boards[0], describe)

    assert verdict.culprit is None
    assert verdict.cause is Cause.CYCLE
    assert "a message was lost or the orders do not match" in verdict.reason
    assert "rank 1 in instruction 1 of rank 1 waits for rank 2, rank 2 in instruction 2" in verdict.reason
    assert "rank 0 in" not in verdict.reason


def test_the_first_failure_is_blamed_with_its_traceback():
    boards = boards_of_threads(3)
    boards[0].note(0)
    boards[0].note_wait(1)
    boards[2].note(6)
    calls = "  File model.py\n    raise ValueError"
    boards[2].note_failure(Failure("ValueError: planted", "", "layer 3 (Linear)", "where it is", calls))
    boards[1].note_failure(Failure("KeyError: 'later'", "", "", "", "  File other.py"))

    verdict = diagnose(boards[0], describe)

    assert verdict.culprit == 2
    assert verdict.reason == "in instruction 6 of rank 2, in layer 3 (Linear), it raised ValueError: planted"
    assert verdict.finding == "where it is"
    assert "rank 2 was here:\n  File model.py" in text_of(verdict)
    table = verdict.positions.splitlines()
    assert [line.split()[0] for line in table[:-1]] == ["rank", "0", "1", "2"]
    assert table[-1] == LEGEND
    assert verdict.cause is Cause.RAISED
    boards[1].note_failure(Failure("too late to matter", "", "", "", ""))
    boards[2].note_wait(0)
    assert diagnose(boards[2], describe) == verdict  # adopted word for word


def test_a_verdict_survives_the_board_field_by_field_and_of_too_long_a_one_the_end_is_lost():
    first, second = boards_of_threads(2)
    verdict = Verdict(1, Cause.GONE, "reason\nof two lines", "finding", "rank 1", "table", "stack\n\n1 2")
    long = Verdict(None, Cause.CYCLE, "reason", "", "", "table " * VERDICT_BYTES, "stack")

    first.note_verdict(verdict.packed())
    read = Verdict.unpacked(first_verdict(second))
    first.note_verdict(long.packed())
    cut = Verdict.unpacked(first_verdict(second))

    assert read == verdict
    assert (cut.culprit, cut.cause, cut.reason, cut.stack) == (None, Cause.CYCLE, "reason", "")
    assert long.positions.startswith(cut.positions)


def test_of_ranks_that_diagnose_at_the_same_time_all_take_the_earliest_verdict():
    boards = boards_of_threads(2)
    boards[0].note(0)
    verdict_of_rank_1 = Verdict(1, Cause.STILL, "reason of rank 1", "", "", "positions")

    def describe_while_another_finishes(rank, row):
        if not first_verdict(boards[1]):
            boards[1].note_verdict(verdict_of_rank_1.packed())
        return ""

    verdict = diagnose(boards[0], describe_while_another_finishes)

    assert verdict == verdict_of_rank_1


def test_a_peer_that_left_has_not_begun_or_is_on_another_host_is_named_as_such():
    boards = boards_of_threads(3)
    boards[0].note_wait(1)
    boards[1].note_state(State.DONE)
    left = diagnose(boards[0], describe)
    boards[0].begin_epoch()
    boards[0].note_wait(2)
    absent = diagnose(boards[0], describe)

    assert (left.culprit, absent.culprit) == (1, 2)
    assert left.reason.startswith("it left the pipeline ")
    assert absent.reason.startswith("it has not been in a step for ")
    board = PositionBoard(boards_of_threads(2)[0]._memory, 0, RankNames.plain(2))
    board._memory[SLOT_BYTES:] = bytes(SLOT_BYTES)
    board.note_wait(1)
    elsewhere = diagnose(board, describe)
    assert elsewhere.culprit == 1
    assert "another host" in elsewhere.reason
    assert "unknown (other host)" in text_of(elsewhere)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_seen_running_stopped_dead_and_reaped(sleeper):
    seen = [process_trouble(sleeper.pid)]
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        sleeper.send_signal(sign)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        seen.append(process_trouble(sleeper.pid))
    sleeper.wait()
    seen.append(process_trouble(sleeper.pid))

    assert seen == ["", "stopped", "gone", "gone"]


def test_a_failure_is_blamed_before_the_end_of_the_process_that_followed_it(sleeper):
    boards = boards_of_threads(2)
    boards[1].note_failure(Failure("MemoryError: planted", "", "", "", ""))
    sleeper.kill()
    sleeper.wait()
    pack_into("<q", boards[1]._memory, SLOT_BYTES, sleeper.pid)
    boards[0].note_wait(1)

    assert diagnose(boards[0], describe).reason == "at the start of its step it raised MemoryError: planted"


@pytest.mark.parametrize("numbers", [[0, 2, 1, 3], [4, 6, 5, 7]], ids=["another order", "a part of the ranks"])
@pytest.mark.parametrize("culprit", [1, 2])
def test_a_rank_of_a_mesh_is_blamed_by_its_number_wherever_it_is_in_the_mesh(sleeper, numbers, culprit):
    places = [{"pipeline": index % 2, "data": index // 2} for index in range(4)]
    names = RankNames.on_mesh(numbers, places)
    memory = mmap.mmap(-1, 8 * SLOT_BYTES)
    boards = [PositionBoard(memory, number, names) for number in numbers]
    sleeper.kill()
    sleeper.wait()
    pack_into("<q", memory, numbers[culprit] * SLOT_BYTES, sleeper.pid)

    verdict = diagnose(boards[0], describe)

    assert verdict.culprit == numbers[culprit]
    assert verdict.heading.startswith(f"{names[culprit]} is the culprit: its process {sleeper.pid} is gone")
