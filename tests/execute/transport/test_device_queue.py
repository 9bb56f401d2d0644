"""A device waits for receives by itself: who is late, from when on, and what the host's own waits end with.

A stand-in is the device: it comes to one place after the other as its test lets it.
"""

import threading

import pytest
import torch

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.transport import Ticket, TorchTransport
from penstock.execute.transport.backend_links import BackendLink, QueuedMessage
from penstock.execute.transport.device_queue import DeviceQueue, await_device, device_queue_of
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.rank_names import RankNames
from tests.execute.transport.test_backend_links import Work
from tests.support.local_pipelines import error_of, float_task, on_ranks, pipeline_of, run_task, step_task
from tests.support.ranks import run_ranks

DEADLINE_S = 2.0


class Device:
    """Has come to so many places; its time passes only when its host pauses."""

    def __init__(self):
        self.num_marked = self.num_reached = 0
        self.now_s = 0.0

    def marker(self):
        return Place(self)

    def pause(self, seconds):
        self.now_s += seconds


class Place:
    def __init__(self, device):
        self.device = device
        self.number = None

    def record(self):
        self.device.num_marked += 1
        self.number = self.device.num_marked

    def query(self):
        return self.device.num_reached >= self.number


class Notes:
    """What is shown of whom a rank waits for."""

    def __init__(self):
        self.found = []
        self.failed_peer = None
        self.row = 0
        self.rows = []

    def note_wait(self, peer, row=None):
        self.found.append(peer)
        self.rows.append(row)

    def note_run(self):
        self.found.append("runs")

    def gave_up(self):
        return self.failed_peer


class Transport:
    """What a queue asks of its transport."""

    rank, num_ranks = 0, 9
    deadline_s = DEADLINE_S


def queue_of(device, *works, notes=None):
    """A queue with receives from ranks 1, 2 ..."""
    posted = {10 * peer: QueuedMessage(work, torch.zeros(1)) for peer, work in enumerate(works, 1)}
    queue = DeviceQueue(Transport(), posted, device.marker, read_clock=lambda: device.now_s)
    queue.watch(notes)
    for peer, _ in enumerate(works, 1):
        queue.follow(Ticket(peer, False, 10 * peer))
    assert posted == {}
    return queue


def test_a_peer_that_has_given_up_ends_a_wait_before_its_deadline():
    device, notes = Device(), Notes()
    queue = queue_of(device, Work(), notes=notes)
    assert not queue.is_held_up()
    notes.failed_peer = 2

    error = error_of(queue.is_held_up)

    assert isinstance(error, PeerLost)
    assert (error.peer, str(error)) == (2, "rank 0: rank 2 has given up the step. Look at its output for the cause")


@pytest.mark.feature("H3")
def test_the_time_against_a_peer_begins_when_the_device_has_come_to_the_receive():
    device, notes = Device(), Notes()
    queue = queue_of(device, Work(), notes=notes)
    device.now_s, device.num_reached = 100.0, 1

    assert queue.is_held_up()
    device.now_s = 101.9
    assert queue.is_held_up()
    device.now_s = 102.1
    error = error_of(queue.is_held_up)

    assert isinstance(error, DeadlineExceeded)
    assert (error.rank, error.peer) == (1, 1)
    assert "rank 0: waited to receive message 10 from rank 1 for 2.10 s, the deadline is 2 s" in str(error)
    assert notes.found == [1]


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "given up"])
def test_a_wait_in_vain_belongs_to_the_instruction_that_needs_the_message(is_late):
    device, notes = Device(), Notes()
    notes.row = 7  # where the host was when it let the device wait
    queue = queue_of(device, Work(), notes=notes)
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


def test_a_host_that_goes_on_is_not_shown_as_waiting_whatever_its_device_does():
    device, notes = Device(), Notes()
    queue = queue_of(device, Work(), Work(), notes=notes)
    device.num_reached = 1
    looks = iter([False, True])

    await_device(lambda: next(looks), rank=0, deadline_s=9.0, is_held_up=queue.is_held_up, go_on=queue.go_on)
    assert notes.found == [1, "runs"]
    looks = iter([False, True])
    await_device(lambda: next(looks), rank=0, deadline_s=9.0, is_held_up=queue.is_held_up, go_on=queue.go_on)

    assert notes.found == [1, "runs", 1, "runs"]


def test_each_peer_has_the_whole_deadline():
    device, notes, works = Device(), Notes(), [Work(), Work()]
    queue = queue_of(device, *works, notes=notes)
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


def test_receives_that_came_before_the_device_did_are_nobodys_wait():
    device, notes, works = Device(), Notes(), [Work(), Work()]
    queue = queue_of(device, *works, notes=notes)
    device.num_reached = 2
    for work in works:
        work.is_there = True

    assert not queue.is_held_up()
    assert not queue._receives
    assert notes.found == []


def test_a_message_that_fails_names_its_peer():
    device, work = Device(), Work(problem=RuntimeError("NCCL: remote process exited"))
    queue = queue_of(device, Work(), work)
    queue._receives.popleft()  # the first came
    work.is_there = True

    error = error_of(queue.is_held_up)

    assert isinstance(error, PeerLost)
    assert error.peer == 2
    assert "lost rank 2 while it waited to receive message 20 from rank 2" in str(error)
    assert "remote process exited" in str(error)


def test_another_thread_sees_from_when_on_a_device_waits_in_vain():
    device, works = Device(), [Work(), Work()]
    queue = queue_of(device, *works)
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

    assert isinstance(error, DeadlineExceeded)
    assert error.peer == 2
    works[1].is_there = True
    assert queue.why_held_up() is None


def test_another_thread_sees_a_peer_that_has_given_up_only_where_the_device_waits():
    device, notes, work = Device(), Notes(), Work()
    queue = queue_of(device, work, notes=notes)
    notes.failed_peer = 2
    assert queue.why_held_up() is None
    device.num_reached = 1

    error = queue.why_held_up()

    assert isinstance(error, PeerLost)
    assert error.peer == 2
    assert len(queue._receives) == 1
    work.is_there = True
    assert queue.why_held_up() is None


def awaited(device, is_reached, **options):
    await_device(is_reached, rank=2, deadline_s=1.0, read_clock=lambda: device.now_s, pause=device.pause, **options)


def test_a_device_that_stands_still_ends_the_wait_at_the_deadline():
    device = Device()

    with pytest.raises(
        DeadlineExceeded, match=r"rank 2: waited 1\.00 s for its device .* the deadline is 1 s"
    ) as caught:
        awaited(device, lambda: False)

    assert caught.value.rank == 2


def test_the_time_in_which_the_device_waits_for_a_peer_does_not_count_against_the_device():
    device = Device()

    awaited(device, lambda: device.now_s > 3.9, is_held_up=lambda: device.now_s < 3.0)

    with pytest.raises(DeadlineExceeded, match=r"waited 1\.00 s for its device"):
        awaited(device, lambda: False, is_held_up=lambda: device.now_s < 6.0)
    assert 6.9 < device.now_s < 7.1


# ---- the transport


def test_the_transport_of_a_gpu_follows_receives_and_looks_at_sends():
    assert run_ranks(1, with_stand_in) == [True]


class Link:
    """A communicator whose messages come when the test says so."""

    def __init__(self):
        self.works = []

    def recv(self, tensors, peer, tag):
        self.works.append(Work())
        return self.works[-1]

    send = recv

    def abort(self):
        pass

    shutdown = abort


class Together(Link):
    """Its abort ends only while that of another one runs."""

    def __init__(self, aborts):
        super().__init__()
        self._aborts = aborts

    def abort(self):
        self._aborts.wait(DEADLINE_S)
        raise RuntimeError("the device has failed")


def abort_of_two(rank):
    transport, aborts = TorchTransport(deadline_s=DEADLINE_S), threading.Barrier(2)
    up, down = Together(aborts), Together(aborts)
    transport._backends = [up, down]
    transport.abort()
    return aborts.broken


def test_backends_are_aborted_at_once_as_each_waits_for_the_messages_of_all():
    assert run_ranks(1, abort_of_two) == [False]


def with_stand_in(rank):
    device, link, transport = Device(), Link(), TorchTransport(deadline_s=DEADLINE_S)
    transport.names = RankNames.plain(9)
    transport._device, transport._queued_tags = torch.device("cuda"), [Tag.DATA]
    transport._links[3, Tag.DATA] = BackendLink(3, Tag.DATA, link, link, transport._on_device)
    transport.device_queue = queue = DeviceQueue(
        transport, transport._open, device.marker, read_clock=lambda: device.now_s
    )
    transport.is_device_held_up = queue.is_held_up
    ticket, sent = transport.post_receive(3, torch.zeros(1)), transport.post_send(3, torch.zeros(1))
    receive, send = link.works
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
    assert isinstance(error, DeadlineExceeded), error
    assert "message 0 from rank 3" in str(error)
    assert isinstance(error_of(queue.settle), DeadlineExceeded)

    receive.is_there = send.is_there = True
    queue.settle()
    assert queue.has_left(sent)
    queue.follow(transport.post_receive(3, torch.zeros(1)))
    transport.abort()
    assert not queue._receives
    assert "forgot this message" in str(error_of(queue.follow, ticket))
    transport.close()
    return True


# ---- a pipeline


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


class Following:
    """A transport that says that it is in a device's queue."""

    def __init__(self, transport):
        self._transport = transport
        self.device_queue = Counting(transport)

    def __getattr__(self, name):
        return getattr(self._transport, name)


@pytest.mark.parametrize(
    ("options", "is_followed"), [({"run_ahead": None}, False), ({}, True), ({"debug": "messages"}, False)]
)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_only_with_run_ahead_a_step_follows_its_receives_and_the_bits_are_the_same(schedule, options, is_followed):
    task = float_task(8)

    def case(transport):
        following = Following(transport)
        outcome = run_task(following, task, schedule, 4, **options)
        return outcome, following.device_queue.num_followed > 0, following.device_queue.num_settled

    found = on_ranks(2, case)
    plain = on_ranks(2, lambda transport: run_task(transport, task, schedule, 4))

    assert [is_any for _, is_any, _ in found] == [is_followed] * 2
    assert all((num_settled > 0) == is_followed for _, _, num_settled in found)
    for (outcome, _, _), expected in zip(found, plain, strict=True):
        assert torch.equal(outcome.result.loss, expected.result.loss)
        assert all(torch.equal(outcome.gradients[name], each) for name, each in expected.gradients.items())


def test_a_recorded_step_needs_arrivals_and_an_overlapped_pair_its_inputs_so_the_host_waits():
    task = float_task(8)

    def one_after_the_other(first, second):
        first()
        second()

    def case(transport):
        counts = []
        for overlap in (None, one_after_the_other):
            following = Following(transport)
            pipeline = pipeline_of(following, task, "dualpipe-v", run_ahead=2, overlap=overlap)
            for record in (False, True):
                following.device_queue.num_followed = 0
                step_task(pipeline, task, record=record)
                counts.append(following.device_queue.num_followed > 0)
        return counts

    assert on_ranks(2, case) == [[True, False, False, False]] * 2
