"""Work in threads, while the ranks wait for each other."""

import threading

import pytest

from penstock.checkpoints import work
from penstock.checkpoints.work import longest_s, run_in_thread, run_together, wait_together
from penstock.errors import CheckpointError
from penstock.execute.control.collectives import Control
from tests.train.local_ranks import error_of, on_ranks


def test_an_action_returns_its_result_and_raises_its_error():
    assert run_in_thread(lambda: 3).result(5) == 3
    assert isinstance(run_in_thread(lambda: 1 / 0).exception(5), ZeroDivisionError)


def test_every_rank_waits_for_the_last():
    is_free = threading.Event()

    def case(transport):
        own = run_in_thread(is_free.wait if transport.rank == 1 else is_free.set)
        return wait_together(Control(transport), own, limit_s=10.0), own.done()

    assert on_ranks(2, case) == [(True, True)] * 2


def test_a_wait_ends_on_all_ranks_where_one_has_no_time_left():
    is_free = threading.Event()

    def case(transport):
        own = run_in_thread(is_free.wait if transport.rank == 1 else lambda: None)
        return wait_together(Control(transport), own, limit_s=0.1)

    assert on_ranks(2, case) == [False, False]
    is_free.set()


def test_a_disk_that_does_not_answer_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setattr(work, "STALLED_AFTER_S", 0.1)
    is_free = threading.Event()

    def case(transport):
        return error_of(lambda: run_together(Control(transport), is_free.wait, num_bytes=0, what="folder"))

    errors = on_ranks(2, case)
    is_free.set()
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert "folder: a disk took more than 0 s" in str(errors[0])


def test_more_bytes_have_more_time():
    assert longest_s(2 << 30) - longest_s(0) == pytest.approx((2 << 30) / work.SLOWEST_BYTES_PER_S)
