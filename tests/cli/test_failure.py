"""Which of several failures is told."""

import signal

import pytest
import torch.distributed as dist

from penstock.cli.failure import RankFailure, first_cause, read_failures, unfinished, write_failure, write_finished
from penstock.errors import ConfigError, PeerLost


def failure(rank, *, at_s, message="broke", is_consequence=False):
    return RankFailure(rank, 4, message, is_consequence, at_s)


@pytest.mark.parametrize(("at_s", "is_consequence"), [(2.0, False), (0.5, True)])
def test_the_earliest_failure_is_the_cause_but_never_a_lost_peer(at_s, is_consequence):
    cause = first_cause({0: 4, 1: 4}, [failure(0, at_s=at_s, is_consequence=is_consequence), failure(1, at_s=1.0)])

    assert cause.rank == 1


def test_a_killed_rank_is_the_cause_and_what_another_saw_is_told_with_it():
    told = [failure(0, at_s=1.0, message="rank 0: peer 1 is gone after 3B2", is_consequence=True)]

    cause = first_cause({0: 4, 1: -signal.SIGKILL}, told)

    assert (cause.rank, cause.status) == (1, 4)
    assert cause.message.startswith("rank 1 was ended by SIGKILL. Where nobody killed it")
    assert cause.message.endswith("\nrank 0: peer 1 is gone after 3B2")


def test_a_rank_that_the_launcher_ended_is_not_the_cause():
    assert first_cause({0: -signal.SIGTERM, 1: 4}, [failure(1, at_s=1.0)]).rank == 1
    assert first_cause({0: -signal.SIGTERM, 1: 3}, []).message == "rank 1 ended with status 3 and left no message"
    assert first_cause({0: 130, 1: -signal.SIGTERM}, []).status == 130, "an interrupt is no failure to tell"
    for number, name in ((signal.SIGTERM, "SIGTERM"), (250, "signal 250")):
        assert first_cause({0: -number}, []).message == f"rank 0 was ended by {name}."
    stopped = [failure(0, at_s=1.0, message="rank 1 is the culprit: it is stopped")]
    assert first_cause({0: 5, 1: -signal.SIGKILL}, stopped) == stopped[0], "it passed its deadline before"


def test_wrong_input_is_shown_without_a_rank_and_others_with_one():
    assert RankFailure.of(ConfigError("is empty", key="data"), 1, "data: is empty").shown == "data: is empty"
    assert failure(2, at_s=0.0).shown == "rank 2 failed: broke"
    assert failure(2, at_s=0.0, message="rank 2, F3: gone").shown == "rank 2, F3: gone"


def test_failures_travel_through_the_store():
    store = dist.HashStore()
    sent = RankFailure.of(PeerLost("gone"), 2, "gone")

    write_failure(store, sent)

    assert read_failures(store, 4) == [sent]
    assert sent.is_consequence
    assert sent.raised_at_s > 0


def test_a_rank_that_has_not_told_that_it_has_finished_is_a_failure():
    store = dist.HashStore()
    write_finished(store, 0)

    failure = unfinished(store, 2)

    assert (failure.rank, failure.status, failure.is_silent) == (1, 4, True)
    assert failure.shown.startswith("rank 1 ended with status 0 before the run was over")
    write_finished(store, 1)
    assert unfinished(store, 2) is None
