"""How a pipeline comes to be: what runs, proved, and what this rank runs of it, built; agreed with the other ranks.

    plan         schedule, split, layers of this rank; no message
    exchange 1   how the rank was set up, which must be equal on all, and what it found in its layers
    assemble     stages; no message. With shards, exchange: which stages share parameters, since programs depend on it
    build        program, runner; no message
    exchange 2   which parameters are tied, and what their copies are like
    values       from the first replica, and of tied copies from their owners; sharded then

What is wrong on one rank only, such as a layer that cannot be built there, must not let the others wait: all that can
fail runs within the two exchanges, by which it fails on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.accelerator import has_events, is_queued
from penstock.execute.arguments import (
    describe_function,
    layer_list,
    names_of_children,
    require_loss,
    require_schedule,
    require_slices,
    require_split,
)
from penstock.execute.batch.microbatch import describe_specs
from penstock.execute.control.agreement import Mode
from penstock.execute.control.handshake import Agreed, Found, Setup, Told, require_equal, told_of
from penstock.execute.control.hosts import host_of_processes
from penstock.execute.control.positions import PositionMemory
from penstock.execute.joining import Joined
from penstock.execute.losses.grad_scaler import describe_scale, grad_scaler_of
from penstock.execute.losses.loss import Loss, LossWeights, loss_scale
from penstock.execute.observing.shared_buffers import shared_buffers
from penstock.execute.options import PipelineOptions, refuse_unknown
from penstock.execute.own_parameters import refuse_hooks
from penstock.execute.parameters.gradient_store import require_main_shapes
from penstock.execute.parameters.tied import described_copies, refuse_renormalized, require_equal_kinds
from penstock.execute.rank_parameters import Units, told_units, units_of
from penstock.execute.replicas.mesh import require_sizes
from penstock.execute.runner import Runner
from penstock.execute.stages.assemble import Assembly, assemble, with_skips
from penstock.execute.stages.carried import refuse_layers_that_look_back
from penstock.execute.stages.compiled_layers import compile_layers, without_wrappers
from penstock.execute.stages.held_state import described_state, require_equal_replicas
from penstock.execute.stages.layers import Layer, layer_names, spec_attribute
from penstock.execute.stages.other_layers import OtherLayers
from penstock.execute.stages.parameter_counts import count_parameters
from penstock.execute.stages.shared_builders import build_own, refuse_shared_objects
from penstock.execute.stages.signatures import taken_keywords
from penstock.execute.stages.skips import skip_names
from penstock.execute.stages.wrappers import (
    averages_gradients,
    refuse_reduced_twice,
    refuse_wrappers,
    unsplittable,
)
from penstock.execute.transport.places import DATA
from penstock.execute.transport.world import default_device, shares_process
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.split_backwards import with_split_backwards
from penstock.lowering import Sharding
from penstock.partition.split import ParameterCounts, split_over
from penstock.planning import ScheduleLike, memory_demand, prove_and_lower_once, resolve_plan
from penstock.proofs import prove_weight_order
from penstock.schedules import find_family, is_family_name
from penstock.version import VERSION

_LOOKING_BACK = (nn.MultiheadAttention, nn.RNNBase)
"""What is known to need more of the sequence than the slice at hand, and cannot carry it by itself."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """What `Pipeline` was called with, beside its options."""

    layers: Sequence[Layer]
    schedule: ScheduleLike
    microbatches: int | None
    stages_per_rank: int | None
    split: Sequence[int] | None
    loss: Loss | None


class Plan:
    """What one rank decides by itself before it hears of the others: what runs, and with which of its layers."""

    def __init__(self, joined: Joined, request: Request) -> None:
        """Look at all that was given, and build this rank's layers; no message to another rank."""
        self.options = options = joined.options
        self.deadline_s = joined.transport.deadline_s
        self.num_replicas = joined.places.num_replicas
        self.mesh = f"{self.num_replicas} replicas of {joined.transport.num_ranks} ranks"
        self.device = _device_of(joined, options)
        self.sharding = _sharding(joined, options, self.device)
        if options.frees_other_stages and any(map(shares_process, joined.places.transports)):
            raise ConfigError(
                "the ranks are threads of one process and share the layers, so none can be freed; leave it out",
                key="frees_other_stages",
            )
        self.loss = request.loss
        require_loss(self.loss)
        self.loss_weights = LossWeights(options.reduction, options.count)
        loss_scale(options.scale_loss)  # refuses what scales nothing
        self.given = _resolve(joined, request)
        self.schedule: Schedule = self.given.actions()
        require_split(request.split)
        layers = list(map(without_wrappers, layer_list(request.layers)))
        self.layer_names = layer_names(layers, names_of_children(request.layers))
        self.layer_weights = _weights(layers, request.split, options)
        placement = self.schedule.placement
        self.layers_of_stage = split_over(placement, len(layers), weights=self.layer_weights, split=request.split)
        own_stages = placement.stages_of_rank[joined.transport.rank]
        self.computes_losses = any(placement.next_stage[stage] < 0 for stage in own_stages)
        own = dict.fromkeys(index for stage in own_stages for index in self.layers_of_stage[stage])
        self.layers = layers
        built = build_own(layers, self.layer_names, list(own))
        self.built, self.shared_parameters = built.own, built.shared
        rank_of_layer = [
            placement.rank_of_stage[stage] for stage in placement.routes[0] for _ in self.layers_of_stage[stage]
        ]
        self.shared_buffers = shared_buffers({**built.seen, **built.own}, own, self.layer_names, rank_of_layer)

    def setup(self) -> Setup:
        """Return what must be equal on all ranks."""
        options = self.options
        return Setup(
            version=VERSION,
            schedule=f"{self.given!r} #{self.given.digest()[:12]}",
            layers=", ".join(self.layer_names),
            split=", ".join(str(len(layers)) for layers in self.layers_of_stage),
            loss=describe_function(self.loss),
            reduction=options.reduction,
            count=describe_function(options.count) if self.computes_losses else None,
            scale_loss=describe_scale(options.scale_loss),
            allow_ragged=str(options.allow_ragged),
            specs=describe_specs(options.specs),
            slice_dim=str(options.slice_dim),
            slice_specs=describe_specs(options.slice_specs),
            # In the order of the caller, by which tied groups are numbered.
            tied=", ".join(" = ".join(sorted(pair)) for pair in options.tied) or "none",
            optimizer_step=describe_function(options.optimizer_step),
            seed=str(options.seed),
            check_batches=str(options.check_batches),
            variable_shapes=str(options.variable_shapes),
            main_gradients=str(options.main_gradients),
            debug=options.debug,
            deadline_s=f"{self.deadline_s:g}",
            device=self.device.type,
            mesh=self.mesh,
            shard=f"{options.shard}, residency {options.residency}, look_ahead {options.look_ahead}",
        )

    def found(self, memory: PositionMemory) -> Found:
        """Return what this rank contributes to what all know."""
        own = self.built
        return Found(
            keywords=sorted({name for layer in own.values() for name in taken_keywords(layer).names()}),
            skips={str(index): skip_names(layer) for index, layer in own.items()},  # JSON has texts as keys
            shared=self.shared_parameters,
            host=host_of_processes(),
            clock_host=self.options.clock.host,
            positions=memory.path,
        )


def _device_of(joined: Joined, options: PipelineOptions) -> torch.device:
    """Return where this rank's stages live. Raises: ConfigError, where options cannot be had there."""
    device = default_device(joined.process_group) if options.device is None else torch.device(options.device)
    if options.run_ahead is not None and is_queued(device) and not has_events(device):
        raise ConfigError(
            f"devices of kind {device.type!r} have no events, by which a host knows how far it is ahead; leave it out",
            key="run_ahead",
        )
    return device


def _sharding(joined: Joined, options: PipelineOptions, device: torch.device) -> Sharding:
    """Return how programs are sharded. Raises: ConfigError, where there is no such way, or no mesh for it."""
    sharding, mesh = Sharding(options.shard, options.residency, options.look_ahead), joined.places.mesh
    if not sharding.passes:
        return sharding
    if mesh is None:
        raise ConfigError(
            f"{options.shard!r} needs the ranks to share with: pass mesh= a DeviceMesh with the dimension {DATA!r}, "
            "which may be of size 1",
            key="shard",
        )
    if mesh.device_type != device.type:
        raise ConfigError(
            f"it is of devices of kind {mesh.device_type!r}, but the stages are on {device.type!r}, where their shards "
            f"must be; make it with init_device_mesh({device.type!r}, ...)",
            key="mesh",
        )
    return sharding


class Programs:
    """What each mode of a pipeline runs; lowered and proved when it is asked for."""

    def __init__(self, plan: Plan, tied_groups: Sequence[Sequence[int]], units: Units) -> None:
        """Lower what training runs."""
        self._plan = plan
        self._tied_groups = tied_groups
        self._sharding = replace(plan.sharding, units=units)
        self.training = self._lowered(plan.given)

    def of(self, mode: Mode, num_microbatches: int) -> Program:
        """Return what a mode runs on so many microbatches; only an evaluation may have fewer than the schedule."""
        schedule = self._plan.schedule
        match mode:
            case Mode.TRAIN:
                return self.training
            case Mode.EVALUATE if num_microbatches < schedule.num_microbatches:
                return self._lowered(schedule.forward_only().first_microbatches(num_microbatches))
            case Mode.EVALUATE:
                return self.training if self.training.is_forward_only else self._lowered(schedule.forward_only())
            case Mode.TRAIN_SPLIT:
                return self._lowered(with_split_backwards(schedule))

    def _lowered(self, schedule: Schedule | Program) -> Program:
        options = self._plan.options
        has_scaler = grad_scaler_of(options.scale_loss) is not None  # its ranks agree where optimizers step
        return prove_and_lower_once(
            schedule,
            memory_demand(options.memory_limit, options.costs, schedule, self._plan.layers_of_stage),
            tied_groups=self._tied_groups,
            optimizer_step=has_scaler or options.optimizer_step is not None,
            sharding=self._sharding,
        )


@dataclass(slots=True, eq=False)
class Construction:
    """A pipeline, as one rank has built it."""

    plan: Plan
    assembly: Assembly
    programs: Programs
    runner: Runner
    parameter_counts: ParameterCounts = field(default_factory=ParameterCounts)
    """Of the stages of all ranks."""
    unsplittable: str = ""
    """Why backwards may not be split on some rank; empty where they may be on all."""

    @property
    def other_layers(self) -> OtherLayers:
        """The layers of other ranks that this rank has."""
        return OtherLayers(self.plan.layers, self.plan.layer_names, self.plan.built)

    def told(self) -> Told:
        """Return what the other ranks must hear of it."""
        stages, copies = range(self.plan.schedule.num_stages), self.assembly.tied_copies
        # A copy that is not averaged over replicas would spoil the sum of those that are.
        reduce_stage = describe_function(self.plan.options.reduce_stage) if copies else None
        is_sharded = self.plan.options.is_sharded
        return {
            "setup": {"tied": f"stages {self.assembly.tied_groups}", "reduce_stage": reduce_stage},
            "copies": described_copies(copies),
            "parameters": count_parameters(self.assembly),
            "unsplittable": unsplittable(self.assembly.stages, stages, "split_backwards=True"),
            "held": described_state(self.assembly.stages) if self.plan.num_replicas > 1 or is_sharded else {},
        }


def construct(joined: Joined, request: Request) -> Construction:
    """Make a pipeline together with all ranks, which call this alike.

    Raises:
        ScheduleError, PartitionError, ConfigError: if the schedule, the split or a setting is wrong.
        PipelineError: if the ranks were not set up alike.
    """
    places = joined.places
    with PositionMemory(places.names) as memory:
        plan, everyone = joined.exchange(
            lambda: Plan(joined, request), lambda plan: told_of(plan.setup(), plan.found(memory))
        )
        agreed = Agreed.of(everyone, places.names)
        if plan.options.is_sharded:
            assembly, everyone = joined.exchange(lambda: _assembled(joined, plan, agreed), told_units)
            units = units_of(everyone)
            made, everyone = joined.exchange(
                lambda: _built(joined, plan, agreed, memory, assembly, units), Construction.told
            )
        else:
            made, everyone = joined.exchange(
                lambda: _built(joined, plan, agreed, memory, _assembled(joined, plan, agreed)), Construction.told
            )
    require_equal([theirs["setup"] for theirs in everyone], places.names)
    require_equal_kinds([theirs["copies"] for theirs in everyone], places.names)
    made.parameter_counts = ParameterCounts.of_ranks([theirs["parameters"] for theirs in everyone])
    made.unsplittable = next((str(theirs["unsplittable"]) for theirs in everyone if theirs["unsplittable"]), "")
    if places.data is not None:
        require_equal_replicas([theirs["held"] for theirs in everyone], places)
    made.runner.parameters.take_first_values()
    if plan.options.frees_other_stages:
        made.other_layers.free()
    return made


def _assembled(joined: Joined, plan: Plan, agreed: Agreed) -> Assembly:
    """Make the stages of this rank; no message to another rank."""
    places, options, schedule = joined.places, plan.options, plan.schedule
    transport = places.pipeline
    refuse_shared_objects(agreed.shared, transport)
    assembly = assemble(
        plan.layers,
        schedule.placement,
        plan.layers_of_stage,
        transport.rank,
        device=plan.device,
        names=plan.layer_names,
        built=plan.built,
        tied=[*options.tied, *agreed.shared],
        shares_modules=shares_process(transport),
    )
    assembly = replace(assembly, shared_buffers=plan.shared_buffers)
    assembly = with_skips(assembly, plan.layers_of_stage, agreed.skips)
    named_layers = [named for stage in assembly.stages for named in stage.layers.items()]
    refuse_renormalized(named_layers, assembly.tied_copies.values())
    refuse_wrappers(assembly.stages, schedule, joined.ranks_of_group())
    if places.data is not None or options.is_sharded:
        refuse_reduced_twice(assembly.stages)
    if options.is_sharded:
        refuse_hooks(assembly.named_parameters())
    is_trained = plan.loss is not None and not schedule.is_forward_only
    if is_trained and options.reduce_stage is None:
        joined.require_one_model(is_averaged=averages_gradients(assembly.stages))
    compile_layers(assembly.stages, options.compile)
    queued = [stage.index for stage in assembly.stages if stage.own_weight_gradients.has_queues]
    if queued:
        prove_weight_order(schedule, queued)
    if schedule.num_slices > 1:
        refuse_layers_that_look_back(assembly.stages, _LOOKING_BACK)
    if options.main_gradients:
        require_main_shapes(assembly.named_parameters())
    return assembly


def _built(
    joined: Joined, plan: Plan, agreed: Agreed, memory: PositionMemory, assembly: Assembly, units: Units = ()
) -> Construction:
    """Make all that this rank runs; no message to another rank."""
    places, options, schedule = joined.places, plan.options, plan.schedule
    programs = Programs(plan, assembly.tied_groups, units)
    runner = Runner(
        places,
        plan.device,
        schedule,
        assembly,
        options,
        agreed.select(places.replica_of(places.replica)),
        memory.board(places.index, agreed.each("host"), agreed.each("positions")),
        loss=plan.loss,
        loss_weights=plan.loss_weights,
        program_of=programs.of,
    )
    return Construction(plan, assembly, programs, runner)


def _resolve(joined: Joined, request: Request) -> Schedule | Program:
    schedule, options = request.schedule, joined.options
    require_schedule(schedule)
    family_options: dict[str, Any] = joined.family_options
    if is_family_name(schedule):
        refuse_unknown(family_options, schedule, find_family(schedule).all_options)
        if options.slices is not None:
            family_options["slices"] = options.slices
    if joined.has_mesh and isinstance(schedule, Schedule | Program):
        require_sizes(joined.places, schedule.num_ranks)
    resolved = resolve_plan(
        schedule,
        ranks=joined.transport.num_ranks,
        microbatches=request.microbatches,
        stages_per_rank=request.stages_per_rank,
        options=family_options,
    )
    require_slices(resolved, options.slices)
    return resolved


def _weights(layers: Sequence[Layer], split: Sequence[int] | None, options: PipelineOptions) -> Sequence[float]:
    if options.weights is None:
        return [float(spec_attribute(layer, "weight", 1.0)) for layer in layers]
    if split is not None:
        raise ConfigError("split says already which stage gets how many layers; pass one of the two", key="weights")
    return options.weights
