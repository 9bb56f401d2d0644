"""A device waits for receives by itself: who is late, from when on, and what the host's own waits end with.

A stand-in is the device: it comes to one place after the other as its test lets it.
"""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.transport import Ticket, TorchTransport
from penstock.execute.transport.backend_links import BackendLink, QueuedMessage
from penstock.execute.transport.device_queue import DeviceQueue, await_device, device_queue_of
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.rank_names import RankNames
from tests.execute.transport.test_backend_links import Work
from tests.support.local_pipelines import (
    assert_errors,
    error_of,
    float_task,
    on_ranks,
    pipeline_of,
    run_task,
    same_outcomes,
    step_task,
)
from tests.support.ranks import run_ranks

DEADLINE_S = 2.0


class Device:
    """Has come to so many places; its time passes only when its host pauses."""

    def __init__(self):
        self.num_marked = self.num_reached = 0
        self.now_s = 0.0

    def marker(self):
        """Return a place in this device's queue."""

        def record():
            self.num_marked += 1
            place.number = self.num_marked

        place = SimpleNamespace(record=record, query=lambda: self.num_reached >= place.number)
        return place

    def pause(self, seconds):
        self.now_s += seconds

    def await_itself(self, is_reached, **options):
        """Wait until this device has come to a place."""
        await_device(is_reached, rank=2, deadline_s=1.0, read_clock=lambda: self.now_s, pause=self.pause, **options)


class Notes:
    """What is shown of whom a rank waits for."""

    failed_peer, row = None, 0

    def __init__(self):
        self.found, self.rows = [], []

    def note_wait(self, peer, row=None):
        self.found.append(peer)
        self.rows.append(row)

    def note_run(self):
        self.found.append("runs")

    def gave_up(self):
        return self.failed_peer


def queue_of(num_peers, notes=None):
    """Return a device, its queue with receives from ranks 1, 2 ..., and their works."""
    device, works = Device(), [Work() for _ in range(num_peers)]
    transport = SimpleNamespace(rank=0, num_ranks=9, deadline_s=DEADLINE_S)
    posted = {10 * peer: QueuedMessage(work, torch.zeros(1)) for peer, work in enumerate(works, 1)}
    queue = DeviceQueue(transport, posted, device.marker, read_clock=lambda: device.now_s)
    queue.watch(notes)
    for peer, _ in enumerate(works, 1):
        queue.follow(Ticket(peer, False, 10 * peer))
    assert posted == {}
    return device, queue, works


@pytest.fixture
def notes():
    return Notes()


def test_a_peer_that_has_given_up_ends_a_wait_before_its_deadline(notes):
    _, queue, _ = queue_of(1, notes)
    assert not queue.is_held_up()
    notes.failed_peer = 2

    error = error_of(queue.is_held_up)

    assert isinstance(error, PeerLost)
    assert (error.peer, str(error)) == (2, "rank 0: rank 2 has given up the step. Look at its output for the cause")


@pytest.mark.feature("H3")
def test_the_time_against_a_peer_begins_when_the_device_has_come_to_the_receive(notes):
    device, queue, _ = queue_of(1, notes)
    device.now_s, device.num_reached = 100.0, 1

    assert queue.is_held_up()
    device.now_s = 101.9
    assert queue.is_held_up()
    device.now_s = 102.1
    error = error_of(queue.is_held_up)

    text = "rank 0: waited to receive message 10 from rank 1 for 2.10 s, the deadline is 2 s"
    assert_errors([error], DeadlineExceeded, text)
    assert (error.rank, error.peer) == (1, 1)
    assert notes.found == [1]


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "given up"])
def test_a_wait_in_vain_belongs_to_the_instruction_that_needs_the_message(notes, is_late):
    notes.row = 7  # where the host was when it let the device wait
    device, queue, _ = queue_of(1, notes)
    notes.row = 9
    device.now_s, device.num_reached = 100.0, 1
    assert queue.is_held_up()
    assert queue.missed_row is None

    device.now_s = 103.0 if is_late else 100.5
    notes.failed_peer = None if is_late else 1
    error_of(queue.is_held_up)

    assert notes.rows == [7]
    assert queue.missed_row == 7
    queue.forget()
    assert queue.missed_row is None


def test_a_host_that_goes_on_is_not_shown_as_waiting_whatever_its_device_does(notes):
    device, queue, _ = queue_of(2, notes)
    device.num_reached = 1

    for _ in range(2):
        looks = iter([False, True])
        await_device(looks.__next__, rank=0, deadline_s=9.0, is_held_up=queue.is_held_up, go_on=queue.go_on)

    assert notes.found == [1, "runs"] * 2


def test_each_peer_has_the_whole_deadline(notes):
    device, queue, works = queue_of(2, notes)
    device.num_reached = 1
    assert queue.is_held_up()

    works[0].is_there, device.now_s = True, 1.9
    assert not queue.is_held_up()
    device.num_reached, device.now_s = 2, 3.0
    assert queue.is_held_up()
    device.now_s = 4.9
    assert queue.is_held_up()
    works[1].is_there = True
    assert not queue.is_held_up()

    assert not queue._receives
    assert notes.found == [1, "runs", 2, "runs"]


def test_receives_that_came_before_the_device_did_are_nobodys_wait(notes):
    device, queue, works = queue_of(2, notes)
    device.num_reached = 2
    for work in works:
        work.is_there = True

    assert not queue.is_held_up()
    assert not queue._receives
    assert notes.found == []


def test_a_message_that_fails_names_its_peer():
    _, queue, (first, second) = queue_of(2)
    first.is_there = second.is_there = True
    second.problem = RuntimeError("NCCL: remote process exited")

    error = error_of(queue.is_held_up)

    assert_errors([error], PeerLost, "lost rank 2 while it waited to receive message 20", "remote process exited")
    assert error.peer == 2


def test_another_thread_sees_from_when_on_a_device_waits_in_vain():
    device, queue, works = queue_of(2)
    device.now_s = 100.0
    assert queue.why_held_up() is None  # the device has not come there
    device.num_reached = 1
    assert queue.why_held_up() is None
    device.now_s, works[0].is_there = 101.9, True
    assert queue.why_held_up() is None
    device.now_s, device.num_reached = 102.1, 2
    assert queue.why_held_up() is None
    device.now_s = 104.2

    error = queue.why_held_up()

    assert (type(error), error.peer) == (DeadlineExceeded, 2)
    works[1].is_there = True
    assert queue.why_held_up() is None


def test_another_thread_sees_a_peer_that_has_given_up_only_where_the_device_waits(notes):
    device, queue, (work,) = queue_of(1, notes)
    notes.failed_peer = 2
    assert queue.why_held_up() is None
    device.num_reached = 1

    error = queue.why_held_up()

    assert (type(error), error.peer) == (PeerLost, 2)
    assert len(queue._receives) == 1
    work.is_there = True
    assert queue.why_held_up() is None


def test_a_device_that_stands_still_ends_the_wait_at_the_deadline():
    error = error_of(Device().await_itself, lambda: False)

    assert_errors([error], DeadlineExceeded, "rank 2: waited 1.00 s for its device", "the deadline is 1 s")
    assert error.rank == 2


def test_the_time_in_which_the_device_waits_for_a_peer_does_not_count_against_the_device():
    device = Device()

    device.await_itself(lambda: device.now_s > 3.9, is_held_up=lambda: device.now_s < 3.0)

    with pytest.raises(DeadlineExceeded, match=r"waited 1\.00 s for its device"):
        device.await_itself(lambda: False, is_held_up=lambda: device.now_s < 6.0)
    assert 6.9 < device.now_s < 7.1


def test_the_transport_of_a_gpu_follows_receives_and_looks_at_sends_and_aborts_all_backends_at_once():
    assert run_ranks(1, with_stand_in) == [True]


class Together:
    """A backend whose abort ends only while that of another one runs."""

    aborts = threading.Barrier(2)

    def abort(self):
        self.aborts.wait(DEADLINE_S)
        raise RuntimeError("the device has failed")


def with_stand_in(rank):
    device, transport, receive, send = Device(), TorchTransport(deadline_s=DEADLINE_S), Work(), Work()
    link = Mock(recv=Mock(return_value=receive), send=Mock(return_value=send))
    transport.names = RankNames.plain(9)
    transport._device, transport._queued_tags = torch.device("cuda"), [Tag.DATA]
    make_pending = lambda work, tensor: QueuedMessage(work, tensor, transport.is_device_held_up)  # noqa: E731
    transport._links[3, Tag.DATA] = BackendLink(3, Tag.DATA, link, link, make_pending)
    transport.device_queue = queue = DeviceQueue(
        transport, transport._open, device.marker, read_clock=lambda: device.now_s
    )
    transport.is_device_held_up = queue.is_held_up
    ticket, sent = transport.post_receive(3, torch.zeros(1)), transport.post_send(3, torch.zeros(1))
    notes = Notes()
    transport.watch(notes)

    assert device_queue_of(transport) is queue
    queue.follow(ticket)
    assert receive.calls == ["wait"]
    transport.wait(ticket)  # nothing is left for the host to wait for
    assert not queue.is_held_up()
    assert not queue.has_left(sent)

    # A host that waits for a send learns that its device waits for another rank's message.
    device.num_reached, device.now_s = 1, 5.0
    assert queue.is_held_up()
    assert notes.found == [3]
    device.now_s = 8.0
    error = error_of(transport.wait, sent)
    assert_errors([error], DeadlineExceeded, "message 0 from rank 3")
    assert isinstance(error_of(queue.settle), DeadlineExceeded)

    receive.is_there = send.is_there = True
    queue.settle()
    assert queue.has_left(sent)
    link.recv.return_value = Work()
    queue.follow(transport.post_receive(3, torch.zeros(1)))
    transport._backends = [Together(), Together()]  # each waits for the messages of all
    transport.abort()
    assert not Together.aborts.broken
    assert not queue._receives
    assert "forgot this message" in str(error_of(queue.follow, ticket))
    transport.close()
    return True


class Counting(DeviceQueue):
    """Counts what is followed and looked at; messages are those of the CPU."""

    def __init__(self, transport):
        super().__init__(transport, {}, Device().marker)
        self.num_followed = self.num_looks = self.num_settled = 0

    def follow(self, ticket):
        self.num_followed += 1
        self._transport.wait(ticket)

    def has_left(self, ticket):
        self.num_looks += 1
        return self.num_looks % 2 == 0

    def settle(self):
        self.num_settled += 1


@pytest.mark.parametrize(
    ("options", "is_followed"), [({"run_ahead": None}, False), ({}, True), ({"debug": "messages"}, False)]
)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_only_with_run_ahead_a_step_follows_its_receives_and_the_bits_are_the_same(schedule, options, is_followed):
    task = float_task(8)

    def case(transport):
        transport.device_queue = queue = Counting(transport)
        outcome = run_task(transport, task, schedule, 4, **options)
        return outcome, queue.num_followed > 0, queue.num_settled > 0

    outcomes, *counts = zip(*on_ranks(2, case), strict=True)

    assert counts == [(is_followed,) * 2] * 2
    assert same_outcomes(outcomes, on_ranks(2, run_task, task, schedule, 4))


def test_a_recorded_step_needs_arrivals_and_an_overlapped_pair_its_inputs_so_the_host_waits():
    task = float_task(8)

    def one_after_the_other(first, second):
        first()
        second()

    def case(transport):
        counts = []
        for overlap in (None, one_after_the_other):
            transport.device_queue = queue = Counting(transport)
            pipeline = pipeline_of(transport, task, "dualpipe-v", run_ahead=2, overlap=overlap)
            for record in (False, True):
                queue.num_followed = 0
                step_task(pipeline, task, record=record)
                counts.append(queue.num_followed > 0)
        return counts

    assert on_ranks(2, case) == [[True, False, False, False]] * 2
