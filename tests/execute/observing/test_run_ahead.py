"""The host runs at most so many computations ahead of its device, and does not wait for ever."""

from functools import partial

import pytest
import torch

from penstock.errors import ConfigError, DeadlineExceeded
from penstock.execute.observing.observer import observed
from penstock.execute.observing.run_ahead import Throttle, throttle_for
from penstock.execute.step import Bound
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.device_queue import await_device
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.local_pipelines import error_of, float_task

CUDA = torch.device("cuda")


class Device:
    """A queue of work that moves by one whenever its host pauses."""

    def __init__(self, moves=True):
        self.moves = moves
        self.num_queued = self.num_done = 0
        self.most_pending = 0
        self.now_s = 0.0

    def compute(self, step=None):
        self.num_queued += 1
        self.most_pending = max(self.most_pending, self.num_queued - self.num_done)

    def pause(self, seconds):
        self.now_s += seconds
        self.num_done += self.moves

    def marker(self):
        return Place(self)


class Place:
    def __init__(self, device):
        self.device = device
        self.place = None

    def record(self):
        self.place = self.device.num_queued

    def query(self):
        return self.device.num_done >= self.place


def throttled(device, limit, program, rank=0, deadline_s=60.0, **options):
    options |= {"read_clock": lambda: device.now_s, "pause": device.pause}
    wait = partial(await_device, rank=rank, deadline_s=deadline_s, **options)
    throttle = Throttle(limit, device.marker, wait)
    bounds = [Bound(row, device.compute) for row in range(int(program.offsets[1]))]
    return throttle, observed([throttle], program, bounds)


def program_of(microbatches=6):
    return lower(build("gpipe", ranks=1, microbatches=microbatches))


@pytest.mark.feature("H3")
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_at_most_so_many_computations_are_pending(limit):
    device, program = Device(), program_of()

    _, bounds = throttled(device, limit, program)
    for row in range(12):
        bounds[row].call(None)

    assert device.most_pending == limit


def test_a_limit_that_is_never_reached_waits_for_nothing():
    device, program = Device(), program_of()

    _, bounds = throttled(device, 12, program)
    for row in range(12):
        bounds[row].call(None)

    assert device.now_s == 0.0


def test_only_computations_are_held_back():
    device, program = Device(), lower(build("gpipe", ranks=2, microbatches=2))

    _, bounds = throttled(device, 1, program)
    held = [bound.row for bound in bounds if bound.call != device.compute]

    assert held == [row for row in range(int(program.offsets[1])) if program.is_compute[row]]


def test_what_a_failed_step_left_pending_is_forgotten():
    device, program = Device(moves=False), program_of()
    throttle, bounds = throttled(device, 1, program)
    bounds[0].call(None)

    throttle.begin(None)
    bounds[1].call(None)

    assert device.now_s == 0.0


def test_a_device_that_stands_still_is_an_error_in_time():
    device, program = Device(moves=False), program_of()
    _, bounds = throttled(device, 1, program, rank=3, deadline_s=2.0)
    bounds[0].call(None)

    error = error_of(bounds[1].call, None)

    assert isinstance(error, DeadlineExceeded)
    assert (error.rank, device.num_queued) == (3, 1)
    assert 2.0 < error.waited_s < 2.1
    assert "rank 3: waited 2.00 s for its device to end a computation, the deadline is 2 s" in str(error)


def test_a_cpu_is_not_throttled_and_no_limit_throttles_nothing():
    [transport] = LocalTransport.create(1)

    assert throttle_for(torch.device("cpu"), 2, transport) is None
    assert throttle_for(CUDA, None, transport) is None
    assert isinstance(throttle_for(CUDA, 2, transport), Throttle)


def test_while_the_device_waits_for_a_peer_its_own_deadline_does_not_count():
    device, program = Device(moves=False), program_of()
    _, bounds = throttled(device, 1, program, deadline_s=2.0, is_held_up=lambda: device.now_s < 5.0)
    bounds[0].call(None)

    error = error_of(bounds[1].call, None)

    assert isinstance(error, DeadlineExceeded)
    assert 6.9 < device.now_s < 7.2


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_a_limit_that_is_no_count_is_refused(limit):
    task = float_task(4)

    error = error_of(Pipeline, task.make_layers(), "gpipe", 2, task.loss, run_ahead=limit)

    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"run_ahead: {limit} of type {type(limit).__name__}; expected 1 or more computations")


def throttled_step_gives_the_same_bits(device):
    task = float_task(8)
    losses = []
    for run_ahead in (None, 1):
        pipeline = Pipeline(task.make_layers(), "gpipe", 4, task.loss, device=device, run_ahead=run_ahead)
        losses.append(pipeline.step(*[each.to(device) for each in task.inputs], target=task.target.to(device)).loss)

    assert torch.equal(*losses)


def test_on_a_device_a_throttled_step_gives_the_same_bits(on_device):
    on_device(throttled_step_gives_the_same_bits)
