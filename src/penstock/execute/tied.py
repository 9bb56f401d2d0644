"""Tied parameters: one parameter that several stages hold, as one object on a rank and as copies on several ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.execute.transport.protocol import Transport


@dataclass(slots=True, eq=False)
class TiedCopy:
    """This rank's copy of a parameter that other ranks hold too.

    `ranks` are all holders, the owner first. Every holder ends a step with the same gradient, bit for bit: the sum of
    all contributions in the order of `ranks`, on top of what was accumulated before the step.
    """

    parameter: nn.Parameter
    ranks: Sequence[int]
    before: Tensor | None = None
    """The gradient accumulated before this step, which has been reduced already."""

    def share_value(self, transport: Transport) -> None:
        """Copy the owner's value to all other holders."""
        owner = self.ranks[0]
        value = self.parameter.detach()
        if transport.rank != owner:
            received = torch.empty_like(value, memory_format=torch.contiguous_format)
            transport.wait(transport.post_receive(owner, received))
            value.copy_(received)
            return
        for ticket in [transport.post_send(peer, value) for peer in self.ranks[1:]]:
            transport.wait(ticket)

    def begin_step(self) -> None:
        """Set the accumulated gradient aside, so that only this step's part is reduced."""
        if not self.parameter.requires_grad:
            return
        self.before = self.parameter.grad
        self.parameter.grad = None

    def reduce(self, transport: Transport) -> None:
        """Sum this step's gradients over all holders; a frozen parameter has none."""
        if not self.parameter.requires_grad:
            return
        mine = self.parameter.grad
        own = torch.zeros_like(self.parameter, memory_format=torch.contiguous_format) if mine is None else mine
        peers = [rank for rank in self.ranks if rank != transport.rank]
        sends = [transport.post_send(peer, own) for peer in peers]
        parts = {transport.rank: own}
        parts |= {peer: torch.empty_like(own, memory_format=torch.contiguous_format) for peer in peers}
        receives = [transport.post_receive(peer, parts[peer]) for peer in peers]
        for ticket in (*receives, *sends):
            transport.wait(ticket)
        total = parts[self.ranks[0]].clone()
        for rank in self.ranks[1:]:
            total += parts[rank]
        self.parameter.grad = total if self.before is None else self.before + total
        self.before = None

    def end_step(self) -> None:
        """Give back what was set aside if the step failed before the reduction."""
        if self.before is not None:
            self.parameter.grad = self.before
            self.before = None


def agree_on_copies(transport: Transport, copies: Mapping[int, TiedCopy]) -> None:
    """Make sure that all holders of a tied parameter hold the same kind of tensor; a collective over all ranks.

    Raises:
        PartitionError: on every rank alike, naming the ranks and what differs.
    """
    mine = {str(group): _describe(copy.parameter) for group, copy in copies.items()}
    everyone = transport.all_gather_object(mine)
    first: dict[str, tuple[int, object]] = {}
    for rank, described in enumerate(everyone):
        for group, text in described.items() if isinstance(described, dict) else ():
            owner, expected = first.setdefault(group, (rank, text))
            if text != expected:
                raise PartitionError(
                    f"a tied parameter is {expected} on rank {owner}, but {text} on rank {rank}; tie parameters of one "
                    "shape and type, all trained or all frozen"
                )


def _describe(parameter: nn.Parameter) -> str:
    state = "trained" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}, {state}"
