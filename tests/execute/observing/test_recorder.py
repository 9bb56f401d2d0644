"""What a recorder measures: every row, on one clock, in an order that the dependencies allow."""

import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from penstock.execute.accelerator import make_event
from penstock.execute.observing.clock import Clock, ClockComparison
from penstock.execute.observing.observer import observed
from penstock.execute.observing.recorder import DeviceRecorder, Recorder, recorder_for
from penstock.execute.step import Bound
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.device_queue import await_device
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.operations import IS_RECEIVE
from penstock.pipeline import Pipeline
from tests.execute.stages.test_split_backward import Product
from tests.support.local_pipelines import WIDTH, float_task, on_ranks, pipeline_of, step_task

FAR_S = 1000.0


def run(recorder, row, call, awaits=None):
    """Run a call as a recorded step does."""
    [bound] = observed([recorder], None, [Bound(row, call, awaits)])
    bound.call(None)


@pytest.mark.feature("H11")
def test_a_call_is_measured_from_its_start_to_its_end_which_an_arrival_moves_of_its_receive_only():
    times = iter([1.0, 2.0, 4.0, 4.5, 5.0])
    recorder = Recorder(range(7, 9), Clock(lambda: next(times)))
    during = []

    run(recorder, 8, lambda step: during.append(next(times)))

    assert (recorder.start_s.tolist(), during, recorder.end_s.tolist()) == ([0.0, 1.0], [2.0], [0.0, 4.0])
    run(recorder, 12, lambda step: None, awaits=8)
    assert (recorder.start_s.tolist(), recorder.end_s.tolist()) == ([0.0, 1.0], [0.0, 5.0])
    assert [column[1] for column in recorder.host] == [1.0, 4.0, 4.5, 5.0]


def record(wires, clocks=None):
    """Return the second, recorded step, which knows all shapes; a clock per rank, if any."""
    task = float_task(8)
    pipeline = pipeline_of(wires, task, **({} if clocks is None else {"clock": clocks[wires.rank]}))
    step_task(pipeline, task)
    assert pipeline.timeline is None
    step_task(pipeline, task, record=True)
    recording = pipeline.recording
    step_task(pipeline, task)  # which is not recorded
    assert pipeline.recording is recording
    assert pipeline.timeline is recording.timeline
    return recording


def assert_in_order(timeline, *, apart_s=0.0):
    program, start_s, end_s = timeline.program, timeline.start_s, timeline.end_s
    assert len(start_s) == program.num_instructions
    assert start_s.min() == 0.0
    assert (end_s >= start_s).all()
    for rank in range(program.num_ranks):
        rows = timeline.compute_rows(rank)
        assert (np.diff(start_s[rows]) >= 0).all()
        assert (start_s[rows][1:] >= end_s[rows][:-1]).all()
    before = predecessors(program)
    for row in np.flatnonzero(program.is_compute):
        for source in before[row][before[row] != NONE]:
            assert start_s[row] >= end_s[source]
            if Op(int(program.op[source])).is_receive:
                producer = before[before[source, 0], 0]
                assert end_s[source] >= end_s[producer] - apart_s


def test_measured_rows_end_after_they_start_and_keep_every_dependency():
    recordings, now_s = on_ranks(3, record), time.monotonic()

    assert_in_order(recordings[1].timeline)
    assert recordings[1].timeline.clock_uncertainty_s == 0.0
    for recording in recordings:
        assert (recording.timeline.start_s == recordings[0].timeline.start_s).all()
        assert recording.from_own_clock(now_s) == now_s - recordings[0].origin_s > recording.timeline.makespan_s
        # Batches of 8 in 4 microbatches: 2 rows of floats; the last stage sends none on.
        assert recording.message_bytes == (2 * WIDTH * 4, 2 * WIDTH * 4, 0)


@pytest.mark.feature("H7")
def test_hosts_are_in_their_calls_one_after_another_and_wait_in_between():
    timeline = on_ranks(3, record)[1].timeline

    host = timeline.host
    assert (host.start_s == timeline.start_s).all()  # a host that computes by itself
    for rows in timeline.program.ranks:
        assert (host.end_s[rows][:-1] <= host.start_s[rows][1:]).all()
    assert (host.end_s <= host.wait_start_s).all()
    assert (host.wait_start_s <= host.wait_end_s).all()
    is_receive = IS_RECEIVE[timeline.program.op]
    assert (host.wait_end_s[is_receive] == timeline.end_s[is_receive]).all()
    assert (host.wait_end_s == host.wait_start_s)[~is_receive].all()


def test_ranks_whose_clocks_are_far_apart_are_laid_on_one_scale_and_the_rest_is_told():
    def clock(rank):
        return Clock(lambda: FAR_S * rank + (1 + 1e-4 * rank) * time.monotonic(), f"host {rank}")

    timeline = on_ranks(3, record, [clock(rank) for rank in range(3)])[2].timeline

    assert 0 < timeline.clock_uncertainty_s < 1.0
    assert timeline.makespan_s < FAR_S / 10
    assert_in_order(timeline, apart_s=timeline.clock_uncertainty_s)


def gradients(wires, *, split_backwards):
    task = float_task(8)
    pipeline = pipeline_of(wires, task)
    timeline = pipeline.profile(*task.inputs, target=task.target, split_backwards=split_backwards)
    after = pipeline.profile(*task.inputs, target=task.target)
    ops = [set(each.program.op[each.program.is_compute].tolist()) for each in (timeline, after)]
    return ops, [parameter.grad for _, parameter in pipeline.named_parameters()]


def test_a_profile_may_run_backwards_in_two_parts_and_gives_the_same_gradients():
    whole, split = (on_ranks(2, partial(gradients, split_backwards=parts)) for parts in (False, True))

    for (ops, expected), (ops_of_parts, found) in zip(whole, split, strict=True):
        assert (ops, ops_of_parts) == ([{0, 1}, {0, 1}], [{0, 2, 3}, {0, 1}])
        assert all(map(torch.equal, found, expected))


# ---- on a GPU, told with a stand-in for it, in which queued work takes time of its own


class DeviceStandIn:
    """The host's clock, and a queue that is done at some time of it; events have the device's own zero."""

    def __init__(self):
        self.host_s = 10.0
        self.paused_s = 0.0
        self.ends_s = [0.0]
        """Of all that was queued."""

    def queue(self, length_s, host_s=0.001):
        """Queue work, which takes the host little time."""
        self.ends_s.append(max(self.ends_s[-1], self.host_s) + length_s)
        self.host_s += host_s

    def read(self):
        return self.host_s

    def pause(self, seconds):
        self.host_s += seconds
        self.paused_s += seconds

    def event(self):
        return EventStandIn(self)


class EventStandIn:
    def __init__(self, device):
        self._device = device
        self._at_s = None

    def record(self):
        self._at_s = max(self._device.ends_s[-1], self._device.host_s)

    def query(self):
        return self._device.host_s >= self._at_s

    def elapsed_time(self, end_event):
        return 1000.0 * (end_event._at_s - self._at_s)


def waiting_for(device, rank=0, deadline_s=20.0):
    """Return how the host waits for a device."""
    return partial(await_device, rank=rank, deadline_s=deadline_s, read_clock=device.read, pause=device.pause)


def recorder_of(device, num_rows):
    return DeviceRecorder(range(num_rows), Clock(device.read, "host"), device.event, waiting_for(device))


def test_work_is_measured_when_the_device_does_it_and_not_when_the_host_queues_it():
    device = DeviceStandIn()
    recorder = recorder_of(device, 2)
    recorder.begin(None)

    for row in range(2):
        run(recorder, row, lambda step: device.queue(2.0))
    called_s = [column.tolist() for column in recorder.host[:2]]
    recorder.end(None, failed=False)

    assert recorder.start_s.tolist() == pytest.approx([10.0, 12.0])
    assert recorder.end_s.tolist() == pytest.approx([12.0, 14.0])
    # The host has queued both within two milliseconds.
    assert called_s == [pytest.approx([10.0, 10.001]), pytest.approx([10.001, 10.002])]


def test_a_message_arrives_when_the_host_has_seen_it():
    device = DeviceStandIn()
    recorder = recorder_of(device, 3)
    recorder.begin(None)

    run(recorder, 0, lambda step: device.queue(2.0))
    run(recorder, 1, lambda step: None)  # a receive, posted behind it
    device.host_s = 11.0
    run(recorder, 2, lambda step: None, awaits=1)
    run(recorder, 2, lambda step: device.queue(1.0))
    recorder.end(None, failed=False)

    assert (recorder.start_s[1], recorder.end_s[1]) == (11.0, 11.0)  # not before it arrived
    assert (recorder.start_s[2], recorder.end_s[2]) == pytest.approx((12.0, 13.0))
    assert (recorder.host.wait_start_s[1], recorder.host.wait_end_s[1]) == (11.0, 11.0)


def test_a_device_without_timed_events_leaves_the_recording_out():
    def lacks():
        raise RuntimeError("mps does not support timing")

    assert type(recorder_for(clocks_of(torch.device("cpu")), range(1))) is Recorder
    recorder = DeviceRecorder(range(1), Clock(), lacks, await_device)

    recorder.attempt(recorder.begin, None)

    assert str(recorder.failure) == "mps does not support timing"


def clocks_of(device):
    [transport] = LocalTransport.create(1)
    return ClockComparison(transport, device, Clock(), ["host"])


def products_take_their_time(device):
    size = 4096 if device.type == "cuda" else 16
    matrix = torch.rand(size, size, device=device)
    recorder = recorder_for(clocks_of(device), range(1))
    matrix @ matrix
    recorder.begin(None)
    begin, end = (make_event(device, timing=True) for _ in range(2))

    def multiply(step):
        begin.record()
        for _ in range(10):
            matrix @ matrix
        end.record()

    run(recorder, 0, multiply)
    recorder.end(None, failed=False)

    assert recorder.end_s[0] - recorder.start_s[0] == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.1)


def test_products_on_a_device_take_their_time(on_device):
    on_device(products_take_their_time)


@pytest.mark.parametrize("is_opaque", [False, True])
def test_a_recorded_step_tells_which_weight_gradients_wait_for_w(is_opaque):
    def case(wires):
        layers = [(Opaque if is_opaque else nn.Linear)(128, 128) for _ in range(2)]
        pipeline = Pipeline(layers, "zb-h1", 2, nn.functional.mse_loss, transport=wires)
        for _ in range(2):
            pipeline.step(torch.ones(256, 128), target=torch.ones(256, 128), record=True)
        return pipeline.recording.early_weights, pipeline.describe_split()

    for early, text in on_ranks(2, case):
        found = [(early[stage].share, list(early[stage].reasons.values())) for stage in sorted(early)]
        assert found == [(1.0, ["cannot be told apart"]) if is_opaque else (0.0, [])] * 2
        assert f" {0 if is_opaque else 100}% " in text
        assert ("do not wait for W in stage 1: 1.weight (cannot be told apart)" in text) is is_opaque


class Opaque(nn.Linear):
    """Its weight is used by two kinds of operations in one function of its own."""

    def forward(self, features):
        return Product.apply(features, self.weight)
