"""What stops one rank stops all of them."""

import time
from functools import partial
from threading import Event

import pytest

from penstock.errors import ConfigError, DeadlineExceeded, PenstockError, PipelineError
from penstock.execute.control.collectives import Control
from penstock.train import together
from penstock.train.together import failing_together, working_together
from tests.train.local_ranks import error_of, on_ranks


def block(transport, failing_ranks):
    with failing_together(transport):
        if transport.rank in failing_ranks:
            raise ConfigError(f"rank {transport.rank} cannot", key="a.key")
    return transport.rank


def failure(transport, failing_ranks):
    return error_of(block, transport, failing_ranks)


def test_nothing_is_raised_where_no_rank_fails():
    assert on_ranks(2, block, []) == [0, 1]


@pytest.mark.parametrize("failing_ranks", [[0], [1]])
def test_every_rank_fails_with_the_words_of_the_one_that_did(failing_ranks):
    errors = on_ranks(2, failure, failing_ranks)

    assert {str(error) for error in errors} == {f"a.key: rank {failing_ranks[0]} cannot"}
    assert [type(error) for error in errors] == [
        ConfigError if rank in failing_ranks else PenstockError for rank in (0, 1)
    ]


def test_each_of_several_that_fail_keeps_its_own_error():
    assert [str(error) for error in on_ranks(3, failure, [1, 2])] == [
        "a.key: rank 1 cannot",
        "a.key: rank 1 cannot",
        "a.key: rank 2 cannot",
    ]


LIMIT_S = 0.2


def work_of_rank_0(transport, work):
    return working_together(transport, partial(work) if transport.rank == 0 else None, limit_s=LIMIT_S)


def test_ranks_wait_for_work_that_takes_longer_than_the_limit():
    def work(beat):
        end_s = time.monotonic() + 4 * LIMIT_S
        while time.monotonic() < end_s:
            beat()
            time.sleep(0.01)
        return "done"

    assert on_ranks(3, work_of_rank_0, work) == ["done", None, None]


def test_an_error_of_the_work_is_raised_on_every_rank():
    def work(beat):
        raise ConfigError("no text", key="data.files")

    errors = on_ranks(2, error_of_work, work)

    assert [type(error) for error in errors] == [ConfigError, PenstockError]
    assert {str(error) for error in errors} == {"data.files: no text"}


def error_of_work(transport, work):
    return error_of(work_of_rank_0, transport, work)


def test_work_that_does_not_go_on_ends_every_rank_with_one_message(monkeypatch):
    monkeypatch.setattr(together, "STALLED_AFTER_S", 2 * LIMIT_S)
    ended = Event()

    def work(beat):
        try:
            while True:
                time.sleep(0.01)
                if ended.is_set():
                    beat()
        finally:
            ended.set()

    def case(transport):
        try:
            return error_of(work_of_rank_0, transport, work)
        finally:
            ended.set()

    errors = on_ranks(2, case)

    assert all("no rank has read or written any of it" in str(error) for error in errors)


def test_a_rank_that_is_lost_is_noticed_within_the_limit_and_the_work_stopped():
    stopped = Event()

    def work(beat):
        try:
            while True:
                beat()
                time.sleep(0.01)
        except KeyboardInterrupt:
            stopped.set()
            raise

    def case(transport):
        if transport.rank == 0:
            begin_s = time.monotonic()
            error = error_of(work_of_rank_0, transport, work)
            return error, time.monotonic() - begin_s
        Control(transport).all_gather_object([True, 0])  # one sign of life, and no more
        return None

    (error, waited_s), _ = on_ranks(2, case)

    assert isinstance(error, (DeadlineExceeded, PipelineError))
    assert waited_s < 10 * LIMIT_S
    assert stopped.is_set()
