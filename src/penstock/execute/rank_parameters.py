"""`RankParameters`: the parameters of one rank in their units, with their layouts, gradients and ties."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.execute.control.agreement import ALL_FROZEN, digest
from penstock.execute.control.collectives import Control
from penstock.execute.losses.grad_scaler import SharedScaler, grad_scaler_of
from penstock.execute.losses.loss import Scale
from penstock.execute.parameters.averaged import Averaged, wrapped
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.layout import ParameterLayout, Replicated
from penstock.execute.parameters.tied import TiedCopy, agree_on_copies
from penstock.execute.replicas.reductions import Reductions
from penstock.execute.replicas.summed import StageParts, Summed
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.stage import Stage, modules_of
from penstock.execute.step import Step
from penstock.execute.undocumented_modules import ModuleSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Stages that share parameters, or one by itself: tied ones, and copies of a stage on one rank."""

    stages: Sequence[Stage]
    gradients: GradientStore
    layout: ParameterLayout
    copies: Sequence[TiedCopy]
    """What other ranks hold too."""


class OwnParameters:
    """The parameters of one rank as its modules hold them now, since a caller may put others in their place.

    `load_state_dict(assign=True)` and `layer.weight = nn.Parameter(...)` do that. What was made for the parameters
    before, above all the exchange of tied gradients, would go on with the old ones, and the copies of a tied parameter
    drift apart.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._layers = [layer for stage in assembly.stages for layer in stage.modules]
        self.named = assembly.named_parameters()
        """Each once, with its name in the unsplit model."""
        self._snapshot, self._held = ModuleSnapshot(self._layers), self._look()

    def refresh(self) -> bool:
        """Look which parameters were replaced since the last look; return whether any was.

        Raises:
            ConfigError: a tied one was, so that its copies are tied no more.
        """
        if self._snapshot.is_current():
            return False
        if all(getattr(module, name, None) is parameter for module, name, parameter in self._held):
            self._snapshot = ModuleSnapshot(self._layers)  # of other modules, with which nothing was made
            return False
        self._require_ties()
        self.named = self._assembly.named_parameters()
        self._snapshot, self._held = ModuleSnapshot(self._layers), self._look()
        return True

    def _look(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (module, name, parameter)
            for module in modules_of(self._layers)
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def _require_ties(self) -> None:
        """Make sure that what was one object is one still, and that no copy of another rank's was replaced."""
        copies = self._assembly.tied_copies.values()
        tied = {id(parameter) for copy in copies for parameter in copy.parameters.values()}
        names = {id(parameter): name for name, parameter in self.named}
        now: dict[int, object] = {}
        for module, name, parameter in self._held:
            new = getattr(module, name, None)
            is_replaced = new is not parameter and id(parameter) in tied
            if is_replaced or now.setdefault(id(parameter), new) is not new:
                raise ConfigError(
                    f"{names[id(parameter)]!r} is tied, but was replaced by another parameter after the pipeline was "
                    "made, so that its copies would drift apart; change its values in place, as load_state_dict() "
                    "does without assign=True, or make a new Pipeline",
                    key="layers",
                )


class TrainingOptions(Protocol):
    """What the caller wants done with gradients; `PipelineOptions` says more."""

    @property
    def gradient_attribute(self) -> str: ...

    @property
    def scale_loss(self) -> float | Scale | None: ...

    @property
    def reduce_stage(self) -> Callable[[int], None] | None: ...

    @property
    def optimizer_step(self) -> Callable[[], None] | None: ...


class RankParameters:
    """The parameters that one rank trains."""

    units: Sequence[Unit]
    unit_of: dict[int, Unit]
    """By stage."""

    def __init__(
        self,
        control: Control,
        device: torch.device,
        assembly: Assembly,
        options: TrainingOptions,
    ) -> None:
        self._control = control
        self._assembly = assembly
        self.copies = assembly.tied_copies
        """By tied group."""
        self.reduce_stage, self._optimizer_step = options.reduce_stage, options.optimizer_step
        attribute = options.gradient_attribute
        self._own = OwnParameters(assembly)
        self._trained = 0
        data = control.places.data
        self._reductions = None if data is None else Reductions(data)
        self.units = [self._unit(stages, attribute) for stages in _sharing(assembly.stages)]
        self.unit_of = {stage.index: unit for unit in self.units for stage in unit.stages}
        self._store_of_copy = {id(copy): unit.gradients for unit in self.units for copy in unit.copies}
        scaler = grad_scaler_of(options.scale_loss)
        self._scaler = None if scaler is None else SharedScaler(scaler, control, device, attribute)

    @property
    def scale(self) -> float:
        """That of the rank's GradScaler, 0 where it has none."""
        return 0.0 if self._scaler is None else self._scaler.scale

    def refresh(self, *, is_synced: bool = True, sums_tied: bool = True) -> PenstockError | None:
        """Take in parameters that were replaced; return why they cannot be trained in such a step, if they cannot."""
        try:
            self._own.refresh()
            for copy in self.copies.values():
                copy.refuse_hooks()
            if not is_synced and sums_tied:
                self._require_whole_sums()
        except PenstockError as error:
            return error
        return None

    def trained(self) -> int:
        """Return a digest of which parameters need gradients, which callers may change between steps.

        `ALL_FROZEN` if none does, 0 without parameters.
        """
        needed = "".join(["01"[parameter.requires_grad] for _, parameter in self._own.named])
        return digest(needed) if "1" in needed else ALL_FROZEN * bool(needed)

    def agree_on_tied(self, trained: int) -> None:
        """Compare the copies of tied parameters once more if any rank trains others than in the step before."""
        if trained != self._trained:
            agree_on_copies(self._control, self.copies)
            self._trained = trained

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Run a step in here; one that fails leaves nothing behind."""
        try:
            for unit in self.units:
                unit.layout.begin_step(is_synced=step.is_synced, is_training=step.is_training)
                if step.is_training:
                    copies = unit.copies if step.sums_tied else ()
                    unit.gradients.begin_step(parameter for copy in copies for parameter in copy.trained().values())
            yield
        except BaseException:
            for unit in self.units:
                unit.layout.end_failed_step()
            raise
        else:
            for unit in self.units:
                unit.layout.after_step()
        finally:
            for unit in self.units:
                unit.gradients.end_step()

    def store_of(self, copy: TiedCopy) -> GradientStore:
        """Return where a copy's gradients are."""
        return self._store_of_copy[id(copy)]

    def step_optimizer(self) -> None:
        """End a training step's program: the scalers of all ranks agree before any optimizer is stepped."""
        if self._scaler is not None:
            self._scaler.share(parameter for _, parameter in self._assembly.named_parameters())
        if self._optimizer_step is not None:
            self._optimizer_step()

    def _unit(self, stages: Sequence[Stage], attribute: str) -> Unit:
        held = {id(each) for stage in stages for each in (*stage.parameters(), *stage.modules)}
        tied = {id(copy): {*map(id, copy.parameters.values()), *map(id, copy.layers)} for copy in self.copies.values()}
        copies = [copy for copy in self.copies.values() if held & tied[id(copy)]]
        gradients = GradientStore(lambda: _parameters(stages), attribute)
        is_tied = frozenset[int]().union(*(tied[id(copy)] for copy in copies))
        if self._reductions is not None:
            parts = {stage.index: StageParts(stage.parameters, stage.modules) for stage in stages}
            return Unit(stages, gradients, Summed(parts, gradients, is_tied, self._reductions), copies)
        modules = {stage.index: wrapped(stage.modules) for stage in stages}
        if not any(modules.values()):
            return Unit(stages, gradients, Replicated(), copies)
        layout = Averaged(modules, gradients, is_tied, lambda: self._control.transport.deadline_s)
        return Unit(stages, gradients, layout, copies)

    def _require_whole_sums(self) -> None:
        if self.copies and self.reduce_stage is not None:
            raise ConfigError(
                "no_sync() does not go with reduce_stage and parameters that are tied over ranks: while a step runs, "
                "their gradients of the steps before are set aside, so reduce_stage would not see them. Average in "
                "every step, or average after the last step instead of in reduce_stage",
                key="reduce_stage",
            )


def _sharing(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Put together the stages that share parameters."""
    groups: list[list[Stage]] = []
    for stage in stages:
        own = set(map(id, stage.parameters()))
        joined = [group for group in groups if own.intersection(map(id, _parameters(group)))]
        groups = [group for group in groups if group not in joined] + [[*chain(*joined), stage]]
    return groups


def _parameters(stages: Iterable[Stage]) -> list[nn.Parameter]:
    """The parameters that some stages hold now, each once."""
    return list({id(each): each for stage in stages for each in stage.parameters()}.values())
