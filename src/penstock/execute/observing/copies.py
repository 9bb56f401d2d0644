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
from penstock.execute.transport.protocol import Transport, wait_for_all
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
        transport.post_send(peer, _compared_tensor(parameter, gradient))
        for copy in copies.values()
        if copy.ranks[0] == transport.rank
        for peer in copy.ranks[1:]
        for parameter in copy.parameters.values()
    ]
    description = "the gradient of" if gradient else "parameter"
    for copy in copies.values():
        if copy.ranks[0] != transport.rank:
            for name, parameter in copy.parameters.items():
                local_copy = _compared_tensor(parameter, gradient)
                _require_equal(transport, copy.ranks[0], local_copy, f"{description} {name!r}")
    wait_for_all(transport, sends)


def _compared_tensor(parameter: nn.Parameter, gradient: str) -> Tensor:
    tensor = dense_gradient(parameter, gradient) if gradient else parameter
    return local_part(tensor.detach())


def _require_equal(transport: Transport, owner: int, local_copy: Tensor, description: str) -> None:
    """Raise a PipelineError unless the copy that `owner` sends equals this rank's; `description` says which it is."""
    owner_copy = torch.empty_like(local_copy, memory_format=torch.contiguous_format)
    transport.wait(transport.post_receive(owner, owner_copy))
    if torch.equal(local_copy, owner_copy):
        return
    names = rank_names(transport)
    owner_number, holder_number = names.numbers[owner], names.numbers[transport.rank]
    difference = (local_copy.double() - owner_copy.double()).abs()
    raise PipelineError(
        f"the copies of {description} on ranks {owner_number} and {holder_number} differ by up to "
        f"{float(difference.max()):.6g}, in {int((local_copy != owner_copy).sum())} of {local_copy.numel()} values; "
        f"they must stay equal bit for bit. {TREAT_COPIES_ALIKE}",
        rank=holder_number,
        peer=owner_number,
    )
