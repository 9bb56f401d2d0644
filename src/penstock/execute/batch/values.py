"""Digests of a batch's values, by which the ranks find out whether they were given the same batch.

A digest is a hash of the bits of all elements in the order of their indices, so it is the same for every device and
memory format. It takes one pass over the data, which lie in the memory of the CPU, or come there tensor by tensor.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import StepRefused, listed
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import odd_one_out
from penstock.execute.values.tree import flatten

NUM_PARTS = 3
"""Number of parts of a batch that are compared: inputs, keyword arguments and target."""
_MAX_SHOWN = 5


class BatchValues:
    """The values that one rank was given for a step; only for as long as the ranks compare them.

    Whole numbers are compared in every step, which costs next to nothing; with `reads_all`, tensors and floats too.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, *, reads_all: bool = True) -> None:
        self._reads_all = reads_all
        roots = {"args": tuple(args), "kwargs": dict(kwargs), "target": target}
        self._parts = [list(_leaves(*root)) for root in roots.items()]

    def digests(self) -> list[int]:
        """Return the digests of inputs, keyword arguments and target; 0 stands for nothing given."""
        return [self._digest([leaf for _, leaf in part]) if part else 0 for part in self._parts]

    def by_place(self) -> dict[str, int]:
        """Return the digest of each value under its place, such as `kwargs['mask']`."""
        return {place: self._digest([leaf]) for part in self._parts for place, leaf in part}

    def _digest(self, leaves: Sequence[Any]) -> int:
        """Return one number for all leaves; a leaf that is not read counts as one leaf, whatever its value."""
        hasher = hashlib.blake2b(digest_size=8)
        for leaf in leaves:
            if self._reads_all and _is_readable(leaf):
                hasher.update(_bytes_of(leaf))
            elif type(leaf) is int or (type(leaf) is float and self._reads_all):
                hasher.update(repr(leaf).encode())
            hasher.update(b";")
        return int.from_bytes(hasher.digest())


def refuse_other_values(control: Control, local_values: BatchValues | None, digests: Sequence[Sequence[int]]) -> None:
    """Compare the digests of all ranks, part by part; 0 stands for nothing given. A collective where they differ.

    Raises:
        StepRefused: on every rank alike, naming the ranks and the places.
    """
    if all(len(set(part) - {0}) < 2 for part in zip(*digests, strict=True)):
        return
    values_of_ranks = control.all_gather_object({} if local_values is None else local_values.by_place())
    digests_by_place = [values if isinstance(values, dict) else {} for values in values_of_ranks]
    usual_rank, odd_rank, places = _difference(digests_by_place)
    raise StepRefused(
        f"{control.names[usual_rank]} and {control.names[odd_rank]} were given different values in "
        f"{listed(places, _MAX_SHOWN)}; pass the same batch on every rank, or nothing where a rank needs none. "
        "A loader that shuffles needs the same seed on all ranks. If values differ on purpose, create the pipeline "
        "with check_batches=False",
        rank=control.names.numbers[odd_rank],
    )


def _difference(digests: Sequence[Mapping[str, object]]) -> tuple[int, int, list[str]]:
    """Return a rank that was given what most ranks were, the first that was not, and the places where they differ."""
    for place in dict.fromkeys(place for report in digests for place in report):
        digest_by_rank = {rank: report[place] for rank, report in enumerate(digests) if place in report}
        pair = odd_one_out(digest_by_rank)
        if pair is not None:
            first, second = digests[pair[0]], digests[pair[1]]
            return *pair, [name for name in first if second.get(name, first[name]) != first[name]]
    return 0, len(digests) - 1, ["a value that has changed since"]


def _leaves(root: str, tree: Any) -> Iterator[tuple[str, Any]]:
    leaves, spec = flatten(tree)
    for place, leaf in zip(spec.places(root), leaves, strict=True):
        if isinstance(leaf, PreSplit):
            for index, part in enumerate(leaf.parts):
                yield from _leaves(f"{place}.parts[{index}]", part)
        else:
            yield place, leaf


def _is_readable(leaf: Any) -> bool:
    """Whether a value is a plain tensor with data; sparse, nested and quantized ones and subclasses are left out."""
    is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    return is_plain and not (leaf.is_quantized or leaf.is_meta or leaf.is_nested)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bits of all elements, in the order of the indices, without a copy where they lie so on a CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    if flat.stride(0) != 1:  # contiguous() would leave a single element as it is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
