"""Frozen tensors that layers make again when they are built, such as a model under an adapter: no checkpoint has them.

A checkpoint keeps a sum of the bits of each in their place. So it is not loaded into a model that was built of others.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.local_tensors import local_tensor_of
from penstock.errors import CheckpointError
from penstock.execute.transport.calls import collective
from penstock.pipeline import Pipeline

SumsByRow = dict[str, dict[str, int]]
"""By name of a tensor, then by the first row that a rank holds of it (as text, for messages): the sum of these rows."""
WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODULUS = 2**63


def local_sums(pipeline: Pipeline) -> SumsByRow:
    """Return the sums of what this rank holds of the tensors that its layers make again, those of copies left out."""
    names = pipeline.rebuilt_names - pipeline.copied_names
    state = pipeline.state_dict() if names else {}
    tensors = {name: local_tensor_of(name, state[name], pipeline.control.places) for name in sorted(names)}
    return {
        name: {str(item.rows.start if item.rows else 0): _sum_of_bits(item.local)} for name, item in tensors.items()
    }


def joined_sums(sums_of_ranks: Sequence[SumsByRow]) -> dict[str, int]:
    """Return the sum of each whole tensor: of rows that several ranks hold once, alike for every number of replicas."""
    rows: SumsByRow = {}
    for sums in sums_of_ranks:
        for name, sum_by_row in sums.items():
            rows.setdefault(name, {}).update(sum_by_row)
    return {name: sum(sum_by_row.values()) % MODULUS for name, sum_by_row in rows.items()}


@collective
def require_rebuilt(pipeline: Pipeline, saved_sums: Mapping[str, int], path: Path) -> None:
    """Refuse a checkpoint that was saved of a model with other frozen tensors than this one; every rank calls it.

    Raises: CheckpointError, on every rank.
    """
    sums = joined_sums(pipeline.control.together(lambda: local_sums(pipeline), failing_as(CheckpointError)))
    for name in sorted(sums.keys() | saved_sums.keys()):
        if sums.get(name) == saved_sums.get(name):
            continue
        if name not in sums:
            problem = f"{name!r} was frozen and is not in it, but the model trains it or does not have it"
        elif name not in saved_sums:
            problem = f"{name!r} is frozen in the model, but was not when it was saved"
        else:
            problem = f"{name!r} is frozen and not in it, and has other values than the one that it was trained with"
        raise CheckpointError(f"{path}: {problem}. Build the model of the same files, with the same adapter and seed")


def _sum_of_bits(tensor: Tensor) -> int:
    plain = tensor.detach().contiguous()
    return int(plain.view(-1).view(WHOLE_NUMBERS[plain.element_size()]).sum(dtype=torch.int64)) % MODULUS
