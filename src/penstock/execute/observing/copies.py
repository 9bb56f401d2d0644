"""Compares what several ranks hold copies of: tied parameters, and the two copies of a model with two routes.

Each copy is changed by its own rank's optimizer, so copies stay equal only as long as all of them are treated alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.control.copy_digests import TREAT_COPIES_ALIKE
from penstock.execute.observing.log import log_norms
from penstock.execute.observing.observer import Observer
from penstock.execute.parameters.gradient_store import dense_gradient
from penstock.execute.parameters.tied import TiedCopy
from penstock.execute.stages.assemble import Assembly
from penstock.execute.step import Step
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.rank_names import rank_names
from penstock.execute.values.tensors import local_part


@dataclass(eq=False)
class CopyChecks(Observer):
    """Compares the copies of parameters before each step and of gradients after it, whose norms it logs."""

    needs_all_ranks = True

    control: Control
    assembly: Assembly
    gradient_attribute: str

    def begin(self, step: Step) -> None:
        require_equal_copies(self.control.transport, self.assembly.tied_copies)

    def end(self, step: Step, failed: bool) -> None:
        if step.is_training and not failed:
            transport, copies = self.control.transport, self.assembly.tied_copies
            require_equal_copies(transport, copies, self.gradient_attribute)
            log_norms(self.control, step.serial, self.assembly, self.gradient_attribute)


def require_equal_copies(transport: Transport, copies: Mapping[int, TiedCopy], gradient: str = "") -> None:
    """Compare, bit for bit, this rank's copies of parameters with their owners'; all holders call it.

    With the name of an attribute, the gradients accumulated there are compared instead; zeros where there are none.

    Raises:
        PipelineError: on a rank whose copy differs: which parameter, on which ranks, and by how much at most.
    """
    sends = [
        transport.post_send(peer, _compared(parameter, gradient))
        for copy in copies.values()
        if copy.ranks[0] == transport.rank
        for peer in copy.ranks[1:]
        for parameter in copy.parameters.values()
    ]
    what = "the gradient of" if gradient else "parameter"
    for copy in copies.values():
        if copy.ranks[0] != transport.rank:
            for name, parameter in copy.parameters.items():
                mine = _compared(parameter, gradient)
                _require_equal(transport, copy.ranks[0], mine, f"{what} {name!r}")
    for ticket in sends:
        transport.wait(ticket)


def _compared(parameter: nn.Parameter, gradient: str) -> Tensor:
    compared = dense_gradient(parameter, gradient) if gradient else parameter
    return local_part(compared.detach())


def _require_equal(transport: Transport, owner: int, mine: Tensor, what: str) -> None:
    theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
    transport.wait(transport.post_receive(owner, theirs))
    if torch.equal(mine, theirs):
        return
    names = rank_names(transport)
    owner, own = names.numbers[owner], names.numbers[transport.rank]
    difference = (mine.double() - theirs.double()).abs()
    raise PipelineError(
        f"the copies of {what} on ranks {owner} and {own} differ by up to {float(difference.max()):.6g}, in "
        f"{int((mine != theirs).sum())} of {mine.numel()} values; they must stay equal bit for bit. "
        f"{TREAT_COPIES_ALIKE}",
        rank=own,
        peer=owner,
    )
