"""Cut a batch into microbatches along the samples, and these into slices along the sequence.

All parts of a microbatch that have a sequence are cut alike. A layer sees one slice at a time: it treats positions
alone, or it carries what later slices need of this one (`carried.py`). The losses of slices make up their microbatch's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from penstock.errors import ConfigError, PipelineError
from penstock.execute.batch.microbatch import (
    BatchSpec,
    Microbatch,
    Replicate,
    Split,
    batch_signature,
    cut_tensor,
    say_divisors,
    split_batch,
)
from penstock.execute.methods import has_methods
from penstock.execute.stages.carried import Carrying
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.protocol import Transport
from penstock.execute.values.tree import flatten

Mark = Split | Replicate | None
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How a batch is cut; `specs` are for microbatches, `slice_specs` for slices, whose default dim is `slice_dim`."""

    num_microbatches: int
    num_slices: int = 1
    allow_ragged: bool = False
    specs: BatchSpec | None = None
    slice_dim: int = 1
    slice_specs: BatchSpec | None = None

    def microbatches(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> list[Microbatch]:
        """Split a batch, see `split_batch`. Raises: PipelineError."""
        return split_batch(
            args,
            kwargs,
            target,
            num_microbatches=self.num_microbatches,
            specs=self.specs,
            allow_ragged=self.allow_ragged,
        )

    def slices(self, microbatch: Microbatch) -> list[Microbatch]:
        """Cut a microbatch into consecutive slices, without copying.

        With `allow_ragged` the first (length mod slices) slices are longer by one; without, the length must divide
        evenly. What has no such dimension is passed whole to every slice, and so is what every microbatch gets whole.

        Raises:
            PipelineError: lengths disagree, do not divide or are too short; the target has no sequence; a spec does not
                fit.
        """
        if self.num_slices == 1:
            return [microbatch]
        parts = (microbatch.args, microbatch.kwargs, microbatch.target)
        leaves = self._leaves(parts, microbatch.index)
        lengths = self._lengths([leaf for leaf in leaves if leaf.is_cut])
        tree = flatten(parts)[1]
        columns = [leaf.pieces(lengths) for leaf in leaves]
        found = []
        for index, length in enumerate(lengths):
            args, kwargs, target = tree.unflatten([column[index] for column in columns])
            found.append(Microbatch(microbatch.index, args, kwargs, target, microbatch.size, index, length))
        return found

    def signature(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> str:
        """Return a text that changes when a tensor's shape on any stage may change, see `batch_signature`."""
        text = batch_signature(
            args,
            kwargs,
            target,
            num_microbatches=self.num_microbatches,
            specs=self.specs,
            allow_ragged=self.allow_ragged,
        )
        return text if self.num_slices == 1 else f"{text} {self.num_slices} {self.slice_dim} {self.slice_specs}"

    def _leaves(self, parts: tuple[Any, ...], microbatch: int) -> list["_Leaf"]:
        found: list[_Leaf] = []
        own, outer = self.slice_specs or BatchSpec(), self.specs or BatchSpec()
        for root, value in zip(("args", "kwargs", "target"), parts, strict=True):
            leaves, tree = flatten(value)
            # A rank that needs no inputs calls the step with none of them: specs for them are no mistake.
            marks, outer_marks = (
                tree.spread(getattr(spec, root) if leaves else None, _is_mark, root) for spec in (own, outer)
            )
            places = [f"microbatch {microbatch}: {place}" for place in tree.places(root)]
            for place, leaf, mark, outer_mark in zip(places, leaves, marks, outer_marks, strict=True):
                found.append(self._leaf(place, leaf, mark, outer_mark, is_target=root == "target"))
        return found

    def _leaf(self, place: str, value: Any, mark: Mark, outer_mark: Mark, *, is_target: bool) -> "_Leaf":
        if not isinstance(value, Tensor) or isinstance(mark, Replicate):
            return _Leaf(place, value, None)
        if isinstance(mark, Split):
            if not _has_dim(value, mark.dim):
                raise PipelineError(
                    f"{place} of shape {tuple(value.shape)} cannot be cut on dim {mark.dim}; expected a dim below "
                    f"{value.dim()}. Give Split() in slice_specs another dim, or mark it Replicate()"
                )
            return _Leaf(place, value, mark.dim)
        if isinstance(outer_mark, Replicate):
            return _Leaf(place, value, None)
        if _has_dim(value, self.slice_dim):
            return _Leaf(place, value, self.slice_dim)
        if is_target and value.dim() > 0:
            raise PipelineError(
                f"{place} of shape {tuple(value.shape)} has no dimension {self.slice_dim} to cut into slices, so every "
                "slice's loss would count all of it. Give slice_dim, or Split(dim) in slice_specs, the dimension of "
                "the sequence; or mark it Replicate() if the loss of a slice needs the whole target"
            )
        return _Leaf(place, value, None)

    def _lengths(self, cut: Sequence["_Leaf"]) -> list[int]:
        """The length of each slice; zeros where this rank was given nothing to cut."""
        if not cut:
            return [0] * self.num_slices
        first = cut[0]
        for leaf in cut:
            if leaf.length != first.length:
                raise PipelineError(
                    f"{first} has length {first.length}, but {leaf} has length {leaf.length}; expected one length of "
                    "everything that is cut into slices. Mark what has no sequence Replicate() in slice_specs, or give "
                    "Split(dim) the dimension of the sequence"
                )
        size, num_longer = divmod(first.length, self.num_slices)
        if size == 0:
            raise PipelineError(
                f"{first} has length {first.length} for {self.num_slices} slices; expected at least one position each. "
                f"Pass longer sequences, or use at most {first.length} slices"
            )
        if num_longer and not self.allow_ragged:
            below = size * self.num_slices
            raise PipelineError(
                f"{first} has length {first.length}, which {self.num_slices} slices do not divide evenly. Pass "
                f"{below} or {below + self.num_slices} positions, use {say_divisors(first.length)} slices, or pass "
                "allow_ragged=True"
            )
        return [size + (index < num_longer) for index in range(self.num_slices)]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One value of a microbatch; `dim` is where it is cut, None where every slice gets it whole."""

    place: str
    value: Any
    dim: int | None

    @property
    def is_cut(self) -> bool:
        return self.dim is not None

    @property
    def length(self) -> int:
        return int(self.value.shape[self.dim])

    def pieces(self, lengths: Sequence[int]) -> Sequence[Any]:
        if self.dim is None:
            return [self.value] * len(lengths)
        return cut_tensor(self.value, lengths, self.dim)

    def __str__(self) -> str:
        return f"{self.place} (shape {tuple(self.value.shape)}, cut on dim {self.dim})"


def with_sizes(slices: Sequence[Microbatch], size: int, lengths: Sequence[int]) -> list[Microbatch]:
    """Return the slices of a microbatch with the sizes on which all ranks agreed."""
    return [
        each if (each.size, each.length) == (size, length) else replace(each, size=size, length=length)
        for each, length in zip(slices, lengths, strict=True)
    ]


def refuse_layers_that_look_back(
    transport: Transport, stages: Sequence[Stage], kinds: tuple[type[nn.Module], ...]
) -> None:
    """Refuse modules that need what earlier slices left behind and do not carry it; a collective.

    Who calls such a module may carry for it: the module that holds both it and what carries.

    Raises:
        ConfigError: on every rank alike, naming a layer.
    """
    layers = [(name, layer) for stage in stages for name, layer in stage.layers.items()]
    own = [f"{name!r} ({type(each).__name__})" for name, layer in layers for each in _looking_back(layer, kinds)]
    everyone = transport.all_gather_object(own)
    found = [text for theirs in everyone if isinstance(theirs, list) for text in theirs]
    if found:
        raise ConfigError(
            f"the schedule cuts sequences into slices, but layer {found[0]} looks back over the sequence and carries "
            "nothing from slice to slice, so its gradients would be wrong; hold it in a module that keeps its keys and "
            "values, or its state, in a penstock.models.Carry, or use a schedule with 1 slice",
            key="schedule",
        )


def _looking_back(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], *, is_carried: bool = False
) -> Iterator[nn.Module]:
    """The modules of these kinds for which neither they nor who calls them carry anything."""
    is_carrying = any(has_methods(child, Carrying) for child in module.children())
    if isinstance(module, kinds) and not (is_carrying or is_carried):
        yield module
    # a list does not call what it holds
    reaches = is_carrying or (is_carried and isinstance(module, _LISTS))
    for child in module.children():
        yield from _looking_back(child, kinds, is_carried=reaches)


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, (Split, Replicate))


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
