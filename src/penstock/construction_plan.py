"""The plan of one rank, made before it hears of the others: what runs, and with which of its layers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

import torch
from torch import nn

from penstock.errors import ConfigError
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
from penstock.execute.control.handshake import LocalFacts
from penstock.execute.control.hosts import host_of_processes
from penstock.execute.control.positions import PositionMemory
from penstock.execute.joining import Joined
from penstock.execute.losses.grad_scaler import describe_scale
from penstock.execute.losses.ignored import counted_targets
from penstock.execute.losses.loss import Loss, LossWeights, loss_scale
from penstock.execute.observing.shared_buffers import shared_buffers
from penstock.execute.options import PipelineOptions, refuse_unknown
from penstock.execute.replicas.mesh import require_sizes
from penstock.execute.stages.compiled_layers import without_wrappers
from penstock.execute.stages.layers import Layer, build_layer, layer_names
from penstock.execute.stages.names import layer_weight
from penstock.execute.stages.shared_builders import Build, build_own
from penstock.execute.stages.signatures import taken_keywords
from penstock.execute.stages.skips import skip_names
from penstock.execute.transport.places import DATA
from penstock.execute.transport.world import default_device, shares_process
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import Sharding
from penstock.partition.split import split_over
from penstock.planning import (
    DEFAULT_MICROBATCHES,
    LAYERS_PER_STAGE,
    ScheduleLike,
    count_stages_per_rank,
    resolve_plan,
)
from penstock.schedules import find_family, is_family_name
from penstock.version import VERSION


class Plan:
    """The plan of one rank, made before it hears of the others: what runs, and with which of its layers."""

    def __init__(
        self,
        joined: Joined,
        layers: Sequence[Layer],
        schedule: ScheduleLike,
        *,
        microbatches: int | None,
        loss: Loss | None,
        stages_per_rank: int | None,
        split: Sequence[int] | None,
    ) -> None:
        """Check the arguments of `Pipeline`, and decide what each rank runs: the schedule, and the split of the layers.

        `joined` has the options, which were checked before, and the connections to the other ranks; no message goes to
        them here. `loss`, `microbatches`, `stages_per_rank` and `split` are those of `Pipeline`, or None.

        Raises:
            ScheduleError, PartitionError, ConfigError: the schedule, the split or another argument is wrong.
        """
        self.options = options = joined.options
        self.deadline_s = joined.transport.deadline_s
        self.num_pipelines = joined.control.calls.num_pipelines
        self.num_replicas = joined.places.num_replicas
        self.mesh = f"{self.num_replicas} replicas of {joined.transport.num_ranks} ranks"
        self.device = default_device(joined.process_group) if options.device is None else torch.device(options.device)
        self.sharding = _sharding(joined, options, self.device)
        # By default a rank frees the layers of other ranks' stages, which it was given and does not run.
        shares_layers = any(map(shares_process, joined.places.transports))
        if options.frees_other_stages and shares_layers:
            raise ConfigError(
                "the ranks are threads of one process and share the layers, so none can be freed; leave it out",
                key="frees_other_stages",
            )
        self.frees_other_stages = options.frees_other_stages is not False and not shares_layers
        self.loss = loss
        require_loss(loss)
        self.loss_weights = LossWeights(options.reduction, options.count, counted_targets(loss))
        loss_scale(options.scale_loss)  # refuses what scales nothing
        # `orders` is the schedule, or a program that the user gives; `schedule` has its forwards and backwards alone.
        self.layers = list(map(without_wrappers, layer_list(layers)))
        if options.layers_per_stage is not None:
            for name, value in (("stages_per_rank", stages_per_rank), ("split", split)):
                if value is not None:
                    raise ConfigError(f"goes without {name}, which says the number of stages too", key=LAYERS_PER_STAGE)
            num_ranks = joined.transport.num_ranks
            stages_per_rank = count_stages_per_rank(schedule, len(self.layers), options.layers_per_stage, num_ranks)
        if options.microbatch_size is not None:
            _require_following_number(schedule, microbatches)
            # Stages are planned for a number that every family takes: DualPipe has two on their way per rank.
            microbatches = max(DEFAULT_MICROBATCHES, 2 * joined.transport.num_ranks)
        make_orders = partial(_resolved_schedule, joined, schedule, stages_per_rank=stages_per_rank)
        self._make_orders = make_orders if is_family_name(schedule) else None
        self.orders = make_orders(microbatches)
        self.schedule: Schedule = self.orders.actions()
        # Split the layers into stages by their weights, which are relative costs, or as `split` says.
        require_split(split)
        self.layer_names = layer_names(self.layers, names_of_children(layers))
        self.layer_weights = _layer_weights(self.layers, split, options)
        placement = self.schedule.placement
        self.layers_of_stage = split_over(placement, len(self.layers), weights=self.layer_weights, split=split)
        local_stages = placement.stages_of_rank[joined.transport.rank]
        # A stage without a next one is the last of its route, and computes the loss.
        self.computes_losses = any(placement.next_stage[stage] < 0 for stage in local_stages)
        # Two stages of a rank may be copies of one another, so a layer is listed once.
        self._local_indices = list(
            dict.fromkeys(index for stage in local_stages for index in self.layers_of_stage[stage])
        )

    def with_layers(self, build: Build = build_layer) -> Self:
        """Build this rank's layers."""
        built = build_own(self.layers, self.layer_names, self._local_indices, build)
        if self.schedule.num_slices > 1:
            _require_slices(built.local_layers, self.layer_names)
        self.local_layers, self.shared_parameters = built.local_layers, built.shared
        placement = self.schedule.placement
        rank_of_layer = [
            placement.rank_of_stage[stage] for stage in placement.routes[0] for _ in self.layers_of_stage[stage]
        ]
        self.shared_buffers = shared_buffers(
            {**built.remote_layers, **built.local_layers},
            dict.fromkeys(self._local_indices),
            self.layer_names,
            rank_of_layer,
        )
        return self

    def schedule_of(self, num_microbatches: int) -> Schedule | None:
        """Return the schedule of the family for a number of microbatches; None where the pipeline has none.

        It has none where its schedule was given whole, or where the family places stages otherwise for this number, or
        splits other backwards. Then the schedule that the pipeline was made for runs in rounds.

        Raises:
            ConfigError: the family takes no such number; the message says which it takes.
        """
        if num_microbatches == self.schedule.num_microbatches:
            return self.schedule
        if self._make_orders is None:
            return None
        schedule = self._make_orders(num_microbatches).actions()
        is_alike = schedule.placement == self.schedule.placement and schedule.split_stages == self.schedule.split_stages
        return schedule if is_alike else None

    def setup(self) -> dict[str, str | None]:
        """Return the settings of this rank that must be equal on all ranks, as texts, for the ranks to compare.

        An error shows the texts of two ranks that differ. None means that this rank does not use a setting, so that the
        other ranks may have any value.
        """
        options = self.options
        return {
            "version": VERSION,
            "schedule": f"{self.orders!r} #{self.orders.digest()[:12]}",
            "layers": ", ".join(self.layer_names),
            "split": ", ".join(str(len(layers)) for layers in self.layers_of_stage),
            "loss": describe_function(self.loss),
            "reduction": options.reduction,
            "count": describe_function(options.count) if self.computes_losses else None,
            "microbatch_size": str(options.microbatch_size),
            "scale_loss": describe_scale(options.scale_loss),
            "allow_ragged": str(options.allow_ragged),
            "specs": describe_specs(options.specs),
            "slice_dim": str(options.slice_dim),
            "slice_specs": describe_specs(options.slice_specs),
            # The pairs stay in the order of the caller, since ranks number tied groups by it.
            "tied": ", ".join(" = ".join(sorted(pair)) for pair in options.tied) or "none",
            "optimizer_step": describe_function(options.optimizer_step),
            "seed": str(options.seed),
            "check_batches": str(options.check_batches),
            "messages": options.messages,
            "one_stream": str(options.one_stream),
            "offload": ", ".join(map(str, options.offload)) or "none",
            "variable_shapes": str(options.variable_shapes),
            "main_gradients": str(options.main_gradients),
            "debug": options.debug,
            "deadline_s": f"{self.deadline_s:g}",
            "device": self.device.type,
            "mesh": self.mesh,
            "shard": f"{options.shard}, residency {options.residency}, look_ahead {options.look_ahead}",
            "replica_gradients": options.replica_gradients,
        }

    def local_facts(self, memory: PositionMemory) -> LocalFacts:
        """Return what this rank contributes to what all know."""
        layers = self.local_layers
        return LocalFacts(
            keywords=sorted({name for layer in layers.values() for name in taken_keywords(layer).names()}),
            skips={str(index): skip_names(layer) for index, layer in layers.items()},  # JSON has texts as keys
            shared=self.shared_parameters,
            host=host_of_processes(),
            clock_host=self.options.clock.host,
            positions=memory.path,
            num_pipelines=self.num_pipelines,
        )


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


def _require_following_number(schedule: ScheduleLike, microbatches: int | None) -> None:
    """Refuse a size of microbatches beside their number, which follows from it. Raises: ConfigError."""
    if microbatches is not None:
        raise ConfigError("goes without microbatches, whose number follows from it", key="microbatch_size")
    if not is_family_name(schedule):
        raise ConfigError(
            "goes with the name of a family, which has a schedule for every number of microbatches; a schedule that is "
            "given whole has one number",
            key="microbatch_size",
        )


def _resolved_schedule(
    joined: Joined, schedule: ScheduleLike, microbatches: int | None, *, stages_per_rank: int | None
) -> Schedule | Program:
    """Return the schedule or program that the user means by a name, a file or an object, for the ranks at hand.

    Raises:
        ConfigError, FormatError: there is none, it does not fit the ranks, or its family has no such option.
    """
    options = joined.options
    require_schedule(schedule)
    # Options of a family, such as a number of warm-up steps, go with the name of a family alone. `slices` is both: an
    # option of the pipeline, and of the families that know slices.
    family_options = dict(joined.family_options)
    if is_family_name(schedule):
        refuse_unknown(family_options, schedule, find_family(schedule).all_options)
        if options.slices is not None:
            family_options["slices"] = options.slices
    else:
        refuse_unknown(family_options, "a schedule that is given whole", ())
    # A mesh says how many ranks a pipeline has, so a whole schedule must be for this number.
    if joined.has_mesh and isinstance(schedule, Schedule | Program):
        require_sizes(joined.places, schedule.num_ranks)
    resolved = resolve_plan(
        schedule,
        ranks=joined.transport.num_ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        options=family_options,
    )
    require_slices(resolved, options.slices)
    return resolved


def _require_slices(built: Mapping[int, nn.Module], names: Sequence[str]) -> None:
    """Refuse layers that say that they cannot run a part of a sequence. Raises: ConfigError."""
    for index, layer in built.items():
        if getattr(layer, "takes_slices", True) is False:
            raise ConfigError(
                f"layer {names[index]!r} makes masks and positions for whole sequences; leave slices out", key="slices"
            )


def _layer_weights(layers: Sequence[Layer], split: Sequence[int] | None, options: PipelineOptions) -> Sequence[float]:
    if options.weights is None:
        return list(map(layer_weight, layers))
    if split is not None:
        raise ConfigError("split says already which stage gets how many layers; pass one of the two", key="weights")
    return options.weights
