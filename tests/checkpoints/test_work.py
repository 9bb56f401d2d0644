"""Work for the disk: how long it may take, and what is raised on every rank."""

import threading

import pytest

from penstock.checkpoints import work
from penstock.checkpoints.work import longest_s, run_together
from penstock.errors import CheckpointError, NotSaved, PenstockError
from penstock.execute.control.collectives import Control
from tests.train.local_ranks import error_of, on_ranks


def test_an_error_of_one_disk_is_an_error_on_every_rank():
    def case(transport):
        def action():
            if transport.rank:
                raise PenstockError("full")

        kinds = {"num_bytes": 0, "what": "folder", "error_type": NotSaved}
        return error_of(lambda: run_together(Control(transport), action, **kinds))

    errors = on_ranks(2, case)

    assert [(type(error), str(error)) for error in errors] == [(NotSaved, "rank 1: full"), (NotSaved, "full")]


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
