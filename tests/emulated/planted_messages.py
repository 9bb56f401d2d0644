"""Planted faults in the messages between stages: waits, what is held while a message is on its way, communicators.

Each function under `plant` takes what the name stands for, and returns what it stands for with the fault.
"""

import torch

from penstock.execute.transport.backend_links import QueuedMessage
from penstock.execute.transport.device_queue import _FollowedReceive
from penstock.execute.values.layouts import decode_layout
from tests.emulated.checker import FREED, HANG, UNORDERED
from tests.emulated.planting import does_nothing, table

FAULTS, plant = table()
TRANSPORT = "penstock.execute.transport."
NOT_RECEIVED = UNORDERED, "recv from", "addmm"


def _is_data(tensor):
    """Whether a message carries what layers compute; a damaged header would end the step."""
    return tensor.is_floating_point()


# ---- receives that the device waits for


def _followed(queue, ticket, wait):
    message = queue._posted.pop(ticket.serial)
    reached = queue._make_marker()
    reached.record()
    wait(message)
    queue._receives.append(_FollowedReceive(ticket, message, reached, 0))


plant(
    "the stream does not wait for a receive",
    "following",
    f"{TRANSPORT}device_queue:DeviceQueue.follow",
    *NOT_RECEIVED,
    make=lambda original: lambda queue, ticket: _followed(queue, ticket, lambda message: None),
)


@plant("another stream waits for a receive", "following", f"{TRANSPORT}device_queue:DeviceQueue.follow", *NOT_RECEIVED)
def _(original):
    def wait(message):
        with torch.Stream("emu"):
            message.work.wait()

    return lambda queue, ticket: _followed(queue, ticket, wait)


@plant(
    "the stream waits for the receive before", "following", f"{TRANSPORT}device_queue:DeviceQueue.follow", *NOT_RECEIVED
)
def _(original):
    def follow(queue, ticket):
        before = queue._before if hasattr(queue, "_before") else None
        queue._before = queue._posted[ticket.serial]
        _followed(queue, ticket, lambda message: before and before.work.wait())

    return follow


@plant(
    "the stream waits for the first tensor of a message only",
    "several_tensors",
    f"{TRANSPORT}messages:Receiver._arrive",
    UNORDERED,
    "recv from",
    "mul",
)
def _(original):
    def arrive(receiver, incoming):
        if incoming.is_posted and incoming.is_forward:
            incoming.tickets[-1:] = []
        original(receiver, incoming)

    return arrive


@plant(
    "a message counts as used when it was only posted",
    "following",
    f"{TRANSPORT}messages:Sender.release",
    FREED,
    "send to",
    "free",
)
def _(original):
    def release(sender, peer, num_messages):
        leaving = sender._leaving[peer]
        while leaving and leaving[0].number < num_messages:
            for ticket in leaving.popleft().tickets:
                sender._transport._open.pop(ticket.serial, None)

    return release


@plant(
    "whoever asks whether a message has left drops it",
    "forwards_first",
    f"{TRANSPORT}device_queue:DeviceQueue.has_left",
    FREED,
    "send to",
    "free",
)
def _(original):
    def has_left(queue, ticket):
        queue._posted.pop(ticket.serial, None)
        return True

    return has_left


# ---- messages that the host waits for

plant(
    "the host does not wait for a message",
    "host_waits_for_receives",
    f"{TRANSPORT}backend_links:QueuedMessage.wait",
    *NOT_RECEIVED,
    make=lambda original: (
        lambda message, deadline_s: None if _is_data(message.tensor) else original(message, deadline_s)
    ),
)


@plant(
    "a wait for a ticket only forgets it",
    "host_waits_for_receives",
    f"{TRANSPORT}torch_dist:TorchTransport.wait",
    *NOT_RECEIVED,
)
def _(original):
    def wait(transport, ticket, limit_s=None):
        pending = transport._open.get(ticket.serial)
        if isinstance(pending, QueuedMessage) and _is_data(pending.tensor):
            del transport._open[ticket.serial]
        return original(transport, ticket, limit_s)

    return wait


@plant(
    "the transport does not keep what it sends",
    "host_waits_for_receives",
    f"{TRANSPORT}torch_dist:TorchTransport._opened",
    FREED,
    "send to",
    "free",
)
def _(original):
    def opened(transport, ticket, pending):
        original(transport, ticket, pending)
        if isinstance(pending, QueuedMessage) and ticket.is_send:
            del transport._open[ticket.serial]
        return ticket

    return opened


@plant(
    "the transport does not keep what it receives",
    "following",
    f"{TRANSPORT}torch_dist:TorchTransport._opened",
    *NOT_RECEIVED,
)
def _(original):
    def opened(transport, ticket, pending):
        original(transport, ticket, pending)
        if isinstance(pending, QueuedMessage) and not ticket.is_send and _is_data(pending.tensor):
            del transport._open[ticket.serial]
        return ticket

    return opened


@plant(
    "messages are posted on a stream that waits for nothing",
    "following",
    f"{TRANSPORT}backend_links:BackendLink.send",
    UNORDERED,
    "addmm",
    "send to",
)
def _(original):
    def send(link, tensor):
        if not _is_data(tensor):
            return original(link, tensor)
        with torch.Stream("emu"):
            return original(link, tensor)

    return send


@plant(
    "one communicator carries both directions",
    "host_waits_for_receives",
    f"{TRANSPORT}torch_dist:connect_devices",
    HANG,
)
def _(original):
    def connect(*place, **options):
        upward, _, *sums = original(*place, **options)
        return [upward, upward, *sums]

    return connect


@plant("messages arrive in one buffer", "following", f"{TRANSPORT}messages:empty_in_order", *NOT_RECEIVED)
def _(original):
    buffers = {}

    def one_buffer(shape, order, *, dtype, device):
        if device not in buffers:
            buffers[device] = original(shape, order, dtype=dtype, device=device)
        return buffers[device].detach()

    return one_buffer


@plant(
    "messages leave from one buffer",
    "forwards_first",
    f"{TRANSPORT}over_links:written_out",
    UNORDERED,
    "send to",
    "copy",
)
def _(original):
    buffers = {}

    def one_buffer(tensor):
        key = str(tensor.device), tensor.shape, tensor.dtype
        if tensor.device.type == "cpu":
            return original(tensor)
        if key not in buffers:
            buffers[key] = torch.empty_like(tensor)
        return buffers[key].copy_(tensor.detach())

    return one_buffer


@plant(
    "the host reads a header before it is there",
    "variable_shapes",
    f"{TRANSPORT}messages:Receiver._receive_header",
    UNORDERED,
    "recv from",
    "copy to the host",
)
def _(original):
    def receive_header(receiver, peer):
        length = torch.zeros(1, dtype=torch.int64, device=receiver._device)
        receiver._transport.wait(receiver._transport.post_receive(peer, length))
        header = torch.empty(int(length), dtype=torch.uint8, device=receiver._device)
        ticket = receiver._transport.post_receive(peer, header)
        header.cpu()
        receiver._transport.wait(ticket)
        return decode_layout(header.cpu().numpy().tobytes())

    return receive_header


@plant(
    "the host reads the length of a header before it is there",
    "variable_shapes",
    f"{TRANSPORT}messages:Receiver._receive_header",
    UNORDERED,
    "recv from",
    "item",
)
def _(original):
    def receive_header(receiver, peer):
        length = torch.zeros(1, dtype=torch.int64, device=receiver._device)
        ticket = receiver._transport.post_receive(peer, length)
        length.item()
        receiver._transport.wait(ticket)
        header = torch.empty(int(length), dtype=torch.uint8, device=receiver._device)
        receiver._transport.wait(receiver._transport.post_receive(peer, header))
        return decode_layout(header.cpu().numpy().tobytes())

    return receive_header


@plant(
    "an abort leaves messages in the queue, without their tensors",
    "failing",
    f"{TRANSPORT}torch_dist:TorchTransport.abort",
    FREED,
    "recv from",
    "free",
)
def _(original):
    def abort(transport):
        transport._sockets.close()
        transport._forget()

    return abort


# ---- tied parameters

plant(
    "sums of tied gradients are read before they are there",
    "tied_layers",
    "penstock.execute.parameters.gradient_sums:_wait",
    UNORDERED,
    "recv from",
    "add",
    make=does_nothing,
)


@plant(
    "what the holders of a tied parameter have is read before it is there",
    "tied_layers",
    "penstock.execute.parameters.gradient_sums:_exchange",
    UNORDERED,
    "recv from",
    "copy to the host",
)
def _(original):
    def exchange(transport, ranks, parts):
        for rank, theirs in zip(ranks, parts, strict=True):
            own = parts[ranks.index(transport.rank)]
            if rank != transport.rank:
                posted.extend([transport.post_send(rank, tensor) for tensor in own])
                posted.extend([transport.post_receive(rank, tensor) for tensor in theirs])

    posted = []
    return exchange


@plant(
    "a tied parameter takes its owner's value before it is there",
    "tied_layers",
    "penstock.execute.parameters.tied:TiedCopy._take_from_owner",
    UNORDERED,
    "recv from",
    "copy",
)
def _(original):
    def take_from_owner(copy, transport, tensors):
        values = [tensor.detach() for tensor in tensors]
        if transport.rank == copy.ranks[0]:
            return original(copy, transport, values)
        for value in values:
            received = torch.empty_like(value)
            ticket = transport.post_receive(copy.ranks[0], received)
            value.copy_(received)
            transport.wait(ticket)
        return None

    return take_from_owner
