"""Sockets between ranks of one host: what they carry, what they do without room, and when there are none."""

import gc
import socket
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.transport import TorchTransport
from penstock.execute.transport.direct import (
    BUFFER_BYTES,
    MOST_BYTES,
    DirectSocket,
    SizesDiffer,
    SocketClosed,
    SocketLate,
    connect_directly,
)
from tests.ranks import RankPool

PATIENCE_S = 20.0
TAGS = (0, 1)
SMALL, LARGE = MOST_BYTES // 4, MOST_BYTES // 4 + 1
"""In float32 elements."""


@pytest.fixture
def pair():
    """Both ends of one connection."""
    ends = [DirectSocket(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends
    for end in ends:
        end.close()


class Gathering:
    """`all_gather` for ranks that are threads."""

    def __init__(self, num_ranks):
        self._values = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=PATIENCE_S)

    def of(self, rank):
        def all_gather(value):
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return all_gather


def connected(num_ranks):
    gathering = Gathering(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [
            threads.submit(connect_directly, rank, TAGS, gathering.of(rank), PATIENCE_S) for rank in range(num_ranks)
        ]
    return [future.result() for future in futures]


def read(end, like):
    arriving = end.post(torch.empty_like(like))
    while not end.has_arrived(arriving):
        end.wait_readable(PATIENCE_S)
    return arriving.tensor


def test_every_pair_of_ranks_gets_a_socket_for_every_purpose():
    ranks = connected(3)

    for rank, sockets in enumerate(ranks):
        assert set(sockets.by_peer_and_tag) == {(peer, tag) for peer in range(3) if peer != rank for tag in TAGS}
    for peer, tag in ranks[0].by_peer_and_tag:
        value = torch.tensor([float(10 * peer + tag)])
        ranks[0].by_peer_and_tag[peer, tag].send(value)
        assert torch.equal(read(ranks[peer].by_peer_and_tag[0, tag], value), value)
    for sockets in ranks:
        sockets.close()


def test_only_messages_up_to_the_limit_go_this_way():
    left, right = connected(2)

    assert left.most_bytes == right.most_bytes == MOST_BYTES
    assert left.of(1, 0, MOST_BYTES) is left.by_peer_and_tag[1, 0]
    assert left.of(1, 0, MOST_BYTES + 1) is None
    assert left.of(1, 0, 0) is None  # nothing to read would look like the end
    for sockets in (left, right):
        sockets.close()


def test_what_there_is_no_room_for_leaves_later_in_order_and_nobody_waits(pair):
    sender, receiver = pair
    values = [torch.full((SMALL,), float(number)) for number in range(4 * BUFFER_BYTES // MOST_BYTES)]

    leaving = [sender.send(value) for value in values]  # nobody reads yet
    received = [read(receiver, value)[-1].item() for value in values]

    assert leaving[0] is None
    assert leaving[-1] is not None
    sender.wait_sent(leaving[-1], PATIENCE_S)
    assert received == [value[0].item() for value in values]
    assert sender.send(values[0]) is None  # straight on again, behind all others
    assert torch.equal(read(receiver, values[0]), values[0])


def fill(sender):
    """Send until there is no room; return how many messages have left, and the one that has to wait."""
    value, num_left = torch.zeros(SMALL), 0
    while (leaving := sender.send(value)) is None:
        num_left += 1
    return num_left, leaving


def test_nothing_overtakes_what_waits_for_room(pair):
    sender, receiver = pair
    num_left, _ = fill(sender)
    read(receiver, torch.zeros(SMALL))  # a little room; the system wakes who waits for it when there is more

    sender.send(torch.tensor([5.0]))

    for _ in range(num_left):
        read(receiver, torch.zeros(SMALL))
    assert read(receiver, torch.zeros(1)).item() == 5.0


def test_waiting_for_room_has_a_deadline(pair):
    _, leaving = fill(pair[0])

    with pytest.raises(SocketLate):
        pair[0].wait_sent(leaving, 0.01)


def test_waiting_for_room_ends_when_the_peer_is_gone(pair):
    _, leaving = fill(pair[0])

    pair[1].close()

    with pytest.raises(SocketClosed):
        pair[0].wait_sent(leaving, PATIENCE_S)
    with pytest.raises(SocketClosed):
        pair[0].wait_sent(pair[0].send(torch.zeros(1)), PATIENCE_S)


def test_messages_may_be_asked_for_in_another_order_than_they_come(pair):
    sender, receiver = pair
    first, second = receiver.post(torch.zeros(1)), receiver.post(torch.zeros(2))
    sender.send(torch.tensor([1.0]))

    assert not receiver.has_arrived(second)
    assert first.is_done
    sender.send(torch.tensor([2.0, 3.0]))
    assert receiver.has_arrived(second)
    assert (first.tensor.tolist(), second.tensor.tolist()) == ([1.0], [2.0, 3.0])


@pytest.mark.parametrize("expected", [1, 3])
def test_a_message_of_another_size_is_an_error_with_both_sizes(pair, expected):
    pair[0].send(torch.zeros(2))

    with pytest.raises(SizesDiffer, match=f"it sent 8 bytes, expected {4 * expected}"):
        pair[1].has_arrived(pair[1].post(torch.zeros(expected)))


def test_what_was_sent_before_the_end_still_arrives(pair):
    pair[0].send(torch.tensor([7.0]))
    pair[0].close()

    assert read(pair[1], torch.zeros(1)).item() == 7.0
    with pytest.raises(SocketClosed):
        pair[1].has_arrived(pair[1].post(torch.zeros(1)))
    with pytest.raises(SocketClosed):
        pair[1].send(torch.zeros(1))


# ---- in a transport


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as started:
        yield started


def exchange(transport, *tensors):
    """Send tensors to each other; return what came, and how many messages gloo had to carry."""
    peer = 1 - transport.rank
    room = [torch.empty_like(tensor) for tensor in tensors]
    receives = [transport.post_receive(peer, each) for each in room]
    sends = [transport.post_send(peer, tensor + transport.rank) for tensor in tensors]
    by_gloo = sum(hasattr(pending, "work") for pending in transport._open.values())
    for ticket in (*receives, *sends):
        transport.wait(ticket)
    return [each[0].item() for each in room], by_gloo


def small_and_large(rank, has_door=True, is_direct=True):
    before = tempfile.tempdir
    tempfile.tempdir = before if has_door or rank == 0 else "/nowhere"
    try:
        transport = TorchTransport(deadline_s=PATIENCE_S, is_direct=is_direct)
    finally:
        tempfile.tempdir = before
    tensors = [torch.full((size,), 10.0 * number) for number, size in enumerate((1, LARGE, SMALL, LARGE, 2))]
    found = exchange(transport, *tensors)
    transport.close()
    return found


def test_small_messages_go_past_gloo_and_large_ones_do_not(pool):
    assert pool.run(small_and_large) == [([1.0, 11.0, 21.0, 31.0, 41.0], 4), ([0.0, 10.0, 20.0, 30.0, 40.0], 4)]


@pytest.mark.parametrize("how", [(False, True), (True, False)], ids=["no socket file", "not wanted"])
def test_a_rank_without_direct_sockets_stays_with_gloo(pool, how):
    assert [by_gloo for _, by_gloo in pool.run(small_and_large, *how)] == [10, 10]


def send_and_look(rank):
    transport = TorchTransport(deadline_s=PATIENCE_S)
    found = None
    if rank == 0:
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        ticket = transport.post_send(1, tensor)
        del tensor
        gc.collect()
        found = ticket.is_over, alive() is not None
        transport.wait(ticket)
    transport.all_gather_object("looked")
    if rank == 1:
        transport.wait(transport.post_receive(0, torch.zeros(3)))
    transport.all_gather_object("received")
    transport.close()
    return found


def test_a_small_tensor_has_left_and_is_let_go_of_before_the_peer_takes_it(pool):
    assert pool.run(send_and_look)[0] == (True, False)


def other_size(rank):
    transport = TorchTransport(deadline_s=PATIENCE_S)
    message = ""
    if rank == 0:
        transport.wait(transport.post_send(1, torch.zeros(2)))
    else:
        ticket = transport.post_receive(0, torch.zeros(3))
        try:
            transport.wait(ticket)
        except PipelineError as error:
            message = str(error)
    transport.all_gather_object("over")
    transport.close()
    return message


def test_ends_that_disagree_on_a_size_say_so(pool):
    assert pool.run(other_size)[1] == "rank 1: message of rank 0: it sent 8 bytes, expected 12"
