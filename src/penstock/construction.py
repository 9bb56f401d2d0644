"""How a pipeline comes to be: what runs, proved, and what this rank runs of it, built; agreed with the other ranks.

    plan         schedule, split; no message. With shards, exchange: only replicas that are set up alike build together
    build        layers of this rank
    exchange 1   how the rank was set up, which must be equal on all, and what it found in its layers
    assemble     stages; no message. With shards, exchange: which stages share parameters, since programs depend on it
    build        program, runner; no message
    exchange 2   which parameters are tied, and what their copies are like
    values       from the first replica, and of tied copies from their owners; sharded then

An error on one rank only, such as a layer that cannot be built there, must not let the others wait: all that can fail
runs within the two exchanges, by which it fails on all ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from penstock.construction_plan import Plan
from penstock.errors import warn
from penstock.execute.arguments import describe_function
from penstock.execute.batch.needs import InputNeeds, batch_binding
from penstock.execute.control.handshake import AgreedFacts, SetupReport, require_equal, setup_report
from penstock.execute.control.positions import PositionMemory
from penstock.execute.joining import Joined
from penstock.execute.losses.loss import loss_scale, refuse_loss_parameters
from penstock.execute.losses.step_losses import LossMaker
from penstock.execute.losses.tails import takes_tail
from penstock.execute.own_parameters import refuse_hooks
from penstock.execute.parameters.gradient_store import require_main_shapes
from penstock.execute.parameters.tied import described_copies, refuse_renormalized, require_equal_kinds
from penstock.execute.rank_parameters import RankParameters, Units, units_of, units_report
from penstock.execute.replicas.early import EarlyShards
from penstock.execute.runner import Runner
from penstock.execute.session import Session
from penstock.execute.stages.assemble import Assembly, assemble, with_skips
from penstock.execute.stages.carried import refuse_layers_that_look_back
from penstock.execute.stages.compiled_layers import compile_layers
from penstock.execute.stages.deferred_tails import defer_tails
from penstock.execute.stages.held_state import count_parameters, described_state, require_equal_replicas
from penstock.execute.stages.other_layers import free_other_layers
from penstock.execute.stages.shared_builders import build_early, refuse_shared_objects
from penstock.execute.stages.wrappers import averages_gradients, refuse_reduced_twice, refuse_wrappers, unsplittable
from penstock.execute.transport.world import shares_process
from penstock.planning import few_microbatches
from penstock.proofs import prove_weight_order
from penstock.step_programs import StepPrograms

_LOOKING_BACK = (nn.MultiheadAttention, nn.RNNBase)
"""Layers that need more of the sequence than the slice at hand, and cannot carry it by themselves."""


def construct(joined: Joined, make_plan: Callable[[], Plan]) -> tuple[Runner, list[SetupReport]]:
    """Make the runner of this rank, together with all other ranks; return it and the reports of all ranks.

    Every rank calls this function. `make_plan` checks the user's arguments, and decides what this rank runs. A report
    has the `parameters` of a rank, as `count_parameters` returns them, and in `unsplittable` the reason why its
    backwards may not be split into input and weight gradients; empty where they may be.

    `joined.exchange(make, tell)` calls `make` on every rank, and returns its result and what `tell` says of the result
    on all ranks. If `make` fails on any rank, it raises on all of them, so that none waits for a rank that has failed.

    Raises:
        ScheduleError, PartitionError, ConfigError: if the schedule, the split or a setting is wrong.
        PipelineError: if the ranks were not set up alike.
    """
    places = joined.places
    # The memory in which the ranks of a host show each other where they are in a step, for errors and hangs.
    with PositionMemory(places.names) as memory:
        # First exchange: build this rank's layers; settings must be equal on all ranks.
        plan, reports = _plan_with_layers(
            joined, make_plan, lambda plan: setup_report(plan.setup(), plan.local_facts(memory))
        )
        agreed = AgreedFacts.of(reports, places.names)
        make_assembly: Callable[[], Assembly] = partial(_assembly_of, joined, plan, agreed)
        units: Units = ()
        if plan.options.is_sharded:
            # A unit, stages that share parameters, is gathered as one, so programs depend on the units of all ranks.
            assembly, reports = joined.exchange(make_assembly, units_report)
            make_assembly, units = (lambda: assembly), units_of(reports)
        # Second exchange: assemble stages, lower and prove the program; tied parameters must be alike on all ranks.
        runner, reports = joined.exchange(
            lambda: Runner(_session_of(joined, plan, agreed, memory, make_assembly(), units)),
            lambda runner: _report_of(plan, runner.session.assembly),
        )
    require_equal([report["setup"] for report in reports], places.names)
    require_equal_kinds([report["copies"] for report in reports], places.names)
    if places.data is not None:
        require_equal_replicas([report["state"] for report in reports], places)
    # Values come from the first replica, and those of tied copies from their owners.
    runner.session.parameters.take_first_values()
    # Where their number follows from their size, it is not known yet.
    advice = None if plan.options.microbatch_size else few_microbatches(runner.session.program)
    if advice is not None and places.index == 0:
        warn(advice)
    if plan.frees_other_stages:
        # At last, since a construction that fails must leave the layers as they were.
        free_other_layers(plan.layers, plan.local_layers)
    # What was compared is dropped: of many ranks it may take up much memory.
    return runner, [{name: report[name] for name in ("parameters", "unsplittable")} for report in reports]


def _plan_with_layers(
    joined: Joined, make_plan: Callable[[], Plan], tell: Callable[[Plan], SetupReport]
) -> tuple[Plan, list[SetupReport]]:
    """Plan and build this rank's layers; return what all ranks tell of theirs, too."""
    if not joined.options.is_sharded:
        return joined.exchange(lambda: make_plan().with_layers(), tell)
    plan, reports = joined.exchange(make_plan, lambda plan: {"setup": plan.setup()})
    require_equal([report["setup"] for report in reports], joined.places.names)
    build = build_early(EarlyShards(joined.control, plan.device))
    return joined.exchange(lambda: plan.with_layers(build), tell)


def _assembly_of(joined: Joined, plan: Plan, agreed: AgreedFacts) -> Assembly:
    """Make the stages of this rank from its layers, compile them if asked for, and refuse what cannot train so.

    `agreed` has the facts of all ranks: keywords, skips and shared parameters. No message goes to another rank.

    Raises:
        PartitionError, ConfigError, ScheduleError: a layer or an option does not go with the schedule, with replicas,
            with shards, or with another option.
    """
    options, transport = plan.options, joined.places.pipeline
    # Parameters that layers of several ranks share are tied: each rank has a copy. Where ranks are threads of one
    # process, they would share the parameter itself, and this is refused.
    refuse_shared_objects(agreed.shared, transport)
    assembly = assemble(
        plan.layers,
        plan.schedule.placement,
        plan.layers_of_stage,
        transport.rank,
        device=plan.device,
        names=plan.layer_names,
        built=plan.local_layers,
        tied=[*options.tied, *agreed.shared],
        shares_modules=shares_process(transport),
    )
    assembly = replace(assembly, shared_buffers=plan.shared_buffers)
    # A skip is a value that a layer sends past the next ones, to a layer further on.
    assembly = with_skips(assembly, plan.layers_of_stage, agreed.skips)
    _refuse_wrong_gradients(joined, plan, assembly)
    if takes_tail(plan.loss):
        defer_tails(assembly.stages, plan.schedule.placement)
    compile_layers(assembly.stages, options.compile)
    _refuse_layers_by_schedule(plan, assembly)
    # Gradients in float32 beside the parameters (`main_grad`) need shapes, which lazy parameters do not have yet.
    if options.main_gradients:
        require_main_shapes(assembly.named_parameters())
    return assembly


def _refuse_wrong_gradients(joined: Joined, plan: Plan, assembly: Assembly) -> None:
    """Refuse layers of this rank whose parameters would be changed or reduced by something besides the pipeline.

    Raises:
        PartitionError, ConfigError: naming the layer, the parameter or the option.
    """
    places, options, schedule = joined.places, plan.options, plan.schedule
    # Tied embeddings with `max_norm`: a lookup changes rows of the table, on each rank other ones.
    named_layers = [item for stage in assembly.stages for item in stage.layers.items()]
    refuse_renormalized(named_layers, assembly.tied_copies.values())
    # Wrappers that cannot have several microbatches under way, or that reduce over ranks which hold other stages.
    refuse_wrappers(assembly.stages, schedule, joined.ranks_of_group())
    # Wrappers that reduce over replicas, where the pipeline does so.
    if places.data is not None or options.is_sharded:
        refuse_reduced_twice(assembly.stages)
    # Hooks of sharded parameters, which never see a gradient: whole parameters take the place of the shards.
    if options.is_sharded:
        refuse_hooks(assembly.named_parameters())
    is_trained = plan.loss is not None and not schedule.is_forward_only
    # A pipeline of one rank among several where nothing averages: by mistake, each rank would train its own model.
    if is_trained and options.reduce_stage is None:
        joined.require_one_model(is_averaged=averages_gradients(assembly.stages))
    # A loss with parameters of its own, whose gradients nothing sums over the replicas.
    if is_trained and plan.computes_losses and places.num_replicas > 1:
        refuse_loss_parameters(plan.loss, (param for _, param in assembly.named_parameters()))


def _refuse_layers_by_schedule(plan: Plan, assembly: Assembly) -> None:
    """Refuse layers that cannot run in the order of the schedule, or on slices of a sequence.

    Raises:
        ScheduleError, ConfigError: naming the action or the layer.
    """
    schedule = plan.schedule
    # A layer that defers its weight gradients into a queue of its own (Transformer Engine) takes them off in the order
    # of its input gradients, so the schedule must have the weight actions of its stage in this order.
    queueing_stages = [stage.index for stage in assembly.stages if stage.own_weight_gradients.has_queues]
    if queueing_stages:
        prove_weight_order(schedule, queueing_stages)
    # Attention and recurrent layers need the slices before, which only some modules carry from call to call.
    if schedule.num_slices > 1:
        refuse_layers_that_look_back(assembly.stages, _LOOKING_BACK)


def _session_of(
    joined: Joined, plan: Plan, agreed: AgreedFacts, memory: PositionMemory, assembly: Assembly, units: Units
) -> Session:
    """Put together all that the `Runner` of this rank needs; no message goes to another rank.

    `memory` is shared by the ranks of a host, and has their positions in a step. `units` has the stages, of all ranks,
    that share parameters. The program of training is lowered and proved here.

    Raises:
        ScheduleError, ConfigError: the schedule or program cannot run, or does not fit the model.
    """
    places, options, placement = joined.places, plan.options, plan.schedule.placement
    return Session(
        places=places,
        device=plan.device,
        options=options,
        schedule=plan.schedule,
        layers_of_stage=plan.layers_of_stage,
        layer_names=plan.layer_names,
        layer_weights=plan.layer_weights,
        programs=StepPrograms(plan, assembly.tied_groups, units),
        assembly=assembly,
        parameters=RankParameters(joined.control, plan.device, assembly, options),
        losses=LossMaker(
            plan.loss,
            plan.loss_weights,
            loss_scale(options.scale_loss),
            is_last=plan.computes_losses,
            num_averaged=places.num_replicas if options.averages_replicas else 1,
        ),
        needs=InputNeeds.of(
            assembly.keyword_names(),
            placement,
            agreed.keywords,
            plan.device,
            has_loss=plan.loss is not None,
            binding=batch_binding(plan.layers),
        ),
        agreed=agreed.select(places.replica_of(places.replica)),
        board=memory.board(places.index, agreed.each("host"), agreed.each("positions")),
    )


def _report_of(plan: Plan, assembly: Assembly) -> SetupReport:
    """Return what the other ranks must hear of what this rank has built."""
    stages, copies = range(plan.schedule.num_stages), assembly.tied_copies
    # A copy that is not averaged over replicas would spoil the sum of those that are.
    reduce_stage = describe_function(plan.options.reduce_stage) if copies else None
    return {
        "setup": {"tied": f"stages {assembly.tied_groups}", "reduce_stage": reduce_stage},
        "copies": described_copies(copies),
        "parameters": count_parameters(assembly),
        "unsplittable": unsplittable(assembly.stages, stages, "split_backwards=True"),
        "state": described_state(assembly.stages) if plan.num_replicas > 1 or plan.options.is_sharded else {},
    }
