"""Compares what several ranks hold copies of: tied parameters, the two copies of a model with two routes, and replicas.

Each copy is changed by its own rank's optimizer, so copies stay equal only as long as all of them are treated alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.execute.control.collectives import Control, Failure
from penstock.execute.control.copy_digests import TREAT_COPIES_ALIKE, DifferingCopies, differing_copies
from penstock.execute.observing.log import log_norms
from penstock.execute.observing.observer import Observer
from penstock.execute.parameters.gradient_store import dense_gradient
from penstock.execute.parameters.tied import TiedCopy, copy_digests
from penstock.execute.stages.assemble import Assembly
from penstock.execute.step import Step
from penstock.execute.transport.protocol import Transport, wait_for_all
from penstock.execute.transport.rank_names import rank_names
from penstock.execute.values.tensors import is_replicated, local_part


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
    if not _differing(local_copy, owner_copy).any():
        return
    names = rank_names(transport)
    owner_number, holder_number = names.numbers[owner], names.numbers[transport.rank]
    raise PipelineError(
        f"the copies of {description} on ranks {owner_number} and {holder_number} differ "
        f"{_size_of_difference(local_copy, owner_copy)}; they must stay equal bit for bit. {TREAT_COPIES_ALIKE}",
        rank=holder_number,
        peer=owner_number,
    )


def _differing(local_copy: Tensor, owner_copy: Tensor) -> Tensor:
    """Return which elements differ in a bit: [elements], booleans. Zeros of two signs do, and equal NaNs do not."""
    element_bytes = [
        copy.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).view(copy.numel(), copy.itemsize)
        for copy in (local_copy, owner_copy)
    ]
    return (element_bytes[0] != element_bytes[1]).any(1)


def _size_of_difference(local_copy: Tensor, owner_copy: Tensor) -> str:
    wide_type = torch.complex128 if local_copy.is_complex() else torch.float64
    largest = (local_copy.to(wide_type) - owner_copy.to(wide_type)).abs().max()
    num_differing = int(_differing(local_copy, owner_copy).sum())
    return f"by up to {float(largest):.6g}, in {num_differing} of {local_copy.numel()} values"


def compare_copies(control: Control, assembly: Assembly) -> None:
    """Compare the parameters of which several ranks hold copies, by digests; all ranks of a job call it.

    Copies are tied parameters, which ranks of one pipeline hold, and all parameters of replicas but the rows that they
    share out. Only where digests differ, the two ranks compare the values, to say by how much they differ.

    Raises:
        PipelineError: on every rank: which parameter differs, on which ranks, and by how much at most.
        PeerLost, DeadlineExceeded: a rank does not come.
    """
    places = control.places
    tied_copies, num_ranks = assembly.tied_copies, places.pipeline.num_ranks
    replicated = {name: parameter for name, parameter in assembly.named_parameters() if is_replicated(parameter)}
    replica_copies = {0: TiedCopy(replicated, range(places.num_replicas))} if places.data is not None else {}
    digests_of_ranks = control.together(lambda: [copy_digests(tied_copies), copy_digests(replica_copies)])
    # Per dimension of the job: this rank's transport along it, its copies, and the indices of the ranks of each line.
    dimensions = [
        (places.pipeline, tied_copies, [places.replica_of(replica) for replica in range(places.num_replicas)]),
        (places.data, replica_copies, [range(place, control.num_ranks, num_ranks) for place in range(num_ranks)]),
    ]
    for dimension, (transport, copies, lines) in enumerate(dimensions):
        for line in lines:
            difference = differing_copies([digests_of_ranks[rank][dimension] for rank in line])
            if difference is not None:
                holders = {line[difference.owner], line[difference.holder]}
                local_transport = transport if control.rank in holders else None
                what_differs = difference.describe(control.names.select(line))
                raise_difference = partial(_raise_difference, local_transport, copies, difference, what_differs)
                control.together(raise_difference, _as_pipeline_error)


def _raise_difference(
    transport: Transport | None, copies: Mapping[int, TiedCopy], difference: DifferingCopies, what_differs: str
) -> None:
    """Send the owner's values to the other holder, which raises a PipelineError; other ranks have no `transport`."""
    if transport is None:
        return
    parameter = list(copies[difference.group].parameters.values())[difference.index]
    local_copy = local_part(parameter.detach())
    if transport.rank == difference.owner:
        transport.wait(transport.post_send(difference.holder, local_copy))
        return
    owner_copy = torch.empty_like(local_copy, memory_format=torch.contiguous_format)
    transport.wait(transport.post_receive(difference.owner, owner_copy))
    numbers = rank_names(transport).numbers
    raise PipelineError(
        f"{what_differs} {_size_of_difference(local_copy, owner_copy)}; copies of a parameter must stay equal bit for "
        f"bit. {TREAT_COPIES_ALIKE}",
        rank=numbers[transport.rank],
        peer=numbers[difference.owner],
    )


def _as_pipeline_error(failure: Failure) -> Exception:
    return failure.local_error or PipelineError(failure.words, rank=failure.rank)
