"""A BARRIER lets no rank go on before all have come; receives that are due are taken from the channel before it."""

import threading
import time

import torch

from penstock.execute.ops.barriers import exchange_tokens
from penstock.execute.transport.protocol import Tag
from tests.support.local_pipelines import on_ranks


def test_all_ranks_leave_once_the_last_has_come():
    has_come = threading.Event()

    def meet(wires):
        if wires.rank == 2:
            time.sleep(0.02)
            has_come.set()
        exchange_tokens(wires, [peer for peer in range(3) if peer != wires.rank])
        return has_come.is_set()

    assert on_ranks(3, meet) == [True] * 3


def test_a_message_on_the_same_channel_in_front_of_a_barrier_is_not_taken_for_it():
    def meet(wires):
        peer = 1 - wires.rank
        message, sent = torch.zeros(2), torch.full((2,), 3.0)
        receive = wires.post_receive(peer, message, Tag.CONTROL)
        send = wires.post_send(peer, sent, Tag.CONTROL)
        exchange_tokens(wires, [peer])
        wires.wait(receive)
        wires.wait(send)
        return message.tolist()

    assert on_ranks(2, meet) == [[3.0, 3.0]] * 2
