"""The watchdog: a slow rank's stack is on the board, a quick one's is not."""

import threading
import time

import pytest

from penstock.execute.control.watchdog import Watchdog, stack_of
from tests.support.boards import boards_of_threads, watching


def linger_here(is_over):
    is_over.wait(10)


def poll(condition, limit_s=5.0):
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.005)
    return condition()


class Watched:
    """A rank and its watchdog, whose clock a test sets, on top of the real one."""

    def __init__(self):
        (self.board,) = boards_of_threads(1)
        self.ahead_s, self.unblocked_at = 0.0, []
        self.watchdog = Watchdog(self.board, 1000.0, unblock=self._note, clock=self._now)

    def _now(self):
        return time.monotonic() + self.ahead_s

    def _note(self):
        self.unblocked_at.append(self.ahead_s)

    def stack_at(self, ahead_s):
        """Look at the rank at this time; return the stack that is on the board then."""
        self.ahead_s = ahead_s
        self.watchdog.look()
        return self.board.read(0).stack


@pytest.fixture
def watched():
    rank = Watched()
    with watching(rank.watchdog):
        yield rank


def test_a_stack_is_shown_after_a_quarter_of_the_deadline_until_the_rank_goes_on_and_not_of_an_idle_one(watched):
    assert watched.stack_at(5000.0) == ""
    watched.ahead_s = 0.0
    watched.board.note(0)

    assert watched.stack_at(240.0) == ""
    assert "test_a_stack_is_shown_after_a_quarter_of_the_deadline" in watched.stack_at(260.0)
    assert watched.stack_at(0.0) == ""


def test_a_rank_is_unblocked_only_in_an_instruction_that_lasts(watched):
    watched.stack_at(10.0)  # between steps
    watched.board.note(0)
    watched.stack_at(0.0)
    watched.stack_at(2.0)

    assert watched.unblocked_at == [2.0]


def hang_as_rank(board, is_over):
    with watching(Watchdog(board, 0.2)):
        board.note(0)
        linger_here(is_over)


def test_of_ranks_that_are_threads_each_shows_its_own_stack():
    slow, quick = boards_of_threads(2)
    is_over = threading.Event()
    rank = threading.Thread(target=hang_as_rank, args=(slow, is_over))
    rank.start()

    is_shown = poll(lambda: "linger_here" in quick.read(0).stack)
    is_over.set()
    rank.join()

    assert is_shown
    assert stack_of(rank.ident) == ""  # of a thread that has ended
    assert "poll" not in quick.read(0).stack
    assert quick.read(1).stack == ""


def test_stop_ends_the_thread_before_its_deadline_and_may_be_called_twice():
    (board,) = boards_of_threads(1)
    watchdog = Watchdog(board, 1000.0)
    before = threading.active_count()
    watchdog.start()
    watchdog.start()
    during = threading.active_count()
    watchdog.stop()
    watchdog.stop()

    assert during == before + 1
    assert threading.active_count() == before


def stop(watchdog):
    watchdog.start()
    watchdog.stop()


def lose_thread(watchdog):
    watchdog._thread = threading.Thread()  # not running, as after a fork


@pytest.mark.parametrize("end", [stop, lose_thread])
def test_a_watchdog_that_was_stopped_or_whose_thread_died_watches_again_in_the_next_step(end):
    (board,) = boards_of_threads(1)
    watchdog = Watchdog(board, 0.1)
    end(watchdog)
    board.note(0)

    with watching(watchdog):
        assert poll(lambda: board.read(0).stack)


def test_a_watchdog_that_collects_the_garbage_of_its_own_pipeline_ends():
    """A finalizer may run on any thread, also on the watchdog's own, which cannot wait for itself."""
    (board,) = boards_of_threads(1)
    watchdog = Watchdog(board, 0.02)
    problems = []
    is_over = threading.Event()

    def stop_from_within():
        try:
            watchdog.stop()
        except RuntimeError as error:
            problems.append(error)
        is_over.set()

    watchdog.look = stop_from_within
    watchdog.start()

    assert is_over.wait(60)
    assert problems == []
