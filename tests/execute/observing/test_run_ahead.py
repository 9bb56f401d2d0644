"""The host runs at most so many computations ahead of its device, and does not wait for ever."""

from math import inf

import pytest
import torch

from penstock.errors import ConfigError, DeadlineExceeded, PipelineError
from penstock.execute.observing import run_ahead
from penstock.execute.observing.observer import observed
from penstock.execute.observing.run_ahead import Throttle, throttle_for
from penstock.execute.step import Bound
from penstock.execute.transport import LocalTransport
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.execute.observing.test_recorder import DeviceStandIn, waiting_for
from tests.support.local_pipelines import error_of, float_task

CUDA = torch.device("cuda")


def throttled(device, limit, program, length_s=1.0, **options):
    """Return a throttle, its calls, and a list of how many computations were pending in each."""
    throttle, pending = Throttle(limit, device.event, waiting_for(device, **options)), []

    def compute(step):
        device.queue(length_s)
        pending.append(sum(end_s > device.host_s for end_s in device.ends_s))

    bounds = [Bound(row, compute) for row in range(int(program.offsets[1]))]
    return throttle, observed([throttle], program, bounds), pending


def program_of(microbatches=6):
    return lower(build("gpipe", ranks=1, microbatches=microbatches))


@pytest.mark.feature("H3")
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_at_most_so_many_computations_are_pending(limit):
    device, program = DeviceStandIn(), program_of()

    _, bounds, pending = throttled(device, limit, program)
    for row in range(12):
        bounds[row].call(None)

    assert max(pending) == limit


def test_only_computations_are_held_back():
    device, program = DeviceStandIn(), lower(build("gpipe", ranks=2, microbatches=2))

    _, bounds, _ = throttled(device, 1, program)
    held = [bound.row for bound in bounds if bound.call.__name__ != "compute"]

    assert held == [row for row in range(int(program.offsets[1])) if program.is_compute[row]]


def test_a_device_that_stands_still_is_an_error_in_time_and_what_a_failed_step_left_pending_is_forgotten():
    device, program = DeviceStandIn(), program_of()
    throttle, bounds, pending = throttled(device, 1, program, inf, rank=3, deadline_s=2.0)
    bounds[0].call(None)
    throttle.begin(None)
    bounds[1].call(None)
    assert device.paused_s == 0.0

    error = error_of(bounds[2].call, None)

    assert isinstance(error, DeadlineExceeded)
    assert (error.rank, pending) == (3, [1, 2])
    assert 2.0 < error.waited_s < 2.1
    assert "rank 3: waited 2.00 s for its device to end a computation, the deadline is 2 s" in str(error)


def test_a_queued_device_is_throttled_where_there_is_a_limit_and_events_tell_how_far_it_is(monkeypatch):
    [transport] = LocalTransport.create(1)

    assert throttle_for(torch.device("cpu"), 2, transport) is None
    assert throttle_for(CUDA, None, transport) is None
    for has_events in (True, False):
        monkeypatch.setattr(run_ahead, "has_events", lambda device, answer=has_events: answer)
        assert isinstance(throttle_for(CUDA, 2, transport), Throttle) is has_events


def test_an_error_of_the_device_comes_from_the_computations_that_it_has_not_ended():
    device, program = DeviceStandIn(), lower(build("gpipe", ranks=2, microbatches=4))
    has_failed = [False]
    throttle = Throttle(2, device.event, waiting_for(device), lambda: has_failed[0])
    queued = [row for row in range(*program.offsets[1:3].tolist()) if program.is_compute[row]]

    def compute(step):
        device.queue(1.0)
        rows.append(throttle.rows_of(RuntimeError("an assertion in a kernel")))

    rows = []
    bounds = observed([throttle], program, [Bound(row, compute) for row in queued])
    first_row = int(program.offsets[1])
    bounds[0].call(None)
    has_failed[0] = True
    for bound in bounds[1:4]:
        bound.call(None)

    own_rows = [row - first_row for row in queued]
    assert rows == [[], own_rows[:2], own_rows[1:3], own_rows[2:4]]
    assert throttle.rows_of(RuntimeError("told later")) == own_rows[2:4]
    assert throttle.rows_of(PipelineError("of this program")) == []
    assert throttle.rows_of(DeadlineExceeded("for a peer", peer=1)) == []
    assert throttle.rows_of(DeadlineExceeded("for the device")) == own_rows[2:3]


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_a_limit_that_is_no_count_is_refused(limit):
    task = float_task(4)

    error = error_of(Pipeline, task.make_layers(), "gpipe", 2, task.loss, run_ahead=limit)

    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"run_ahead: {limit} of type {type(limit).__name__}; expected 1 or more computations")
