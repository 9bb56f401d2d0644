"""A recorded step on a GPU, told with a stand-in for it, in which queued work takes time of its own."""

import pytest
import torch

from penstock.execute.observing.clock import Clock
from penstock.execute.observing.device_recorder import DeviceRecorder, recorder_for
from penstock.execute.observing.record import Recorder


class DeviceStandIn:
    """The host's clock, and a queue that is done at some time of it; events have the device's own zero."""

    ZERO_S = 500.0

    def __init__(self):
        self.host_s = 10.0
        self.free_s = 0.0

    def queue(self, length_s, host_s=0.001):
        """Queue work, which takes the host little time."""
        self.free_s = max(self.free_s, self.host_s) + length_s
        self.host_s += host_s

    def read(self):
        return self.host_s

    def event(self):
        return EventStandIn(self)


class EventStandIn:
    def __init__(self, device):
        self._device = device
        self._at_s = None

    def record(self):
        self._at_s = max(self._device.free_s, self._device.host_s)

    def query(self):
        self._device.host_s = max(self._device.host_s, self._at_s)  # whoever looks again and again comes to it
        return True

    def elapsed_time(self, end_event):
        return 1000.0 * (end_event._at_s - self._at_s)


def recorder_of(device, num_rows):
    return DeviceRecorder(num_rows, Clock(device.read, "host"), device.event, rank=0, deadline_s=20.0)


def test_work_is_measured_when_the_device_does_it_and_not_when_the_host_queues_it():
    device = DeviceStandIn()
    recorder = recorder_of(device, 2)

    for row in range(2):
        recorder.timed(row, lambda step: device.queue(2.0))(None)
    recorder.finish()

    assert recorder.start_s.tolist() == pytest.approx([10.0, 12.0])
    assert recorder.end_s.tolist() == pytest.approx([12.0, 14.0])


def test_a_message_arrives_when_the_host_has_seen_it():
    device = DeviceStandIn()
    recorder = recorder_of(device, 3)

    recorder.timed(0, lambda step: device.queue(2.0))(None)
    recorder.timed(1, lambda step: None)(None)  # a receive, posted behind it
    device.host_s = 11.0
    recorder.timed_arrival(1, lambda step: None)(None)
    recorder.timed(2, lambda step: device.queue(1.0))(None)
    recorder.finish()

    assert (recorder.start_s[1], recorder.end_s[1]) == (11.0, 11.0)  # not before it arrived
    assert (recorder.start_s[2], recorder.end_s[2]) == pytest.approx((12.0, 13.0))


def test_a_processor_is_measured_by_its_clock():
    assert type(recorder_for(torch.device("cpu"), 1, Clock(), rank=0, deadline_s=20.0)) is Recorder


@pytest.mark.gpu
def test_products_on_a_gpu_take_their_time():
    device = torch.device("cuda")
    matrix = torch.rand(4096, 4096, device=device)
    recorder = recorder_for(device, 1, Clock(), rank=0, deadline_s=20.0)
    matrix @ matrix
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def multiply(step):
        begin.record()
        for _ in range(10):
            matrix @ matrix
        end.record()

    recorder.timed(0, multiply)(None)
    recorder.finish()

    assert recorder.end_s[0] - recorder.start_s[0] == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.1)
