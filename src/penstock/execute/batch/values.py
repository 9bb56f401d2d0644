"""Digests of a batch's values, by which the ranks find out whether they were given the same batch.

A digest is integer arithmetic on the bits of all elements, so it is the same on every device and for every memory
format. An element is a word of up to 32 bits, or several of them:

    block of 65,536 words:  sum of word * weight, where the weights are odd 64-bit numbers that look random
    tensor:                 sum of mix(block + its number), where mix is one to one
    argument list:          digest of the leaves before * odd number + digest of the leaf

All sums are modulo 2**64. So one changed element always changes the digest, and equal digests of other batches, such as
the same rows in another order, have a chance of about 2**-32. It takes two passes over the data, in pieces, so that
little memory is needed beside it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import StepRefused
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.control.agreement import odd_one_out
from penstock.execute.control.collectives import Control
from penstock.execute.values.tree import flatten

NUM_PARTS = 3
"""Inputs, keyword arguments and target."""
_MAX_SHOWN = 5
_BLOCK = 2**16
_BLOCKS_ON_GPU = 64
"""At once: fewer kernels. On a CPU one block at a time stays in the cache."""
_MASK = 2**64 - 1
_ODD = 0x2545F4914F6CDD1D
_WORDS = {1: torch.uint8, 2: torch.int16}
"""By bytes of an element; what has more is read as int32."""


class BatchValues:
    """What one rank was given for a step; only for as long as the ranks compare it.

    Whole numbers are compared in every step, which costs next to nothing; with `reads_all`, tensors and floats too.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, *, reads_all: bool = True) -> None:
        self._reads_all = reads_all
        self._parts = [list(_leaves("args", tuple(args))), list(_leaves("kwargs", dict(kwargs)))]
        self._parts.append(list(_leaves("target", target)))

    def digests(self, device: torch.device) -> Tensor:
        """Return the digests of inputs, keyword arguments and target; where tensors are read, on a device.

        The host waits for nothing. A digest of 0 stands for nothing given.
        """
        found = [self._digest([leaf for _, leaf in part], device) for part in self._parts]
        if not any(isinstance(each, Tensor) for each in found):
            return torch.tensor(found)
        return torch.stack([torch.as_tensor(each, device=device) for each in found])

    def by_place(self) -> dict[str, int]:
        """Return the digest of each value under its place, such as `kwargs['mask']`."""
        cpu = torch.device("cpu")
        return {place: int(self._digest([leaf], cpu)) for part in self._parts for place, leaf in part}

    def _digest(self, leaves: Sequence[Any], device: torch.device) -> Tensor | int:
        """One number for all leaves, on the device only if a tensor is among those that are read."""
        total: Tensor | int = 0
        with torch.no_grad():
            for leaf in leaves:
                found: Tensor | int
                if self._reads_all and _is_readable(leaf):
                    # On the way to a CPU, a copy that nobody waits for may be read before it is there.
                    found = tensor_digest(leaf).to(device, non_blocking=device.type != "cpu")
                else:
                    found = _of_plain(leaf, reads_floats=self._reads_all)
                # Tensors wrap at 64 bits by themselves, but take no larger number than that.
                scaled = total * _ODD if isinstance(total, Tensor) else _signed(total * _ODD)
                total = scaled + found
                if not isinstance(total, Tensor):
                    total = _signed(total)
        return total


def refuse_other_values(control: Control, own: BatchValues | None, digests: Sequence[Sequence[int]]) -> None:
    """Compare the digests of all ranks, part by part; 0 stands for nothing given. A collective where they differ.

    Raises:
        StepRefused: on every rank alike, naming the ranks and the places.
    """
    if all(len(set(part) - {0}) < 2 for part in zip(*digests, strict=True)):
        return
    everyone = control.all_gather_object({} if own is None else own.by_place())
    one, other, places = _difference([theirs if isinstance(theirs, dict) else {} for theirs in everyone])
    shown = ", ".join(places[:_MAX_SHOWN]) + f" and {len(places) - _MAX_SHOWN} more" * (len(places) > _MAX_SHOWN)
    raise StepRefused(
        f"rank {one} and rank {other} were given different values in {shown}; pass the same batch on every rank, or "
        "nothing where a rank needs none. A loader that shuffles needs the same seed on all ranks. If values differ on "
        "purpose, create the pipeline with check_batches=False",
        rank=other,
    )


def _difference(digests: Sequence[Mapping[str, object]]) -> tuple[int, int, list[str]]:
    """A rank that was given what most ranks were, the first that was not, and the places where the two differ."""
    for place in dict.fromkeys(place for theirs in digests for place in theirs):
        ranks = odd_one_out({rank: theirs[place] for rank, theirs in enumerate(digests) if place in theirs})
        if ranks is not None:
            first, second = digests[ranks[0]], digests[ranks[1]]
            return *ranks, [name for name in first if second.get(name, first[name]) != first[name]]
    return 0, len(digests) - 1, ["a value that has changed since"]


def tensor_digest(tensor: Tensor) -> Tensor:
    """Return a number, as a tensor of no dimensions on the same device, that stands for a tensor's elements."""
    words = _words(tensor)
    weights = _mix(torch.arange(1, min(words.numel(), _BLOCK) + 1, device=words.device)) | 1
    whole = words.numel() // _BLOCK * _BLOCK
    sums = [(words[whole:] * weights[: words.numel() - whole]).sum().reshape(1)]
    if whole:
        num_at_once = 1 if words.device.type == "cpu" else _BLOCKS_ON_GPU
        pieces = torch.split(words[:whole].reshape(-1, _BLOCK), num_at_once)
        sums += [(piece * weights).sum(1) for piece in pieces]
    blocks = torch.cat(sums)
    return _mix(blocks + _mix(torch.arange(1, blocks.numel() + 1, device=blocks.device))).sum()


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


def _of_plain(leaf: Any, *, reads_floats: bool) -> int:
    """What stands for a number; other plain values are in the batch's signature, or nothing is known of them."""
    text = ""
    if type(leaf) is int:
        text = str(leaf)
    elif type(leaf) is float and reads_floats:
        text = leaf.hex()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(number: int) -> int:
    """The same bits as a signed number of 64."""
    return (number + 2**63 & _MASK) - 2**63


def _words(tensor: Tensor) -> Tensor:
    """The bits of all elements, in the order of the indices."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # contiguous() would leave a single element as it is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_WORDS.get(flat.element_size(), torch.int32))


def _mix(numbers: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), one to one on 64 bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers = numbers ^ (numbers >> shift & _MASK >> shift)
        numbers = numbers * (factor if factor < 2**63 else factor - 2**64)
    return numbers
