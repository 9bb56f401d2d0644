"""Work in threads, while the ranks wait for each other."""

import threading
import time

import pytest

from penstock.errors import CheckpointError, ConfigError, DeadlineExceeded, PipelineError
from penstock.execute.control.collectives import Control, as_config_error
from penstock.execute.control.long_work import Heartbeat, run_in_thread, wait_together, work_together
from tests.support.local_pipelines import error_of, on_ranks

LIMIT_S = 0.5


def run(transport, work, heartbeat=None, limit_s=60.0, gather_limit_s=1.0):
    control, stalled = Control(transport, limit_s=gather_limit_s), CheckpointError("stalled")
    return work_together(control, work, limit_s=limit_s, stalled=stalled, fails_as=as_config_error, heartbeat=heartbeat)


def test_a_wait_ends_on_all_ranks_where_one_has_no_time_left():
    is_free = threading.Event()

    def case(transport):
        own = run_in_thread(is_free.wait if transport.rank == 1 else lambda: None)
        return wait_together(Control(transport), own, limit_s=0.1 if transport.rank else 60.0)

    assert on_ranks(2, case) == [False, False]
    is_free.set()


@pytest.mark.parametrize(("beating_rank", "is_over"), [(0, True), (None, False)])
def test_a_beat_of_any_rank_gives_all_of_them_more_time(beating_rank, is_over):
    heartbeats = [Heartbeat(), Heartbeat()]

    def work():
        end_s = time.monotonic() + 6 * LIMIT_S
        while time.monotonic() < end_s:
            if beating_rank is not None:
                heartbeats[beating_rank].beat()
            time.sleep(0.01)

    def case(transport):
        own = run_in_thread(work if transport.rank == 0 else lambda: None)
        control = Control(transport, limit_s=1.0)
        return wait_together(control, own, limit_s=3 * LIMIT_S, heartbeat=heartbeats[transport.rank])

    assert on_ranks(2, case) == [is_over] * 2


def test_ranks_wait_for_work_that_takes_longer_than_a_gather_may_and_get_their_own_results():
    def case(transport):
        results = [object() for _ in range(3)]
        own = results[transport.rank]
        return run(transport, lambda: time.sleep(1.5 if own is results[1] else 0.0) or own, gather_limit_s=0.5) is own

    assert on_ranks(3, case) == [True] * 3


def test_an_error_of_the_work_is_raised_on_every_rank():
    assert run_in_thread(lambda: 3).result(5) == 3
    errors = on_ranks(2, lambda transport: error_of(run, transport, int if transport.rank else lambda: 1 / 0))

    assert [type(error) for error in errors] == [ZeroDivisionError, ConfigError]
    assert str(errors[1]) == "rank 0: ZeroDivisionError: division by zero"


def test_work_that_does_not_go_on_ends_every_rank_with_one_message_and_is_stopped():
    ended = threading.Event()

    def work(beat):
        try:
            while not ended.wait(0.01):
                pass
            beat()
        except KeyboardInterrupt:
            return "stopped"
        return "went on"

    def case(transport):
        heartbeat, found = Heartbeat(), []
        try:
            return error_of(run, transport, lambda: found.append(work(heartbeat.beat)), heartbeat, 2 * LIMIT_S), found
        finally:
            ended.set()
            time.sleep(LIMIT_S)

    outcomes = on_ranks(2, case)

    assert [(type(error), str(error)) for error, _ in outcomes] == [(CheckpointError, "stalled")] * 2
    assert [found for _, found in outcomes] == [["stopped"]] * 2


def test_a_rank_that_is_lost_is_noticed_within_the_limit_and_the_work_stopped():
    stopped = threading.Event()
    heartbeat = Heartbeat()

    def work():
        try:
            while True:
                heartbeat.beat()
                time.sleep(0.01)
        except KeyboardInterrupt:
            stopped.set()
            raise

    def case(transport):
        if transport.rank == 0:
            begin_s = time.monotonic()
            return error_of(run, transport, work, heartbeat, 60.0, LIMIT_S), time.monotonic() - begin_s
        Control(transport).all_gather_object([True, 0, False])  # one sign of life, and no more
        return None

    (error, waited_s), _ = on_ranks(2, case)

    assert isinstance(error, (DeadlineExceeded, PipelineError))
    assert waited_s < 30.0, "and not 60 s, for so long may the work stall"
    assert stopped.is_set()
