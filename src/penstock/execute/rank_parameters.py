"""`RankParameters`: the parameters of one rank in their units, with their layouts, gradients and ties."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError
from penstock.execute.control.agreement import ALL_FROZEN, digest
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import SetupReport
from penstock.execute.losses.grad_scaler import SharedScaler, grad_scaler_of
from penstock.execute.losses.loss import Scale
from penstock.execute.own_parameters import OwnParameters
from penstock.execute.parameters.averaged import Averaged, wrapped
from penstock.execute.parameters.fully_sharded import FullySharded, WholeGradientStore
from penstock.execute.parameters.gradient_store import MAIN_GRAD, GradientStore, StoredGradients, have_main
from penstock.execute.parameters.layout import ParameterLayout, StageParts
from penstock.execute.parameters.sharded import Sharded, ShardGradients
from penstock.execute.parameters.summed import Summed
from penstock.execute.parameters.tied import described_copies, require_equal_kinds
from penstock.execute.replicas.early import early_rows
from penstock.execute.replicas.exchanges import exchanges_of
from penstock.execute.replicas.first_replica import share_all
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.held_state import held_tensors
from penstock.execute.stages.stage import Stage
from penstock.execute.stages.wrappers import fully_sharded_modules
from penstock.execute.step import Step

Units = tuple[tuple[int, ...], ...]
"""The stages of each unit that has several."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Stages that share parameters, or one by itself: tied ones, and copies of a stage on one rank."""

    stages: Sequence[Stage]
    gradients: GradientStore
    """To which backwards add."""
    layout: ParameterLayout
    tied_groups: Sequence[int]
    """Groups of what other ranks hold too."""
    shared_gradients: StoredGradients
    """Those that ranks share: `gradients`, or of shards, their own."""


class TrainingOptions(Protocol):
    """Options that say what is done with gradients; `PipelineOptions` says more."""

    @property
    def gradient_attribute(self) -> str: ...

    @property
    def scale_loss(self) -> float | Scale | None: ...

    @property
    def reduce_stage(self) -> Callable[[int], None] | None: ...

    @property
    def optimizer_step(self) -> Callable[[], None] | None: ...

    @property
    def is_sharded(self) -> bool: ...

    @property
    def averages_replicas(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors that layouts hold beside the parameters of the modules and their gradients."""

    parameters: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """By the first stage of a unit."""
    gradients: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    exchanged: Sequence[Tensor] = ()
    """Buffers of exchanges between replicas, those kept for later ones included."""
    kept_bytes: int = 0
    """Of these, in buffers for gradients that are summed, kept from step to step."""


class RankParameters:
    """The parameters that one rank trains."""

    units: Sequence[Unit]
    unit_of: dict[int, Unit]
    """By stage."""

    def __init__(self, control: Control, device: torch.device, assembly: Assembly, options: TrainingOptions) -> None:
        """Group the parameters of this rank into units, and give each unit its gradients and its layout.

        `assembly` has the stages of this rank, and its copies of parameters that are tied over ranks. A unit is one
        stage, or several stages that share parameters. Its layout says how its parameters lie: whole, or in shards over
        the replicas. No message goes to another rank here; `take_first_values` exchanges values.
        """
        self._control = control
        self._assembly = assembly
        self.copies = assembly.tied_copies
        """The copies of tied parameters on this rank, by the number of the tied group."""
        # Functions of the caller: one for the gradients of a stage that are whole, one for the end of a step.
        self.reduce_stage, self._optimizer_step = options.reduce_stage, options.optimizer_step
        # Gradients are in `.grad`, or in float32 in `.main_grad`.
        attribute = options.gradient_attribute
        self._module_parameters = OwnParameters(assembly)
        if attribute == MAIN_GRAD:
            have_main(parameter for _, parameter in self._module_parameters.named_parameters)
        self._trained = 0
        """The digest of which parameters of all ranks need gradients, as it was in the last training step."""
        self.is_synced = self.sums_tied = True
        """Whether gradients are averaged over replicas, and those of tied parameters summed over ranks; see `Step`."""
        self.is_sharded = options.is_sharded
        self._mesh = control.places.mesh if options.is_sharded else None
        # Gathers and reductions between replicas; None where there is nothing to exchange.
        self._exchanges = exchanges_of(control.places, is_sharded=options.is_sharded)
        self._num_averaged = control.places.num_replicas if options.averages_replicas else 1
        self.units = [self._unit_of(stages, attribute) for stages in sharing(assembly.stages)]
        self.unit_of = {stage.index: unit for unit in self.units for stage in unit.stages}
        # Where losses are scaled by a torch.amp.GradScaler, the scalers of all ranks must take one decision.
        scaler = grad_scaler_of(options.scale_loss)
        self._scaler = None if scaler is None else SharedScaler(scaler, control, device, attribute)

    def take_first_values(self) -> None:
        """Take the values of the first replica, and of the owners of tied parameters; keep what this rank shall hold.

        Every rank calls it, before its first step. Raises: PeerLost, DeadlineExceeded.
        """
        data = self._control.places.data
        for unit in self.units:
            if data is not None:
                share_all(data, [tensor for tensor in held_tensors(unit.stages) if early_rows(tensor) is None])
            if shard_of := unit.layout.shard():
                self._take_shards(shard_of, unit)
        for copy in self.copies.values():
            copy.share_values(self._control.transport)
        if self._mesh is not None:
            self._module_parameters = OwnParameters(self._assembly, is_sharded=True)

    def _take_shards(self, shard_of: Mapping[nn.Parameter, nn.Parameter], unit: Unit) -> None:
        if unit.gradients.attribute == MAIN_GRAD:
            have_main(shard_of.values())
        for group, copy in self.copies.items():
            shards_by_name = {name: shard_of.get(parameter, parameter) for name, parameter in copy.parameters.items()}
            self.copies[group] = replace(copy, parameters=shards_by_name)
        for stage in unit.stages:
            stage.parameters()  # what it has noted of the modules holds whole parameters alive

    @contextmanager
    def no_sync(self, *, tied: bool) -> Iterator[None]:
        """Average no gradients over replicas in the steps within; without `tied`, sum none over ranks either."""
        outer = self.is_synced, self.sums_tied
        self.is_synced, self.sums_tied = False, self.sums_tied and tied
        try:
            yield
        finally:
            self.is_synced, self.sums_tied = outer

    def proposed(self, *, is_training: bool) -> dict[str, Any]:
        """Return the fields of a `StepProposal` that say which parameters a step trains, and how."""
        no_sync = "none" if self.is_synced else "no_sync()" if self.sums_tied else "no_sync(tied=False)"
        scale = 0.0 if self._scaler is None else self._scaler.scale
        trained = {"trained": self.trained(), "scale": scale} if is_training else {}
        return trained | {"no_sync": no_sync}

    def refresh(self) -> PenstockError | None:
        """Take in parameters that were replaced; return why they cannot be trained in the next step, if they cannot."""
        try:
            self._module_parameters.refresh()
            for copy in self.copies.values():
                copy.refuse_hooks()
            if not self.is_synced and self.sums_tied and self.copies and self.reduce_stage is not None:
                raise ConfigError(
                    "no_sync() does not go with reduce_stage and parameters that are tied over ranks: while a step "
                    "runs, their gradients of the steps before are set aside, so reduce_stage would not see them. "
                    "Average in every step, or average after the last step instead of in reduce_stage",
                    key="reduce_stage",
                )
        except PenstockError as error:
            return error
        return None

    def held(self) -> Held:
        """Return what is held now beside the parameters of the modules and their gradients."""
        tensors_of_units = {unit.stages[0].index: unit.layout.held() for unit in self.units}
        parameters = {stage: tensors for stage, (tensors, _) in tensors_of_units.items()}
        gradients = {stage: tensors for stage, (_, tensors) in tensors_of_units.items()}
        if self._exchanges is None:
            return Held(parameters, gradients)
        kept_bytes = 0 if self.is_sharded else self._exchanges.kept_bytes
        return Held(parameters, gradients, self._exchanges.buffers(), kept_bytes)

    def trained(self) -> int:
        """Return a digest of which parameters need gradients, which callers may change between steps.

        `ALL_FROZEN` if none does, 0 without parameters.
        """
        needed = "".join(["01"[parameter.requires_grad] for _, parameter in self._module_parameters.named_parameters])
        return digest(needed) if "1" in needed else ALL_FROZEN * bool(needed)

    def agree_on_tied(self, trained: int) -> None:
        """Compare the copies of tied parameters once more if any rank trains others than in the step before."""
        if trained != self._trained:
            copies_of_ranks = self._control.all_gather_object(described_copies(self.copies))
            require_equal_kinds(copies_of_ranks, self._control.names)
            self._trained = trained

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Run a step in here; one that fails leaves nothing behind."""
        try:
            for unit in self.units:
                unit.layout.begin_step(is_synced=step.is_synced, sums_tied=step.sums_tied, is_training=step.is_training)
                if step.is_training:
                    unit.gradients.begin_step()
                    copies = [self.copies[group] for group in unit.tied_groups] if step.sums_tied else ()
                    unit.shared_gradients.set_aside(param for copy in copies for param in copy.trained().values())
            yield
        except BaseException:
            for unit in self.units:
                unit.layout.end_failed_step()
            raise
        finally:
            for unit in self.units:
                unit.layout.end_step()
                unit.gradients.end_step()
                unit.shared_gradients.end_step()

    def store_of(self, group: int) -> StoredGradients:
        """Return where the gradients of this rank's copy of a tied group are."""
        return next(unit.shared_gradients for unit in self.units if group in unit.tied_groups)

    def step_optimizer(self) -> None:
        """End a training step's program: the scalers of all ranks agree before any optimizer is stepped."""
        if self._scaler is not None:
            self._scaler.share(parameter for _, parameter in self._assembly.named_parameters())
        if self._optimizer_step is not None:
            self._optimizer_step()

    def _unit_of(self, stages: Sequence[Stage], attribute: str) -> Unit:
        """Make the unit of some stages of this rank that share parameters, with its gradient store and its layout.

        `attribute` is where a parameter has its gradient, `grad` or `main_grad`. A layout says which part of the
        parameters each replica (data-parallel copy of the pipeline) has, and how gradients are combined over replicas:

        * Sharded: a replica holds some rows, gathers the others, and reduces gradients by a scattered sum;
        * Summed: each replica holds all, and the pipeline sums the gradients;
        * Averaged: each replica holds all, and a wrapper of the user's averages, such as DistributedDataParallel;
        * FullySharded: torch's `fully_shard` holds rows, gathers and reduces;
        * ParameterLayout: the pipeline combines nothing.
        """
        # Find the tied groups (parameters that several ranks of the pipeline copy) with a member in this unit.
        local_ids = {id(part) for stage in stages for part in (*stage.parameters(), *stage.modules)}
        ids_by_group = {
            group: {*map(id, copy.parameters.values()), *map(id, copy.layers)} for group, copy in self.copies.items()
        }
        groups = [group for group, ids in ids_by_group.items() if local_ids & ids]
        # Gradients of tied parameters are summed over ranks also within no_sync(), unless it says tied=False. `Summed`
        # and `Averaged` combine them over replicas before; `Sharded` reduces all gradients in each step anyway.
        tied_ids = frozenset[int]().union(*(ids_by_group[group] for group in groups))
        parts = {stage.index: StageParts(stage.parameters, stage.modules) for stage in stages}
        if self._mesh is not None:
            assert self._exchanges is not None
            # There are two stores: backwards add to the gradients of whole parameters, and this replica's rows of their
            # sums go to the gradients of the shards. The lambda is first called when `sharded` is set.
            shard_gradients = ShardGradients(attribute)
            gradients = GradientStore(lambda: sharded.unsharded_parameters(), attribute)
            sharded = Sharded(parts, gradients, shard_gradients.add, self._exchanges, self._mesh, self._num_averaged)
            return Unit(stages, gradients, sharded, groups, shared_gradients=shard_gradients)
        fully_sharded = {stage.index: fully_sharded_modules(stage.modules) for stage in stages}
        all_fully_sharded = [*chain.from_iterable(fully_sharded.values())]
        if all_fully_sharded:
            gradients = WholeGradientStore(lambda: _parameters(stages), attribute, all_fully_sharded)
        else:
            gradients = GradientStore(lambda: _parameters(stages), attribute)
        layout: ParameterLayout
        ddp_modules = {stage.index: wrapped(stage.modules) for stage in stages}
        if self._exchanges is not None:
            layout = Summed(parts, gradients, tied_ids, self._exchanges, self._num_averaged)
        elif any(ddp_modules.values()):
            layout = Averaged(ddp_modules, gradients, tied_ids, lambda: self._control.transport.deadline_s)
        else:
            layout = ParameterLayout()
        if all_fully_sharded:
            layout = FullySharded(fully_sharded, gradients, layout)
        return Unit(stages, gradients, layout, groups, shared_gradients=gradients)


def sharing(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Put together the stages of a rank that share parameters."""
    groups: list[list[Stage]] = []
    for stage in stages:
        ids = set(map(id, stage.parameters()))
        joined = [group for group in groups if ids.intersection(map(id, _parameters(group)))]
        groups = [group for group in groups if group not in joined] + [[*chain(*joined), stage]]
    return groups


def units_report(assembly: Assembly) -> SetupReport:
    """Return which stages of this rank are one unit, for the other ranks."""
    return {"units": [sorted(stage.index for stage in stages) for stages in sharing(assembly.stages)]}


def units_of(reports: Sequence[SetupReport]) -> Units:
    """Return the units of several stages that all ranks have told of."""
    return tuple(sorted({tuple(unit) for report in reports for unit in report["units"] if len(unit) > 1}))


def _parameters(stages: Iterable[Stage]) -> list[nn.Parameter]:
    """Return the parameters that some stages hold now, each once."""
    return list({id(param): param for stage in stages for param in stage.parameters()}.values())
