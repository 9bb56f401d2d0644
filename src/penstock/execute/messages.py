"""Messages between stages: trees of tensors on the transport's channels, with shapes agreed once and checked after.

The first time that a batch layout runs, a forward message is preceded by a header that describes it, and receives are
taken from their channel when they are needed. From then on both ends know every shape: receives are posted ahead, and a
sender whose tensors differ fails at once, naming the action. With variable shapes, headers stay.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.memory_order import empty_in_order, memory_order, stored
from penstock.execute.transport.protocol import Ticket, Transport
from penstock.execute.tree import LEAF, Layout, TensorInfo, decode_layout, encode_layout, flatten

Key = tuple[int, int, int]
"""Stage, microbatch, slice."""
_NO_KEY = (0, 0, 0)
"""Of messages that no stage takes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A layout, and what is asked of it for every message, so that it is worked out once."""

    layout: Layout
    tensors: tuple[TensorInfo, ...]
    needing_gradient: tuple[TensorInfo, ...]
    lone: TensorInfo | None
    """Of a tree that is one tensor."""
    has_orders: bool
    """Whether a tensor lies in memory in an order of its own."""

    @classmethod
    def of(cls, layout: Layout) -> "_Known":
        tensors = layout.tensors
        lone = tensors[0] if layout.spec == LEAF and tensors else None
        needing_gradient = tuple(info for info in tensors if info.requires_grad)
        return cls(layout, tensors, needing_gradient, lone, layout.has_orders)

    def is_lone(self, value: Any) -> bool:
        """Whether a value is a tensor as agreed; False says nothing of other trees."""
        lone = self.lone
        return (
            lone is not None
            and isinstance(value, Tensor)
            and value.shape == lone.shape
            and value.dtype is lone.dtype
            and value.requires_grad is lone.requires_grad
        )


@dataclass(slots=True, eq=False)
class _Leaving:
    """A message that had not left when it was posted."""

    number: int
    """Counts the messages of the step to this peer, from 0."""
    tickets: list[Ticket]


@dataclass(slots=True, eq=False)
class Incoming:
    """A message that this rank waits for."""

    peer: int
    key: Key
    is_forward: bool
    known: _Known | None = None
    is_posted: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)


_Layouts = dict[Key, _Known]


class Messenger:
    """Sends and receives the trees of one rank; `begin` before a step, `finish` after it."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        *,
        has_variable_shapes: bool = False,
    ) -> None:
        self._transport = transport
        self._device = device
        self._has_variable_shapes = has_variable_shapes
        self._agreed: dict[str, tuple[_Layouts, _Layouts]] = {}
        self._num_sent: dict[int, int] = {}
        self._leaving: dict[int, deque[_Leaving]] = {}
        self._lazy: dict[int, deque[Incoming]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all messages and agreements, as after a failure."""
        self._agreed.clear()
        peers = range(self._transport.num_ranks)
        self._num_sent = dict.fromkeys(peers, 0)
        self._leaving = {peer: deque() for peer in peers}
        self._lazy = {peer: deque() for peer in peers}
        self._signature = ""
        self._is_static = False
        self._received: _Layouts = {}
        self._produced: _Layouts = {}

    def begin(self, signature: str) -> None:
        """Start a step with a batch of this layout; every rank passes the same signature."""
        self._signature = signature
        agreed = self._agreed.get(signature)
        self._is_static = agreed is not None and not self._has_variable_shapes
        self._received, self._produced = agreed if self._is_static and agreed else ({}, {})

    def finish(self) -> None:
        """Wait until everything is sent; from now on this batch layout is known."""
        for peer, num_sent in self._num_sent.items():
            self.release(peer, num_sent)
            self._num_sent[peer] = 0
        self._agreed[self._signature] = (self._received, self._produced)

    def send_forward(self, peer: int, key: Key, outputs: Any) -> None:
        """Send a stage's outputs.

        Raises:
            PipelineError: if they differ from what the ranks agreed on; nothing is sent then.
        """
        if self._is_static:
            tensors = zip(_tensors(outputs), self._produced[key].tensors, strict=True)
            self._send(peer, [stored(tensor, info.order) for tensor, info in tensors])
        else:
            self.send_described(peer, outputs)

    def send_described(self, peer: int, tree: Any) -> None:
        """Send a tree behind a header that describes it."""
        header = encode_layout(tree)
        opening = [torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        self._send(peer, [*opening, *(stored(tensor, memory_order(tensor)) for tensor in _tensors(tree))])

    def receive_described(self, peer: int) -> Any:
        """Wait for what `send_described` sends; no other message of the peer may be under way."""
        known = self._receive_header(peer)
        incoming = Incoming(peer, _NO_KEY, True, known)
        self._post_tensors(incoming, known)
        return self.take_tree(incoming)

    def send_backward(self, peer: int, gradients: Sequence[Tensor], key: Key = _NO_KEY) -> None:
        """Send the gradients of a stage's inputs; the other end knows their shapes from its outputs.

        Where the inputs of `key` lie in memory in an order of their own, so do these on the other end.
        """
        known = self._received.get(key)
        if known is not None and known.has_orders:
            infos = known.needing_gradient
            gradients = [stored(each, info.order) for each, info in zip(gradients, infos, strict=True)]
        self._send(peer, gradients)

    def release(self, peer: int, num_messages: int) -> None:
        """Let go of the first messages of this step to a peer, which are known to have arrived."""
        leaving = self._leaving[peer]
        while leaving and leaving[0].number < num_messages:
            for ticket in leaving.popleft().tickets:
                self._transport.wait(ticket)

    def note_outputs(self, key: Key, outputs: Any, action: str) -> None:
        """Remember, or check, what a stage produced."""
        known = self._produced.get(key)
        if known is not None and known.is_lone(outputs):
            return
        leaves, spec = flatten(outputs)
        found = Layout(spec, tuple(TensorInfo.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if known is None:
            known = self._produced[key] = _Known.of(found)
        expected = known.layout
        if found != expected:
            raise PipelineError(
                f"{action}: the output is {_text(found)}, but the ranks agreed on {_text(expected)} for batches of "
                "this layout. Return the same shapes for equal batches, or create the pipeline with "
                "variable_shapes=True",
                rank=self._transport.rank,
                instruction=action,
            )

    def output_bytes(self) -> dict[int, int]:
        """Return, per stage of this rank but a last one, the bytes of its largest output in this step."""
        found: dict[int, int] = {}
        for (stage, _, _), known in self._produced.items():
            found[stage] = max(found.get(stage, 0), known.layout.num_bytes)
        return found

    def post_forward(self, peer: int, key: Key) -> Incoming:
        """Post the receive of a stage's inputs."""
        return self._post(Incoming(peer, key, True, self._received.get(key)))

    def post_backward(self, peer: int, key: Key) -> Incoming:
        """Post the receive of the gradients of a stage's outputs."""
        return self._post(Incoming(peer, key, False, self._produced.get(key)))

    def take_tree(self, incoming: Incoming) -> Any:
        """Wait for a stage's inputs; tensors that need a gradient are leaves."""
        self._arrive(incoming)
        known, tensors = incoming.known, incoming.tensors
        assert known is not None
        for tensor, info in zip(tensors, known.tensors, strict=True):
            if info.requires_grad:
                tensor.requires_grad_()
        return tensors[0] if known.lone is not None else known.layout.fill(tensors)

    def take_gradients(self, incoming: Incoming) -> list[Tensor]:
        """Wait for the gradients of a stage's outputs."""
        self._arrive(incoming)
        return incoming.tensors

    def _arrive(self, incoming: Incoming) -> None:
        waiting = self._lazy[incoming.peer]
        while not incoming.is_posted:
            self._resolve(waiting.popleft())
        for ticket in incoming.tickets:
            self._transport.wait(ticket)

    def _post(self, incoming: Incoming) -> Incoming:
        waiting = self._lazy[incoming.peer]
        # Behind a message of unknown shape nothing can be posted: a channel delivers in order.
        if waiting or not self._is_static or incoming.known is None:
            waiting.append(incoming)
        else:
            self._post_tensors(incoming, incoming.known)
        return incoming

    def _resolve(self, incoming: Incoming) -> None:
        if incoming.is_forward:
            incoming.known = self._received[incoming.key] = self._receive_header(incoming.peer)
        elif incoming.known is None:
            incoming.known = self._produced[incoming.key]
        self._post_tensors(incoming, incoming.known)

    def _receive_header(self, peer: int) -> _Known:
        length = torch.zeros(1, dtype=torch.int64)
        self._transport.wait(self._transport.post_receive(peer, length))
        header = torch.empty(int(length), dtype=torch.uint8)
        self._transport.wait(self._transport.post_receive(peer, header))
        return _Known.of(decode_layout(header.numpy().tobytes()))

    def _post_tensors(self, incoming: Incoming, known: _Known) -> None:
        for info in known.tensors if incoming.is_forward else known.needing_gradient:
            tensor = empty_in_order(info.shape, info.order, dtype=info.dtype, device=self._device)
            incoming.tensors.append(tensor)
            incoming.tickets.append(self._transport.post_receive(incoming.peer, stored(tensor, info.order)))
        incoming.is_posted = True

    def _send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        # The transport keeps the tensors until their tickets have been waited for.
        tickets = [self._transport.post_send(peer, tensor) for tensor in tensors]
        number = self._num_sent[peer]
        self._num_sent[peer] = number + 1
        leaving = [ticket for ticket in tickets if not ticket.is_over]
        if leaving:
            self._leaving[peer].append(_Leaving(number, leaving))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _text(layout: Layout) -> str:
    leaves = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{'' if leaf.requires_grad else ' without gradient'}"
        if isinstance(leaf, TensorInfo)
        else repr(leaf)
        for leaf in layout.leaves
    ]
    return f"{layout.spec.to_text()} with {', '.join(leaves)}"
