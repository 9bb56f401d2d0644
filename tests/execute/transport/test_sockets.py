"""Sockets between ranks of one host, with either way of carrying messages: order, room, ends and sizes."""

import os
import socket

import pytest
import torch

from penstock.execute.transport import shared_memory
from penstock.execute.transport.links import LinkClosed, MessageLate, SizesDiffer
from penstock.execute.transport.shared_memory import SharedMemory
from penstock.execute.transport.sockets import DirectSocket

MAX_WAIT_S = 20.0
SIZES = {"packets": 2**14, "shared memory": 2**20}
"""Of a message of which only some have room at once, in float32 elements."""


@pytest.fixture(params=SIZES)
def size(request):
    return SIZES[request.param]


@pytest.fixture
def pair(size):
    """Both ends of one connection."""
    connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = through_memory(*connections) if size == 2**20 else [DirectSocket(end) for end in connections]
    yield ends
    for end in ends:
        end.close()


def through_memory(*connections):
    file = shared_memory.make_memory()
    ends = [
        DirectSocket(connection, SharedMemory(connection, file, is_maker=is_maker))
        for connection, is_maker in zip(connections, (True, False), strict=True)
    ]
    os.close(file)
    return ends


def read(end, like):
    room = torch.empty_like(like)
    end.receive(room).wait(MAX_WAIT_S)
    return room


def test_what_there_is_no_room_for_leaves_later_in_order_and_nobody_waits(pair, size):
    sender, receiver = pair
    values = [torch.full((size,), float(number)) for number in range(40)]

    leaving = [sender.send(value) for value in values]  # nobody reads yet
    received = [read(receiver, value)[-1].item() for value in values]

    assert leaving[0] is None
    assert leaving[-1] is not None
    leaving[-1].wait(MAX_WAIT_S)
    assert received == [value[0].item() for value in values]
    assert sender.send(values[0]) is None  # straight on again, behind all others
    assert torch.equal(read(receiver, values[0]), values[0])


def fill(sender, size):
    """Send until there is no room; return how many messages have left, and the one that has to wait."""
    value, num_left = torch.zeros(size), 0
    while (leaving := sender.send(value)) is None:
        num_left += 1
    return num_left, leaving


def test_nothing_overtakes_what_waits_for_room(pair, size):
    sender, receiver = pair
    num_left, _ = fill(sender, size)
    read(receiver, torch.zeros(size))  # a little room; the system wakes who waits for it when there is more

    sender.send(torch.tensor([5.0]))

    for _ in range(num_left):
        read(receiver, torch.zeros(size))
    assert read(receiver, torch.zeros(1)).item() == 5.0


def test_waiting_for_room_ends_at_the_deadline_and_when_the_peer_is_gone(pair, size):
    _, leaving = fill(pair[0], size)

    with pytest.raises(MessageLate):
        leaving.wait(0.01)
    pair[1].close()

    for waiting in (leaving, pair[0].send(torch.zeros(1))):
        with pytest.raises(LinkClosed):
            waiting.wait(MAX_WAIT_S)


def test_messages_may_be_asked_for_in_another_order_than_they_come(pair):
    sender, receiver = pair
    rooms = [torch.zeros(1), torch.zeros(2)]
    first, second = map(receiver.receive, rooms)
    sender.send(torch.tensor([1.0]))

    assert not second.is_over()
    assert rooms[0].tolist() == [1.0]
    sender.send(torch.tensor([2.0, 3.0]))
    assert second.is_over()
    assert first.is_over()
    assert [room.tolist() for room in rooms] == [[1.0], [2.0, 3.0]]


def test_a_tensor_without_elements_is_a_message_like_any_other():
    sender, receiver = [DirectSocket(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    empty = receiver.receive(torch.empty(0))
    assert not empty.is_over()

    sender.send(torch.empty(0, 3))
    sender.send(torch.tensor([2.0]))

    assert empty.is_over()
    assert read(receiver, torch.zeros(1)).item() == 2.0
    sender.send(torch.tensor([2.0]))
    with pytest.raises(SizesDiffer, match="it sent 4 bytes, expected 0"):
        receiver.receive(torch.empty(0)).is_over()
    for end in (sender, receiver):
        end.close()


@pytest.mark.parametrize("expected", [1, 3])
def test_a_message_of_another_size_is_an_error_with_both_sizes(pair, expected):
    pair[0].send(torch.zeros(2))

    with pytest.raises(SizesDiffer, match=f"it sent 8 bytes, expected {4 * expected}"):
        pair[1].receive(torch.zeros(expected)).is_over()


def test_what_was_sent_before_the_end_still_arrives(pair):
    pair[0].send(torch.tensor([7.0]))
    pair[0].close()

    assert read(pair[1], torch.zeros(1)).item() == 7.0
    with pytest.raises(LinkClosed):
        pair[1].receive(torch.zeros(1)).is_over()
    with pytest.raises(LinkClosed):
        pair[1].send(torch.zeros(1))
