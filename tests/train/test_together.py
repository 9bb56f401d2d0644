"""A failure that stops one rank stops all of them."""

import time
from functools import partial
from threading import Event

import pytest

from penstock.errors import ConfigError, PeerLost, PenstockError
from penstock.execute.control.collectives import Control
from penstock.train import together
from penstock.train.together import same_words, working_together
from tests.support.local_pipelines import error_of, on_ranks


def failure(transport, failing_ranks, kind=ConfigError):
    def make():
        if transport.rank in failing_ranks:
            raise kind(f"a.key: rank {transport.rank} cannot")

    return error_of(Control(transport).together, make, same_words)


@pytest.mark.parametrize(
    ("failing_ranks", "words"),
    [([0], ["rank 0", "rank 0"]), ([1], ["rank 1", "rank 1"]), ([1, 2], ["rank 1", "rank 1", "rank 2"])],
)
def test_every_rank_fails_with_the_words_of_the_first_that_did_or_with_its_own(failing_ranks, words):
    errors = on_ranks(len(words), failure, failing_ranks)

    assert [str(error) for error in errors] == [f"a.key: {name} cannot" for name in words]
    kinds = [ConfigError if rank in failing_ranks else PenstockError for rank in range(len(words))]
    assert [type(error) for error in errors] == kinds


def test_a_bug_is_told_by_its_own_rank_and_to_the_others_that_rank_is_lost():
    bug, other = on_ranks(2, failure, [0], RuntimeError)

    assert type(bug) is RuntimeError
    assert (type(other), other.rank) == (PeerLost, 0)
    assert str(other) == "rank 0 failed: RuntimeError: a.key: rank 0 cannot"


LIMIT_S = 0.5


def work_of_rank_0(transport, work):
    return working_together(Control(transport, limit_s=LIMIT_S), partial(work) if transport.rank == 0 else None)


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

    errors = on_ranks(2, lambda transport: error_of(work_of_rank_0, transport, work))

    assert [type(error) for error in errors] == [ConfigError, PenstockError]
    assert {str(error) for error in errors} == {"data.files: no text"}


def test_work_that_does_not_go_on_ends_every_rank_with_one_message(monkeypatch):
    monkeypatch.setattr(together, "STALLED_AFTER_S", 2 * LIMIT_S)
    ended = Event()

    def work(beat):
        while not ended.wait(0.01):
            pass
        beat()

    def case(transport):
        try:
            return error_of(work_of_rank_0, transport, work)
        finally:
            ended.set()

    errors = on_ranks(2, case)

    assert all("no rank has read or written any of it" in str(error) for error in errors)


def test_one_rank_alone_works_in_its_own_thread_and_may_be_interrupted():
    def work(beat):
        beat()
        raise KeyboardInterrupt

    def case(transport):
        with pytest.raises(KeyboardInterrupt):
            work_of_rank_0(transport, work)

    on_ranks(1, case)
