"""Messages between devices that go by their hosts fill their tensors once they are waited for."""

import gc
from weakref import ref

import torch

from penstock.execute.transport.host_messages import HostMessages
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.protocol import Tag
from penstock.ir.transports import COALESCED
from tests.support.local_pipelines import on_ranks


def test_a_message_fills_its_own_tensor_when_it_is_waited_for():
    def case(transport):
        messages = HostMessages(transport)
        if transport.rank == 0:
            tickets = [messages.post_send(1, torch.full((2,), number, dtype=torch.float64)) for number in (1.0, 2.0)]
            for ticket in tickets:
                messages.wait(ticket)
            return None
        first, second = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        tickets = messages.post_receive(0, first), messages.post_receive(0, second)
        messages.begin_group()
        messages.end_group()
        messages.wait(tickets[0])
        before = second.tolist()
        messages.wait(tickets[1])
        return first.tolist(), before, second.tolist()

    assert on_ranks(2, case)[1] == ([1.0, 1.0], [0.0, 0.0], [2.0, 2.0])


def test_they_travel_apart_from_the_messages_of_devices():
    def case(transport):
        messages = HostMessages(transport)
        if transport.rank == 0:
            messages.wait(messages.post_send(1, torch.ones(1)))
            return None
        received = torch.zeros(1)
        transport.wait(transport.post_receive(0, received, Tag.CONTROL))
        return received.item()

    assert on_ranks(2, case)[1] == 1.0


def test_a_failure_frees_the_tensors_of_receives_that_nobody_has_waited_for():
    messenger = Messenger(LocalTransport.create(2, 1.0)[0], torch.device("cuda"), model=COALESCED)
    messenger.begin("a layout")
    tensor = torch.zeros(1)
    messenger.receiver.carrier.post_receive(1, tensor)
    tensor_ref = ref(tensor)
    del tensor

    messenger.reset()

    gc.collect()
    assert tensor_ref() is None
