"""Memory that two ranks share: where messages lie, what is used again, and that it ends with its processes."""

import os
import resource
import socket
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.execute.transport import shared_memory
from penstock.execute.transport.shared_memory import ALIGNMENT, NOTE, SharedMemory


@pytest.fixture
def connections():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for connection in ends:
        connection.close()


@pytest.fixture
def pair(connections):
    """Both ends, of which the first one has made the memory."""
    file = shared_memory.make_memory()
    yield [SharedMemory(connections[end], file, is_maker=end == 0) for end in (0, 1)]
    os.close(file)


def test_memory_that_a_limit_refuses_leaves_no_file_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            shared_memory.make_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert len(os.listdir("/proc/self/fd")) == before


def test_both_directions_are_there_and_do_not_meet(pair):
    values = [torch.arange(1000.0), -torch.arange(1000.0)]

    for end, value in zip(pair, values, strict=True):
        end.write(value)

    for end, value in zip(reversed(pair), values, strict=True):
        room = torch.empty_like(value)
        assert end.read(room) == value.nbytes
        assert torch.equal(room, value)


def test_a_message_larger_than_the_memory_goes_as_pieces_of_it_are_taken(pair):
    value = torch.arange((shared_memory.ROOM_BYTES + shared_memory.PIECE_BYTES) // 4 + 1, dtype=torch.float32)
    room = torch.zeros_like(value)

    with pytest.raises(BlockingIOError):
        pair[0].write(value)
    with pytest.raises(BlockingIOError):
        pair[1].read(room)
    pair[0].write(value)
    pair[0].write(torch.tensor([5.0]))

    assert pair[1].read(room) == value.nbytes
    assert torch.equal(room, value)
    assert pair[1].read(room[:1]) == 4
    assert room[0] == 5.0


def test_a_message_of_another_size_is_not_copied(pair):
    room = torch.zeros(2)

    pair[0].write(torch.ones(3))

    assert pair[1].read(room) == 12
    assert room.tolist() == [0.0, 0.0]


def test_once_everything_was_taken_the_same_memory_is_used_again(pair):
    value, begins = torch.ones(1000), []
    for _ in range(3):
        pair[0].write(value)
        begins.append(pair[0]._room._under_way[-1].start)
        pair[1].read(torch.empty_like(value))

    assert begins == [0, 0, 0]


def test_what_a_full_connection_refuses_takes_no_room(pair):
    """Places are told in packets; without room for another one, nothing must have changed."""
    num_written = 0
    with suppress(BlockingIOError):
        while num_written < shared_memory.ROOM_BYTES // ALIGNMENT:
            pair[0].write(torch.ones(1))
            num_written += 1

    assert 0 < num_written < shared_memory.ROOM_BYTES // ALIGNMENT
    assert len(pair[0]._room._under_way) == num_written


def test_messages_that_wait_end_with_the_peer(pair, connections):
    value = torch.ones(shared_memory.PIECE_BYTES, dtype=torch.uint8)
    for _ in range(shared_memory.ROOM_BYTES // shared_memory.PIECE_BYTES):
        pair[0].write(value)
    connections[1].close()

    with pytest.raises(BrokenPipeError, match="closed"):
        pair[0].write_when_there_is_room(value)


@given(num_bytes=st.integers(1, 40).map(lambda lines: lines * ALIGNMENT), data=st.data())
def test_messages_under_way_never_overlap_and_an_empty_room_refuses_none(num_bytes, data):
    room, under_way, num_taken = shared_memory._Room(num_bytes), [], 0
    for size in data.draw(st.lists(st.integers(1, num_bytes), max_size=60)):
        num_now = data.draw(st.integers(0, len(under_way)))
        del under_way[:num_now]
        num_taken += num_now
        begin = room.find(size, num_taken)
        assert begin is not None or under_way
        if begin is not None:
            room.take(begin, size)
            assert 0 <= begin <= num_bytes - size
            assert all(begin + size <= other.start or other.stop <= begin for other in under_way)
            under_way.append(range(begin, begin + size))


def test_notes_hold_places_beyond_four_gigabytes():
    assert NOTE.unpack(NOTE.pack(2**40, 2**33, 2**34)) == (2**40, 2**33, 2**34)
