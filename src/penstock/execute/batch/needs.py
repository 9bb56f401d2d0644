"""The parts of a batch that the stages of a rank take, and where its tensors may be."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import PipelineError, nearest
from penstock.execute.accelerator import is_queued
from penstock.execute.batch.microbatch import ANY_KEYWORD, Microbatch
from penstock.execute.values.tree import tensors_of
from penstock.microbatch_place import MICROBATCH_PLACE
from penstock.placement import Placement

_MEANT_AS_TARGET = frozenset({"y", "label", "labels", "targets"})
"""Keywords by which other libraries take the target."""


class BatchBinding(Protocol):
    """The arguments of a model that was cut, as its layers have them in `batch_signature`."""

    @property
    def parameters(self) -> Collection[str]:
        """The names of its arguments."""

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_first: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a batch as the layers take it; `is_first` says whether this rank holds the first stage."""


def batch_binding(layers: Sequence[Any]) -> BatchBinding | None:
    """Return how the model that the first layer is of takes a batch; None for a layer that is its own model."""
    return getattr(layers[0], "batch_signature", None) if layers else None


@dataclass(frozen=True, slots=True)
class InputNeeds:
    """The parts of a batch that a rank's stages take."""

    inputs: bool
    target: bool
    keywords: frozenset[str] = frozenset()
    keywords_of_all: frozenset[str] = frozenset({ANY_KEYWORD})
    """Keywords that the layers of any rank take, `ANY_KEYWORD` among them if one may take any."""
    device: torch.device | None = None
    """Device on which the stages compute; None where it is not known, so that batches may be on any."""
    binding: BatchBinding | None = None
    """Binds a batch to the model's arguments; None where layers take what a step passes as it is."""

    @classmethod
    def of(
        cls,
        keywords_of_stage: Mapping[int, Collection[str]],
        placement: Placement,
        keywords_of_all: frozenset[str],
        device: torch.device,
        *,
        has_loss: bool,
        binding: BatchBinding | None = None,
    ) -> "InputNeeds":
        """Look at the keywords that each stage of a rank takes; last stages take the target if there is a loss."""
        return cls(
            inputs=any(placement.previous_stage[stage] < 0 for stage in keywords_of_stage),
            target=has_loss and any(placement.next_stage[stage] < 0 for stage in keywords_of_stage),
            keywords=frozenset[str]().union(*keywords_of_stage.values()),
            keywords_of_all=keywords_of_all,
            device=device,
            binding=binding,
        )

    @property
    def known_keywords(self) -> set[str]:
        """The names that a step may pass, `ANY_KEYWORD` among them if any may be."""
        return {*self.keywords_of_all, *(self.binding.parameters if self.binding else ())}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs and keywords of a step as the layers take them; nothing where this rank was given nothing.

        Raises:
            PenstockError: they are not what the model takes.
        """
        if self.binding is None or not (args or kwargs):
            return tuple(args), dict(kwargs)
        return self.binding.bind(args, kwargs, is_first=self.inputs)

    def require_known(self, keywords: Iterable[str], *, has_target: bool) -> None:
        """Refuse a keyword that no layer of any rank takes; `has_target` says whether the step has a target.

        Raises:
            PipelineError: it names the keyword, and what it may have been meant as.
        """
        names = self.known_keywords
        for name in keywords:
            if name == MICROBATCH_PLACE:
                raise PipelineError(
                    f"the batch has a keyword {name!r}, by which layers are told the place of their microbatch "
                    "(ps.MicrobatchPlace); leave it out, or rename this argument in the batch and in the layers"
                )
            if name not in names and ANY_KEYWORD not in names:
                fix = f"{nearest(name, names)} The layers take the keywords {sorted(names)}; rename or drop it"
                if name in _MEANT_AS_TARGET and not has_target:
                    fix = " Pass what the loss compares the output with as target=, as in step(x, target=y)"
                raise PipelineError(f"no layer's forward names {name!r}.{fix}")

    def require_device(self, args: Any, target: Any) -> None:
        """Make sure that inputs and target are where the stages compute, or on the host of their accelerator.

        Raises:
            PipelineError: all tensors of either are elsewhere.
        """
        for noun, values, is_needed in (("inputs", args, self.inputs), ("target", target, self.target)):
            if is_needed and self.device is not None and _is_elsewhere(values, self.device):
                places = " and ".join(sorted(map(str, _devices(values))))
                raise PipelineError(
                    f"tensors of the {noun} are on {places}, but this rank computes on {self.device}; move them first, "
                    "as in x.to(pipeline.device)"
                )

    def on_host(self, microbatch: Microbatch) -> list[Tensor]:
        """Return the tensors that the stages take and that the host has, while the stages compute on an accelerator.

        Inputs are the host's if none of their tensors with dimensions is elsewhere, and so is the target; keyword
        arguments are if nothing of the whole batch is. So lengths, say, stay where they are beside inputs on the
        device.
        """
        if self.device is None or not is_queued(self.device):
            return []
        args, kwargs, target = microbatch.args, microbatch.kwargs, microbatch.target
        tensors = tensors_of(args) if self.inputs and _is_on_host(args) else []
        tensors += tensors_of(target) if self.target and _is_on_host(target) else []
        if self.keywords and _is_on_host((args, kwargs, target)):
            tensors += tensors_of([value for name, value in kwargs.items() if self.keywords & {name, ANY_KEYWORD}])
        return [tensor for tensor in tensors if tensor.device.type == "cpu"]


def _devices(values: Any) -> set[torch.device]:
    """Return the devices of the tensors that have dimensions: a number may be on the host at any time."""
    return {tensor.device for tensor in tensors_of(values) if tensor.dim()}


def _is_on_host(values: Any) -> bool:
    return {device.type for device in _devices(values)} == {"cpu"}


def _is_elsewhere(values: Any, device: torch.device) -> bool:
    devices = _devices(values)
    is_there = any(place.type == device.type and device.index in (None, place.index) for place in devices)
    return bool(devices) and not is_there and not (is_queued(device) and _is_on_host(values))
