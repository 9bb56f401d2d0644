"""In which order a forward calls the submodules of a cut model, which may differ from the order of their definition.

defined   embedding  norm  blocks.0  blocks.1  head        called   embedding  blocks.0  blocks.1  norm  head
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.models.cutting.entry import Entry, PartCall
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.placeholders import Placeholder
from penstock.models.cutting.points import CutModel
from penstock.models.cutting.trial import Trial
from penstock.models.cutting.trials import restored_generators


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The call of one submodule in a run without values."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallOrder:
    """The calls of submodules in one run of a forward without values."""

    calls: tuple[ModuleCall, ...]
    error: Exception | None = None
    """What ended the run early, if anything did."""

    @property
    def names(self) -> list[str]:
        """The submodules in the order of their first calls."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @property
    def repeated_names(self) -> set[str]:
        """The submodules that are called more than once."""
        names = [call.name for call in self.calls]
        return {name for name in names if names.count(name) > 1}


@dataclass(slots=True, eq=False)
class _NotingTrial(Trial):
    calls: list[ModuleCall] = field(default_factory=list)

    def call_method(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: Placeholder
    ) -> Any:
        self.calls.append(ModuleCall(name, args, kwargs))
        # By its full name: a dataclass with slots is another class than the one that super() would look for.
        return Trial.call_method(self, name, method, args, kwargs, placeholder)


def order_of_calls(template: Template, entry: Entry, batch: PartCall) -> CallOrder:
    """Run the forward of a model without values, and note in which order it calls the submodules of a template.

    Raises nothing that the forward raises: the calls up to there tell more.
    """
    frame = Frame(template, torch.device("cpu"))
    trial = _NotingTrial(
        template.positions, frame.device, batch.is_training, template.modules, template.name, has_free_order=True
    )
    error = None
    running = frame.running(trial, trial.labels, {}, is_training=batch.is_training)
    try:
        with torch.no_grad(), restored_generators(frame.device), running as copied:
            trial.add_saved_tensors(frame.saved_tensors())
            entry.call(copied, replace(batch, run=trial))
    except Exception as problem:
        error = problem
    return CallOrder(tuple(trial.calls), error)


def with_points(cut: CutModel, blocks: Sequence[str]) -> CutModel:
    """Return a cut with these points alone; all other submodules may then be called anywhere."""
    further_modules = (*cut.begin_modules, *(name for name in cut.points if name not in blocks))
    return replace(cut, points=tuple(blocks), begin_modules=further_modules)


def in_order_of_calls(cut: CutModel, blocks: Sequence[str], order: CallOrder) -> CutModel:
    """Return a cut whose points are in the order in which the forward called them.

    Modules that it called before the first of the `blocks`, or never, belong to what runs before the first point.
    """
    names = order.names
    first = min(names.index(name) for name in blocks if name in names)
    points = tuple(names[first:])
    begin_or_never = tuple(name for name in (*cut.begin_modules, *cut.points) if name not in points)
    return replace(cut, points=points, begin_modules=begin_or_never)
