"""The contract of links: every test here runs on packets, shared memory, gloo, and NCCL where there are two GPUs."""

import gc
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from penstock.execute.transport.backend_links import BackendLink, GlooWaiter, QueuedMessage
from penstock.execute.transport.links import CLOSED, BySize, LinkClosed, MessageLate
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.shared_memory import ROOM_BYTES
from penstock.execute.transport.sockets import DirectSocket
from penstock.execute.undocumented_backends import device_backend, gloo, is_timeout
from tests.execute.transport.test_sockets import through_memory

MAX_WAIT_S = 60.0
SOON_S = 30.0
KINDS = ["packets", "shared memory", "gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


class Pair:
    """Both ends of one link, their devices, and what ends one."""

    def __init__(self, kind):
        self.kind = kind
        self.devices = [torch.device("cuda", end) if kind == "nccl" else torch.device("cpu") for end in (0, 1)]
        self.closes = []
        self.ends = SOCKETS[kind](self) if kind in SOCKETS else over_backends(self, kind)

    def close(self, end):
        self.closes[end]()
        self.closes[end] = lambda: None
        self.ends[end] = None  # gloo's sockets close when nobody holds the backend

    def on(self, end, value):
        return torch.as_tensor(value).to(self.devices[end])


def over_sockets(make):
    def ends(pair):
        made = make(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        pair.closes = [end.close for end in made]
        return made

    return ends


SOCKETS = {
    "packets": over_sockets(lambda *connections: [DirectSocket(each) for each in connections]),
    "shared memory": over_sockets(through_memory),
}


def over_backends(pair, kind):
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL connects two GPUs")
    store = dist.HashStore()

    def connect(end):
        if kind == "nccl":
            backend = device_backend(pair.devices[end], store, end, 2, timedelta(seconds=MAX_WAIT_S))
            return backend, QueuedMessage
        return gloo(store, end, 2, MAX_WAIT_S), GlooWaiter().message

    with ThreadPoolExecutor(2) as threads:
        made = [future.result() for future in [threads.submit(connect, end) for end in (0, 1)]]
    pair.closes = [backend.abort for backend, _ in made]
    return [BackendLink(1 - end, Tag.DATA, backend, backend, message) for end, (backend, message) in enumerate(made)]


@pytest.fixture(params=KINDS)
def pair(request):
    made = Pair(request.param)
    yield made
    for end in (0, 1):
        made.close(end)


def wait(*posted):
    for each in posted:
        if each is not None:
            each.wait(MAX_WAIT_S)


VALUES = [
    torch.tensor([True, False, True]),
    torch.tensor([-(2**40), 7]),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(3.25),
    torch.arange(10_000.0),
    torch.zeros(0, 4),
    torch.arange(100_000.0),
]
NOT_CARRIED = {"packets": 100_000, "shared memory": 0}
"""The elements of the value that goes over the other of both, by its size (`BySize`)."""


def test_messages_of_every_type_and_size_arrive_in_the_order_of_posting_both_ways(pair):
    for source in (0, 1):
        sent = [pair.on(source, value) for value in VALUES if value.numel() != NOT_CARRIED.get(pair.kind)]
        received = [torch.zeros_like(value, device=pair.devices[1 - source]) for value in sent]

        arriving = [pair.ends[1 - source].receive(room) for room in received]
        leaving = [pair.ends[source].send(value) for value in sent]
        wait(*reversed(arriving), *leaving)

        assert all(torch.equal(got.cpu(), value.cpu()) for got, value in zip(received, sent, strict=True))


def test_a_tensor_lives_until_it_has_left(pair):
    sent = pair.on(0, torch.full((10_000,), 7.0))
    alive = weakref.ref(sent)
    leaving = pair.ends[0].send(sent)
    del sent
    gc.collect()
    assert leaving is None or alive() is not None or hasattr(leaving, "tensor")
    torch.full((10_000,), -1.0)
    room = torch.zeros(10_000, device=pair.devices[1])

    wait(pair.ends[1].receive(room), leaving)

    assert room.unique().tolist() == [7.0]


def test_a_message_that_does_not_come_ends_the_wait_at_its_limit(pair):
    arriving = pair.ends[1].receive(torch.zeros(1, device=pair.devices[1]))
    begin_s = time.monotonic()

    with pytest.raises(RuntimeError) as caught:
        arriving.wait(0.2)

    assert 0.2 <= time.monotonic() - begin_s < SOON_S
    assert isinstance(caught.value, MessageLate) or is_timeout(caught.value)


def test_a_wait_ends_soon_when_the_peer_has_gone(pair):
    arriving = pair.ends[1].receive(torch.zeros(1, device=pair.devices[1]))
    begin_s = time.monotonic()
    threading.Timer(0.1, pair.close, (0,)).start()

    with pytest.raises(RuntimeError):
        arriving.wait(MAX_WAIT_S)

    assert time.monotonic() - begin_s < SOON_S


@pytest.mark.parametrize(("num_bytes", "is_large"), [(0, False), (64, False), (65, True), (2 * ROOM_BYTES, True)])
def test_size_alone_decides_at_both_ends_which_link_a_message_takes(num_bytes, is_large):
    small, large = links = Mock(), Mock()
    link, tensor = BySize(small, large, 64), torch.empty(num_bytes, dtype=torch.uint8)

    assert link.send(tensor) is links[is_large].send.return_value
    assert link.receive(tensor) is links[is_large].receive.return_value


def test_a_rank_that_has_aborted_has_no_link():
    for post in (CLOSED.send, CLOSED.receive):
        with pytest.raises(LinkClosed, match="this rank has aborted or closed its connections"):
            post(torch.zeros(1))
