"""Messages between stages: trees of tensors on the transport's channels, with shapes agreed once and checked after.

The first time that a batch layout runs, a forward message is preceded by a header that describes it, and receives are
taken from their channel when they are needed. From then on both ends know every shape: receives are posted ahead, and a
sender whose tensors differ fails at once, naming the action. Scalars then have a message of their own beside the
tensors. With variable shapes, headers stay.

Where devices launch messages in groups, over one communicator for both directions, steps with headers go from host to
host: a group is launched as a whole, so its shapes must be known, and a receive may depend on a send of its own group.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.execute.accelerator import is_queued
from penstock.execute.transport.agreed_layouts import AgreedLayouts, PassKey
from penstock.execute.transport.device_queue import DeviceQueue, device_queue_of
from penstock.execute.transport.headers import header_of, receive_header, stored_tensors, tensors_of
from penstock.execute.transport.host_messages import HostMessages
from penstock.execute.transport.protocol import Messages, Ticket
from penstock.execute.transport.ready_tags import ReadyTags
from penstock.execute.values.layouts import Layout, require_plain
from penstock.execute.values.tensors import empty_in_order, stored
from penstock.execute.values.tree import flatten
from penstock.execute.values.version_guard import VersionGuard
from penstock.ir.transports import COALESCED, POSTED, RENDEZVOUS, TransportModel

_NO_KEY = (-1, 0, 0)
"""Key of messages that no stage takes."""


@dataclass(slots=True, eq=False)
class _OutgoingMessage:
    """A message that had not left when it was posted."""

    number: int
    """Index of the message among those of the step to this peer."""
    tickets: list[Ticket]
    outputs: VersionGuard
    """Guard of the stage's outputs that the tickets carry."""
    key: PassKey


@dataclass(slots=True, eq=False)
class Incoming:
    """A message that this rank waits for."""

    peer: int
    key: PassKey
    is_forward: bool
    layout: Layout | None = None
    is_posted: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    numbers: Tensor | None = None
    """Scalars of the tree, where they are not in a header."""


class Messenger:
    """The trees that one rank sends and receives; `begin` before a step, `finish` after it."""

    def __init__(
        self,
        transport: Messages,
        device: torch.device,
        *,
        has_variable_shapes: bool = False,
        model: TransportModel = POSTED,
    ) -> None:
        """`model` says how messages travel: posted one by one, in groups, or each when its receive is posted."""
        self.layouts = AgreedLayouts(transport.rank, has_variable_shapes=has_variable_shapes)
        self.sender = Sender(transport, device, self.layouts)
        self.receiver = Receiver(transport, device, self.layouts)
        self.launches_groups = model == COALESCED
        self._by_hosts = HostMessages(transport) if self.launches_groups and is_queued(device) else None
        """Carries the messages of steps with headers; None where the transport does."""
        if model == RENDEZVOUS:
            self.sender.ready_tags = self.receiver.ready_tags = ReadyTags(transport)
        self.transport = transport
        """The transport itself, for other messages on the same channels."""
        self._device_queue = device_queue_of(transport)

    def begin(self, signature: str, kinds: Sequence[str] = (), *, follows: bool = False) -> None:
        """Start a step with a batch of this layout; every rank passes the same signature and kinds of microbatches.

        Where it `follows`, a device waits for received tensors by itself, if the transport can let it.
        """
        self.layouts.begin(signature, kinds)
        carrier: Messages = self.transport
        if self._by_hosts is not None and not self.layouts.is_static:
            carrier, follows = self._by_hosts, False
        self.sender.carrier = self.receiver.carrier = carrier
        self.sender.device_queue = self.receiver.device_queue = self._device_queue if follows else None

    def begin_group(self) -> None:
        """Begin a group, in a step whose shapes are known; in another one its messages go one by one."""
        if self.layouts.is_static:
            self.transport.begin_group()

    def end_group(self) -> None:
        """Launch the group."""
        if self.layouts.is_static:
            self.transport.end_group()

    def finish(self) -> None:
        """Wait until everything is received and sent; from now on this batch layout is known."""
        if self._device_queue is not None and (self.receiver.device_queue is not None or self.launches_groups):
            self._device_queue.settle()
        self.sender.finish()
        self.layouts.finish()

    def reset(self) -> None:
        """Forget all messages and agreements, as after a failure."""
        for part in (self.layouts, self.sender, self.receiver):
            part.forget()
        if self._by_hosts is not None:
            self._by_hosts.forget()


class Sender:
    """Sends the trees of one rank."""

    def __init__(self, transport: Messages, device: torch.device, layouts: AgreedLayouts) -> None:
        self.carrier = transport
        """The transport, or what takes its place in a step."""
        self._device = device
        self._layouts = layouts
        self._num_sent: dict[int, int] = {}
        """Number of messages of this step, by peer."""
        self._leaving: dict[int, deque[_OutgoingMessage]] = {}
        """Messages that may not have arrived yet, by peer."""
        self.ready_tags: ReadyTags | None = None
        """Where a send waits for its receive."""
        self.device_queue: DeviceQueue | None = None
        """Queue of the device, in a step whose receives devices wait for; None in others."""
        self.forget()

    def forget(self) -> None:
        """Forget all messages."""
        peers = range(self.carrier.num_ranks)
        self._num_sent = dict.fromkeys(peers, 0)
        self._leaving = {peer: deque() for peer in peers}
        if self.ready_tags is not None:
            self.ready_tags.forget()

    def finish(self) -> None:
        """Wait until everything is sent."""
        self.device_queue = None  # from here on the host waits
        for peer, num_sent in self._num_sent.items():
            self.release(peer, num_sent)
            self._num_sent[peer] = 0
        if self.ready_tags is not None:
            self.ready_tags.finish()

    def send_forward(self, peer: int, key: PassKey, outputs: Any) -> None:
        """Send a stage's outputs, which `AgreedLayouts.note_outputs` has found to be what the ranks agreed on.

        Raises:
            PipelineError: they hold something that cannot travel.
        """
        if not self._layouts.is_static:
            self.send_described(peer, outputs, key)
            return
        layout, leaves = self._layouts.produced[key], flatten(outputs)[0]
        tensors = tensors_of(leaves)
        for tensor in tensors:  # a layer may return other kinds than in the step that agreed on them
            require_plain(tensor, "an output")
        parts = [stored(tensor, info.order) for tensor, info in zip(tensors, layout.tensors, strict=True)]
        if layout.numbers:  # the receiver posts them in front
            parts.insert(0, layout.written_numbers(leaves).to(self._device))
        self._send(peer, parts, key)

    def send_described(self, peer: int, tree: Any, key: PassKey = _NO_KEY) -> None:
        """Send a tree behind a header that describes it."""
        self._send(peer, [*(part.to(self._device) for part in header_of(tree)), *stored_tensors(tree)], key)

    def send_backward(self, peer: int, gradients: Sequence[Tensor], key: PassKey = _NO_KEY) -> None:
        """Send the gradients of a stage's inputs; the other end knows their shapes from its outputs.

        Where the inputs of `key` lie in memory in an order of their own, so do these on the other end.
        """
        layout = self._layouts.received.get(key)
        if layout is not None and layout.has_orders:
            gradient_infos = zip(gradients, layout.needing_gradient, strict=True)
            gradients = [stored(gradient, info.order) for gradient, info in gradient_infos]
        self._send(peer, gradients, key)

    def release(self, peer: int, num_messages: int) -> None:
        """Let go of the first messages of this step to a peer, which its host has used.

        Where devices wait for receives, a host is ahead of its device, so only messages that have left are let go.

        Raises:
            PipelineError: if an output was changed in place on its way.
        """
        # A send counts messages also where it left at once, so numbers may be missing here, but they rise.
        leaving = self._leaving[peer]
        while leaving and leaving[0].number < num_messages and self._has_left(leaving[0]):
            message = leaving.popleft()
            for ticket in message.tickets:
                self.carrier.wait(ticket)
            stage, microbatch, _ = message.key
            message.outputs.checked(f"stage {stage}, microbatch {microbatch}")

    def _has_left(self, message: _OutgoingMessage) -> bool:
        return self.device_queue is None or all(map(self.device_queue.has_left, message.tickets))

    def _send(self, peer: int, tensors: Sequence[Tensor], key: PassKey) -> None:
        if self.ready_tags is not None and self._layouts.is_static and key != _NO_KEY:
            self.ready_tags.await_receive(peer)
        # The transport keeps the tensors until their tickets have been waited for.
        tickets = []
        for tensor in tensors:  # no comprehension, which is one more frame before Python 3.12
            tickets.append(self.carrier.post_send(peer, tensor))
        number = self._num_sent[peer]
        self._num_sent[peer] = number + 1
        open_tickets = [ticket for ticket in tickets if not ticket.is_over]
        if open_tickets:
            # Tensors that need a gradient have no guard: one may be a parameter, which the optimizer changes later.
            posted = zip(tickets, tensors, strict=True)
            guarded_tensors = [tensor for ticket, tensor in posted if not (ticket.is_over or tensor.requires_grad)]
            self._leaving[peer].append(_OutgoingMessage(number, open_tickets, VersionGuard.of(guarded_tensors), key))


class Receiver:
    """Receives the trees of one rank."""

    def __init__(self, transport: Messages, device: torch.device, layouts: AgreedLayouts) -> None:
        self.carrier = transport
        """The transport, or what takes its place in a step."""
        self._device = device
        self._layouts = layouts
        self.ready_tags: ReadyTags | None = None
        """Where a send waits for its receive."""
        self.device_queue: DeviceQueue | None = None
        """Queue of the device, in a step whose receives it waits for; None in others."""
        self._unposted: dict[int, deque[Incoming]] = {}
        """Receives that are due but of a shape that is not known yet, by peer, in the order of the channel."""
        self.forget()

    def forget(self) -> None:
        """Forget all messages."""
        self._unposted = {peer: deque() for peer in range(self.carrier.num_ranks)}

    def post_forward(self, peer: int, key: PassKey) -> Incoming:
        """Post the receive of a stage's inputs."""
        return self._post(Incoming(peer, key, True, self._layouts.received.get(key)))

    def post_backward(self, peer: int, key: PassKey) -> Incoming:
        """Post the receive of the gradients of a stage's outputs."""
        return self._post(Incoming(peer, key, False, self._layouts.produced.get(key)))

    def post_waiting(self, peer: int) -> None:
        """Take all messages whose receives are due from their channel, because the next message is not a stage's."""
        unposted_receives = self._unposted[peer]
        while unposted_receives:
            self._resolve(unposted_receives.popleft())

    def take_tree(self, incoming: Incoming) -> Any:
        """Wait for a stage's inputs; tensors that need a gradient are leaves."""
        self._arrive(incoming)
        layout, tensors = incoming.layout, incoming.tensors
        assert layout is not None
        if layout.only_tensor is not None:
            return tensors[0].requires_grad_(layout.only_tensor.requires_grad)
        for tensor, info in zip(tensors, layout.tensors, strict=True):
            if info.requires_grad:
                tensor.requires_grad_()
        if incoming.numbers is not None:
            layout = layout.with_numbers(incoming.numbers)
        return layout.fill(tensors)

    def take_gradients(self, incoming: Incoming) -> list[Tensor]:
        """Wait for the gradients of a stage's outputs."""
        self._arrive(incoming)
        return incoming.tensors

    def receive_described(self, peer: int) -> Any:
        """Wait for what `send_described` sends; no other message of the peer may be under way."""
        layout = receive_header(self.carrier, peer, self._device)
        incoming = Incoming(peer, _NO_KEY, True, layout)
        self._post_tensors(incoming, layout)
        return self.take_tree(incoming)

    def _arrive(self, incoming: Incoming) -> None:
        # A header that comes belongs to the first receive that waits, so all receives before this one come first.
        unposted_receives = self._unposted[incoming.peer]
        while not incoming.is_posted:
            self._resolve(unposted_receives.popleft())
        tickets = iter(incoming.tickets)
        if incoming.numbers is not None:
            self.carrier.wait(next(tickets))  # the host itself reads the numbers
        await_ticket = self.carrier.wait if self.device_queue is None else self.device_queue.follow
        for ticket in tickets:
            await_ticket(ticket)

    def _post(self, incoming: Incoming) -> Incoming:
        unposted_receives = self._unposted[incoming.peer]
        # Behind a message of unknown shape nothing can be posted: a channel delivers in order.
        if unposted_receives or not self._layouts.is_static or incoming.layout is None:
            unposted_receives.append(incoming)
        else:
            if incoming.is_forward and incoming.layout.numbers:
                num_bytes = incoming.layout.bytes_of_numbers
                incoming.numbers = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                incoming.tickets.append(self.carrier.post_receive(incoming.peer, incoming.numbers))
            self._post_tensors(incoming, incoming.layout)
            if self.ready_tags is not None:
                self.ready_tags.note_receive(incoming.peer)
        return incoming

    def _resolve(self, incoming: Incoming) -> None:
        if incoming.is_forward:
            incoming.layout = receive_header(self.carrier, incoming.peer, self._device)
            self._layouts.received[incoming.key] = incoming.layout
        elif incoming.layout is None:
            # It was due before the first forward had run. That has run by now: a peer needs outputs for a gradient.
            incoming.layout = self._layouts.produced[incoming.key]
        self._post_tensors(incoming, incoming.layout)

    def _post_tensors(self, incoming: Incoming, layout: Layout) -> None:
        for info in layout.tensors if incoming.is_forward else layout.needing_gradient:
            tensor = empty_in_order(info.shape, info.order, dtype=info.dtype, device=self._device)
            incoming.tensors.append(tensor)
            incoming.tickets.append(self.carrier.post_receive(incoming.peer, stored(tensor, info.order)))
        incoming.is_posted = True
