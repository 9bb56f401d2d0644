"""Time in which a process was stopped is no time in which it has waited; one that runs counts all of its time."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from penstock import running_time
from penstock.pipeline import Pipeline
from penstock.running_time import LONGEST_PART_S, TOLERANCE_S, pause, running_s, wait_in_parts
from tests.support.local_pipelines import square_loss
from tests.support.ranks import RankPool

DEADLINE_S = 4.0
STOPPED_S = 6.0


class Clock:
    """A clock that stands for `time`, and waits that are late."""

    def __init__(self):
        self.now_s = 1000.0
        self.asked = []

    def monotonic(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s

    def waiting(self, *late_s, ready_after=None):
        """A wait that is late by so much at each call, and then in time."""
        delays = list(late_s)

        def wait(part_s):
            self.asked.append(part_s)
            self.now_s += part_s + (delays.pop(0) if delays else 0.0)
            return ready_after is not None and len(self.asked) >= ready_after

        return wait


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(running_time, "time", clock)
    monkeypatch.setattr(running_time, "_STOPS", running_time._Stops())
    return clock


@pytest.mark.parametrize("late_s", [(), (TOLERANCE_S, TOLERANCE_S / 2)], ids=["in time", "a busy machine"])
def test_a_process_that_runs_counts_all_of_its_time_and_looks_once_without_any(clock, late_s):
    assert not wait_in_parts(clock.waiting(*late_s), 2.2)

    assert running_s() == clock.now_s == pytest.approx(1002.2)
    assert max(clock.asked) == LONGEST_PART_S
    assert sum(clock.asked) == pytest.approx(2.2 - sum(late_s))
    clock.asked.clear()
    assert wait_in_parts(clock.waiting(ready_after=1), 0.0)
    assert not wait_in_parts(clock.waiting(), -1.0)
    assert clock.asked == [0.0, 0.0]


def test_time_in_which_it_was_stopped_is_added_to_a_wait(clock):
    assert not wait_in_parts(clock.waiting(0.0, 3600.0), 2.0)

    assert running_s() == pytest.approx(1002.0)
    assert clock.now_s == pytest.approx(4602.0)


def test_it_counts_also_where_what_is_waited_for_is_there_then(clock):
    end_s = running_s() + 5.0

    assert wait_in_parts(clock.waiting(3600.0, ready_after=1), 5.0)

    assert end_s - running_s() == pytest.approx(4.5)


def test_a_stop_that_several_threads_have_waited_through_counts_once(clock):
    running_time._STOPS.note(1000.0, 1010.0)
    running_time._STOPS.note(1000.2, 1010.1)
    running_time._STOPS.note(1009.0, 1010.0)

    assert running_time._STOPS.total_s == pytest.approx(10.1)


def test_a_pause_is_short_and_sees_a_stop(clock):
    def sleep(duration_s):
        clock.now_s += duration_s + 60.0

    clock.sleep = sleep
    pause(10.0)

    assert running_s() == pytest.approx(1000.0 + LONGEST_PART_S)


class Slow(nn.Module):
    """Takes as long whether the process is stopped meanwhile or not."""

    def forward(self, hidden):
        for _ in range(30):
            time.sleep(0.05)
        return hidden


def step_slowly(rank, schedule):
    layers = [nn.Sequential(nn.Linear(4, 4), Slow()), nn.Linear(4, 4)]
    pipeline = Pipeline(layers, schedule, 2, square_loss, deadline_s=DEADLINE_S)
    try:
        return float(pipeline.step(torch.ones(2, 4), target=torch.zeros(2, 4)).loss)
    finally:
        pipeline.close()


def send(pool, number, ranks):
    for rank in ranks:
        os.kill(pool.processes[rank].pid, number)


@pytest.mark.slow
def test_ranks_that_are_stopped_together_for_longer_than_the_deadline_go_on():
    """Two jobs side by side, in which ranks are stopped in either order."""
    with RankPool(2) as one, RankPool(2) as other:
        for pool in (one, other):
            pool.run(int_of_rank)  # the processes are there
        for pool, order in ((one, [0, 1]), (other, [1, 0])):
            threading.Timer(1.0, send, (pool, signal.SIGSTOP, order)).start()
            threading.Timer(1.0 + STOPPED_S, send, (pool, signal.SIGCONT, order)).start()
            pool.begin(step_slowly, "gpipe")
        outcomes = [pool.collect() for pool in (one, other)]

    for outcome in outcomes:
        assert not outcome.has_failed(), outcome
        assert outcome.results[0] == outcome.results[1] > 0


def int_of_rank(rank):
    return rank
