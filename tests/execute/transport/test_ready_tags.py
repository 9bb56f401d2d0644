"""A send waits until its receive is posted, and the n-th tag is for the n-th message."""

import threading
from unittest.mock import Mock

import torch

from penstock.errors import DeadlineExceeded
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.ready_tags import ReadyTags
from penstock.ir.transports import RENDEZVOUS
from tests.support.local_pipelines import error_of, on_ranks, values

KEY = (1, 0, 0)


def test_a_send_waits_for_the_receive_of_its_peer():
    is_posted = threading.Event()

    def case(transport):
        tags = ReadyTags(transport)
        if transport.rank == 1:
            is_posted.wait(10)
            tags.note_receive(0)
            tags.finish()
            return None
        waits = threading.Timer(0.2, is_posted.set)
        waits.start()
        tags.await_receive(1)
        return is_posted.is_set()

    assert on_ranks(2, case) == [True, None]


def test_a_receive_that_is_never_posted_ends_the_send_at_the_deadline():
    first, _ = LocalTransport.create(2, 0.2)

    error = error_of(ReadyTags(first).await_receive, 1)

    assert type(error) is DeadlineExceeded
    assert error.peer == 1


def test_a_step_with_headers_has_no_tags_and_later_ones_have_one_a_message():
    def case(transport):
        messenger = Messenger(transport, torch.device("cpu"), model=RENDEZVOUS)
        tags = messenger.sender.ready_tags = messenger.receiver.ready_tags = Mock(wraps=ReadyTags(transport))
        tree = values(0, 2, 3)
        for _ in range(2):
            messenger.begin("batch")
            if transport.rank == 0:
                messenger.layouts.note_outputs(KEY, tree, "0F0")
                messenger.sender.send_forward(1, KEY, tree)
            else:
                messenger.receiver.take_tree(messenger.receiver.post_forward(0, KEY))
            messenger.finish()
        return tags.await_receive.call_count, tags.note_receive.call_count

    assert on_ranks(2, case) == [(1, 0), (0, 1)]
