"""How ranks of one host connect, which way messages of each size take then, and when there is none."""

import gc
import os
import resource
import socket
import tempfile
import weakref
from contextlib import ExitStack, contextmanager
from itertools import product, starmap
from unittest.mock import Mock

import pytest
import torch

from penstock.execute.control.collectives import Control
from penstock.execute.transport import TorchTransport, rendezvous, shared_memory
from penstock.execute.transport.links import CLOSED
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.rendezvous import MAX_PACKET_BYTES, Listener, SocketKey, connect_all
from penstock.pipeline import Pipeline
from tests.execute.transport.test_sockets import read
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.ranks import run_ranks

MAX_WAIT_S = 20.0
TAGS = (0, 1)
SIZES = (1, MAX_PACKET_BYTES // 4 + 1, MAX_PACKET_BYTES // 4, 2 * shared_memory.ROOM_BYTES // 4 + 1, 0, 2)
"""Of messages in float32 elements: packets, one through memory, one that is larger than it, and one without any."""


@contextmanager
def connected(num_ranks):
    """Connect ranks that are threads; close their sockets at the end."""
    ranks = on_ranks(num_ranks, connect)
    yield ranks
    for sockets in ranks:
        sockets.close()


def connect(wires):
    def exchange(name, value):
        return Control(wires).all_gather_object(value)

    with ExitStack() as stack:
        listener = Listener(stack)
        addresses = exchange("addresses", listener.address_text())
        return connect_all(wires.rank, TAGS, listener, addresses, exchange, MAX_WAIT_S)


def carries(sender, receiver):
    """Whether a value that is sent at one end arrives at the other."""
    value = torch.tensor([3.0])
    sender.send(value)
    return torch.equal(read(receiver, value), value)


@pytest.mark.parametrize("is_shared", [False, True], ids=["packets", "shared memory"])
def test_every_pair_of_ranks_gets_a_socket_for_every_purpose(is_shared):
    with connected(3) as ranks:
        for rank, sockets in enumerate(ranks):
            peers = [peer for peer in range(3) if peer != rank]
            assert set(sockets.by_key) == set(starmap(SocketKey, product(peers, TAGS, (False, True))))
        for way in (way for way in ranks[0].by_key if way.is_shared is is_shared):
            ends = ranks[0].by_key[way], ranks[way.peer].by_key[way._replace(peer=0)]
            assert carries(*ends)
            assert carries(*reversed(ends))


def test_a_system_without_such_memory_has_packets_only(monkeypatch):
    monkeypatch.setattr(shared_memory, "make_memory", Mock(side_effect=AttributeError("memfd_create")))

    with connected(2) as (left, right):
        for sockets, peer in ((left, 1), (right, 0)):
            assert set(sockets.by_key) == {SocketKey(peer, tag, False) for tag in TAGS}
            assert not sockets.is_complete
        assert left.link(1, 0, CLOSED).large is CLOSED


def test_a_listener_is_in_no_folder(monkeypatch, tmp_path):
    """A rank that is killed while it connects leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with ExitStack() as stack:
        listener = Listener(stack)
        assert listener.address.name.startswith("\0")
        assert os.listdir(tmp_path) == []


def test_a_listener_of_another_user_gets_no_connection(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: -1)

    with connected(2) as ranks:
        assert [(sockets.by_key, sockets.is_complete) for sockets in ranks] == [({}, False)] * 2
        assert ranks[0].link(1, 0, CLOSED) is CLOSED


def test_a_peer_of_another_user_is_sent_away_although_it_knows_the_secret(monkeypatch):
    with ExitStack() as stack:
        listener = Listener(stack)
        thief = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        thief.connect(listener.address.name)
        thief.send(rendezvous.HELLO.pack(0, listener.address.secret.encode()))
        sockets = rendezvous._sockets_to_peer(0, 1, TAGS, listener.address, MAX_WAIT_S)
        answers = iter([False, True])
        monkeypatch.setattr(rendezvous, "_is_same_user", lambda connection: next(answers))

        accepted = listener.accept({0: [key._replace(peer=0) for key in sockets]}, MAX_WAIT_S)

    assert carries(sockets[SocketKey(1, 0, False)], accepted[SocketKey(0, 0, False)])
    for each in (*sockets.values(), *accepted.values()):
        each.close()


def test_a_stranger_in_front_of_the_peer_is_sent_away(monkeypatch):
    """Somebody else stands in line in front of the peer: with another secret, and with a greeting cut short."""
    listen = Listener.__init__

    def crowded(listener, stack):
        listen(listener, stack)
        for greeting in (rendezvous.HELLO.pack(0, b"wrong"), b"?"):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stranger.connect(listener.address.name)
            socket.send_fds(stranger, [greeting], [stranger.fileno()])

    monkeypatch.setattr(Listener, "__init__", crowded)

    with connected(2) as (left, right):
        assert carries(left.by_key[1, 0, False], right.by_key[0, 0, False])


def num_open_files():
    gc.collect()  # of what other tests have left, too
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_connections_and_memory_are_gone_once_closed_or_dropped():
    gc.collect()  # what earlier tests have left open
    before, num_ends = num_open_files(), 3 * 2 * len(TAGS)
    with connected(3):
        assert num_open_files() == before + num_ends + 2 * num_ends  # packets; and memory with a socket beside it
    assert num_open_files() == before

    dropped = connected(2)
    dropped.__enter__()
    assert num_open_files() > before
    del dropped
    assert num_open_files() == before


def all_sizes(rank, has_listener=True, is_direct=True):
    """Return what came of messages, how many gloo carried, and how many of its connections there are in the end."""
    with pytest.MonkeyPatch.context() as patch:
        if rank and not has_listener:
            patch.setattr(socket, "AF_UNIX", -1)
        transport = TorchTransport(deadline_s=MAX_WAIT_S, is_direct=is_direct)
    tensors = [torch.full((size,), 10.0 * number) for number, size in enumerate(SIZES)]
    rooms = [torch.empty_like(tensor) for tensor in tensors]
    receives = [transport.post_receive(1 - rank, each) for each in rooms]
    sends = [transport.post_send(1 - rank, tensor + rank) for tensor in tensors]
    by_gloo = sum(hasattr(pending, "work") for pending in transport._open.values())
    for ticket in (*receives, *sends):
        transport.wait(ticket)
    num_backends = [len(transport._backends)]
    transport.recover()
    num_backends.append(len(transport._backends))
    transport.close()
    return [each.double().mean().item() for each in rooms if len(each)], by_gloo, num_backends


VALUES = [[1.0, 11.0, 21.0, 31.0, 51.0], [0.0, 10.0, 20.0, 30.0, 50.0]]


def test_messages_of_every_size_go_past_gloo(two_ranks):
    assert two_ranks.run(all_sizes) == [(values, 0, [0, 0]) for values in VALUES]


@pytest.mark.parametrize(
    ("how", "num_backends"),
    [((False, True), [1, 0]), ((True, False), [1, 1])],  # a recovery makes the listener
    ids=["no listener", "not wanted"],
)
def test_a_rank_without_direct_sockets_stays_with_gloo(two_ranks, how, num_backends):
    expected = [(values, 2 * len(SIZES), num_backends) for values in VALUES]

    assert two_ranks.run(all_sizes, *how) == expected


def on_two_hosts(rank):
    """Rank 2 is on a host of its own: no socket reaches it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(socket, "AF_UNIX", -1)
        transport = TorchTransport(deadline_s=MAX_WAIT_S)
    peers = [peer for peer in range(3) if peer != rank]
    found = []
    for tag in Tag:
        rooms = {peer: torch.zeros(2) for peer in peers}
        receives = {peer: transport.post_receive(peer, rooms[peer], tag) for peer in peers}
        sends = [transport.post_send(peer, torch.full((2,), float(10 * rank + tag)), tag) for peer in peers]
        by_gloo = [peer for peer in peers if hasattr(transport._open[receives[peer].serial], "work")]
        for ticket in (*receives.values(), *sends):
            transport.wait(ticket)
        found.append((by_gloo, [room.tolist() for room in rooms.values()]))
    transport.close()
    return found


@pytest.mark.slow
def test_each_peer_has_the_link_of_its_own_for_every_tag():
    """A rank may have peers on its own host, and others."""
    found = run_ranks(3, on_two_hosts, timeout_s=MAX_WAIT_S)

    for rank, by_tag in enumerate(found):
        peers = [peer for peer in range(3) if peer != rank]
        for tag, (by_gloo, values) in enumerate(by_tag):
            assert by_gloo == [peer for peer in peers if 2 in (rank, peer)]
            assert values == [[10.0 * peer + tag] * 2 for peer in peers]


def send_and_look(rank, size):
    transport = TorchTransport(deadline_s=MAX_WAIT_S)
    found = None
    if rank == 0:
        tensor = torch.ones(size)
        alive = weakref.ref(tensor)
        ticket = transport.post_send(1, tensor)
        del tensor
        gc.collect()
        found = ticket.is_over, alive() is not None
        transport.wait(ticket)
    Control(transport).all_gather_object("looked")
    if rank == 1:
        transport.wait(transport.post_receive(0, torch.zeros(size)))
    Control(transport).all_gather_object("received")
    transport.close()
    return found


def step_under_limit(rank, kind, number):
    """Make a pipeline and run steps whose messages are large, where the system grants less."""
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (number, before[1]))
    try:
        with Pipeline(layers, "1f1b", 2, torch.nn.functional.mse_loss) as pipeline:
            return float(pipeline.step(torch.ones(2048, 64), target=torch.ones(2048, 64)).loss)
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("num_bytes", [0, 30_000, 60_000, 2**20])
def test_a_limit_of_the_size_of_files_leaves_gloo_for_large_messages(two_ranks, num_bytes):
    first, second = two_ranks.run(step_under_limit, resource.RLIMIT_FSIZE, num_bytes)

    assert first == second > 0


@pytest.mark.feature("D2")
@pytest.mark.parametrize("size", SIZES[:2])
def test_a_tensor_has_left_and_is_let_go_of_before_the_peer_takes_it(two_ranks, size):
    assert two_ranks.run(send_and_look, size)[0] == (True, False)


def other_size(rank):
    transport, error = TorchTransport(deadline_s=MAX_WAIT_S), None
    if rank == 0:
        transport.wait(transport.post_send(1, torch.zeros(2)))
    else:
        error = error_of(transport.wait, transport.post_receive(0, torch.zeros(3)))
    Control(transport).all_gather_object("over")
    transport.close()
    return str(error)


def test_ends_that_disagree_on_a_size_say_so(two_ranks):
    assert two_ranks.run(other_size)[1] == "rank 1: message of rank 0: it sent 8 bytes, expected 12"
