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
from penstock.execute.transport.protocol import Ticket, Transport
from penstock.execute.tree import Layout, TensorInfo, decode_layout, encode_layout, flatten

Key = tuple[int, int, int]
"""Stage, microbatch, slice."""
Layouts = dict[Key, Layout]
_NO_KEY = (0, 0, 0)
"""Of messages that no stage takes."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A message that this rank waits for."""

    peer: int
    key: Key
    is_forward: bool
    is_posted: bool = False
    layout: Layout | None = None
    tensors: list[Tensor] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)


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
        self._agreed: dict[str, tuple[Layouts, Layouts]] = {}
        self._sends: dict[int, deque[list[Ticket]]] = {}
        self._num_released: dict[int, int] = {}
        self._lazy: dict[int, deque[Incoming]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all messages and agreements, as after a failure."""
        self._agreed.clear()
        peers = range(self._transport.num_ranks)
        self._sends = {peer: deque() for peer in peers}
        self._num_released = dict.fromkeys(peers, 0)
        self._lazy = {peer: deque() for peer in peers}
        self._signature = ""
        self._is_static = False
        self._received: Layouts = {}
        self._produced: Layouts = {}

    def begin(self, signature: str) -> None:
        """Start a step with a batch of this layout; every rank passes the same signature."""
        self._signature = signature
        agreed = self._agreed.get(signature)
        self._is_static = agreed is not None and not self._has_variable_shapes
        self._received, self._produced = agreed if self._is_static and agreed else ({}, {})

    def finish(self) -> None:
        """Wait until everything is sent; from now on this batch layout is known."""
        for peer, messages in self._sends.items():
            for ticket in (ticket for tickets in messages for ticket in tickets):
                self._transport.wait(ticket)
            messages.clear()
            self._num_released[peer] = 0
        self._agreed[self._signature] = (self._received, self._produced)

    def send_forward(self, peer: int, key: Key, outputs: Any) -> None:
        """Send a stage's outputs.

        Raises:
            PipelineError: if they differ from what the ranks agreed on; nothing is sent then.
        """
        if self._is_static:
            self._send(peer, [tensor.detach() for tensor in _tensors(outputs)])
        else:
            self.send_described(peer, outputs)

    def send_described(self, peer: int, tree: Any) -> None:
        """Send a tree behind a header that describes it."""
        header = encode_layout(tree)
        opening = [torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        self._send(peer, [*opening, *(tensor.detach() for tensor in _tensors(tree))])

    def receive_described(self, peer: int) -> Any:
        """Wait for what `send_described` sends; no other message of the peer may be under way."""
        incoming = Incoming(peer, _NO_KEY, True, layout=self._receive_header(peer))
        assert incoming.layout is not None
        self._post_tensors(incoming, incoming.layout)
        return self.take_tree(incoming)

    def send_backward(self, peer: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a stage's inputs; the other end knows their shapes from its outputs."""
        self._send(peer, gradients)

    def release(self, peer: int, num_messages: int) -> None:
        """Let go of the first messages of this step to a peer, which are known to have arrived."""
        messages = self._sends[peer]
        for _ in range(num_messages - self._num_released[peer]):
            for ticket in messages.popleft():
                self._transport.wait(ticket)
            self._num_released[peer] += 1

    def note_outputs(self, key: Key, outputs: Any, action: str) -> None:
        """Remember, or check, what a stage produced."""
        leaves, spec = flatten(outputs)
        found = Layout(spec, tuple(TensorInfo.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        expected = self._produced.setdefault(key, found)
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
        for (stage, _, _), layout in self._produced.items():
            found[stage] = max(found.get(stage, 0), layout.num_bytes)
        return found

    def post_forward(self, peer: int, key: Key) -> Incoming:
        """Post the receive of a stage's inputs."""
        return self._post(Incoming(peer, key, True, layout=self._received.get(key)))

    def post_backward(self, peer: int, key: Key) -> Incoming:
        """Post the receive of the gradients of a stage's outputs."""
        return self._post(Incoming(peer, key, False, layout=self._produced.get(key)))

    def take_tree(self, incoming: Incoming) -> Any:
        """Wait for a stage's inputs; tensors that need a gradient are leaves."""
        self._arrive(incoming)
        assert incoming.layout is not None
        for tensor, info in zip(incoming.tensors, incoming.layout.tensors, strict=True):
            tensor.requires_grad_(info.requires_grad)
        return incoming.layout.fill(incoming.tensors)

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
        if waiting or not self._is_static or incoming.layout is None:
            waiting.append(incoming)
        else:
            self._post_tensors(incoming, incoming.layout)
        return incoming

    def _resolve(self, incoming: Incoming) -> None:
        if incoming.is_forward:
            incoming.layout = self._received[incoming.key] = self._receive_header(incoming.peer)
        elif incoming.layout is None:
            incoming.layout = self._produced[incoming.key]
        self._post_tensors(incoming, incoming.layout)

    def _receive_header(self, peer: int) -> Layout:
        length = torch.zeros(1, dtype=torch.int64)
        self._transport.wait(self._transport.post_receive(peer, length))
        header = torch.empty(int(length), dtype=torch.uint8)
        self._transport.wait(self._transport.post_receive(peer, header))
        return decode_layout(header.numpy().tobytes())

    def _post_tensors(self, incoming: Incoming, layout: Layout) -> None:
        infos = layout.tensors if incoming.is_forward else tuple(i for i in layout.tensors if i.requires_grad)
        for info in infos:
            tensor = torch.empty(info.shape, dtype=info.dtype, device=self._device)
            incoming.tensors.append(tensor)
            incoming.tickets.append(self._transport.post_receive(incoming.peer, tensor))
        incoming.is_posted = True

    def _send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        # The transport keeps the tensors until their tickets have been waited for.
        self._sends[peer].append([self._transport.post_send(peer, tensor) for tensor in tensors])


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
