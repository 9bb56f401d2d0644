"""Planning on one page: build, check, lower, check, simulate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.errors import ConfigError, PartitionError, ScheduleError, count_of
from penstock.ir.collectives import UPDATES_WEIGHTS
from penstock.ir.live import peak_bytes
from penstock.ir.program import Program
from penstock.ir.reading import read_file
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.ir.transports import COALESCED, POSTED
from penstock.ir.whole import is_sharded
from penstock.lowering import (
    NONE,
    NOT_SHARDED,
    Sharding,
    assign_slots,
    coalesce_messages,
    lower,
    post_receives_late,
)
from penstock.partition.split import count_stages, split_over
from penstock.placement import Placement
from penstock.proofs import NO_DEMAND, Demand, Proof, prove
from penstock.schedules import build, find_family, is_family_name
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.costs.equal_work import has_entry_per_rank, share_of_rank

T = TypeVar("T", Schedule, Program)
DEFAULT_MICROBATCHES = 8
LAYERS_PER_STAGE = "layers_per_stage"
ScheduleLike = str | Path | Schedule | Program
"""A family's name, the path of a file, a schedule, or a program."""
_PLAIN = (int, float, str, bool, NoneType)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A proved schedule, its proved program, and what is predicted of it."""

    schedule: Schedule
    program: Program
    timeline: Timeline


class RecentTables(Generic[T]):
    """The last few small tables that were made; an equal plan gets the table that is there.

    Pipelines are made again for other data or numbers of microbatches, and ranks that are threads plan alike.
    """

    def __init__(self, most: int = 8, most_rows: int = 100_000) -> None:
        self.most_rows = most_rows
        self._most = most
        self._tables: dict[tuple[Any, ...], T] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the table that `make` made for an equal key, or makes now."""
        table = self._tables.pop(key, None) or make()
        if table.num_rows <= self.most_rows:
            self._tables[key] = table  # the last one used comes last
        for oldest in list(self._tables)[: -self._most]:
            self._tables.pop(oldest, None)
        return table


PROGRAMS, SCHEDULES = RecentTables[Program](), RecentTables[Schedule]()
"""The recent tables of this process, for callers that bring none of their own."""


def plan(
    schedule: Schedule,
    costs: Costs,
    *,
    memory_limit: Any = None,
    tied_groups: Sequence[Sequence[int]] = (),
    optimizer_step: bool = False,
    shard: str = NONE,
    residency: int | None = 2,
    look_ahead: int = 1,
) -> Plan:
    """Prove a schedule, lower it to a program, prove the program, and simulate it with the given costs.

    `memory_limit` is the most that a rank may hold, in bytes or activations, as for `penstock.check`. The other
    arguments are those of `penstock.lower`. The result has the schedule, the program, and the predicted timeline.

    Raises:
        ScheduleError: if a proof fails; it lists every violation.
        ConfigError: as `penstock.lower`.
    """
    program = prove_and_lower(
        schedule,
        Demand.of(memory_limit, costs),
        tied_groups=tied_groups,
        optimizer_step=optimizer_step,
        sharding=Sharding(shard, residency, look_ahead),
    )
    return Plan(schedule, program, simulate(program, costs))


def prove_and_lower(
    plan: Schedule | Program,
    demand: Demand = NO_DEMAND,
    *,
    tied_groups: Sequence[Sequence[int]] = (),
    optimizer_step: bool = False,
    sharding: Sharding = NOT_SHARDED,
    messages: str = POSTED.name,
    offload: Sequence[int] = (),
) -> Program:
    """Prove a schedule, lower it to a program, and prove the program: all that must hold before a first step.

    A schedule has the forwards and backwards of each rank in order; a program has the messages and collectives, too. A
    `plan` that is a program already is proved and returned as it is, but it must suit the other arguments. `demand` is
    the limit of memory. `tied_groups` has the stages that hold copies of one parameter, per parameter. `sharding` says
    whether replicas shard parameters. `messages` is the transport model of the proofs; under "coalesced" the messages
    between two computations of a rank are launched together, also in a given program that has no groups. `offload` are
    the stages whose activations wait on the host.

    Raises:
        ScheduleError: if a proof fails; it lists every violation.
        ConfigError: if a program does not reduce these tied groups, has no optimizer step though there must be one, or
            does not gather what shall be sharded.
    """
    if isinstance(plan, Program):
        if offload:
            fix = "lower its schedule with offload=..., or give the schedule itself"
            problem = f"the program {plan.name} says itself what waits on the host"
            raise ConfigError(f"{list(offload)}, but {problem}; leave it out, {fix}", key="offload")
        if messages == COALESCED.name and not plan.has_groups:
            plan = coalesce_messages(plan)  # else the proof would have groups, and the step none
        # The user's program may have more stages gathered at once than `sharding` says: its memory is proved as it is.
        facts = prove(plan, demand, transport=messages).facts
        _require_gathers(plan, sharding)
        _require_fit(plan, tied_groups, optimizer_step=optimizer_step, omits_reductions=facts.omits_reductions)
        return plan
    # What waits on the host takes no memory there, which the proof of the program alone can know.
    proof = prove(plan, NO_DEMAND if offload else demand)
    options: dict[str, Any] = {"tied_groups": tied_groups, "optimizer_step": optimizer_step, **asdict(sharding)}
    program = lower(plan, transport=messages, start=proof.start, offload=offload, **options)
    if messages == COALESCED.name:
        program = _coalesced(program, proof)
    prove(program, replace(demand, residency=sharding.most_whole), transport=messages, earlier_proof=proof)
    return program


def _coalesced(program: Program, proof: Proof) -> Program:
    """Group the messages of a program, with receives in front of their consumers where it ends so, as under 1F1B."""
    late = coalesce_messages(post_receives_late(program))
    try:
        prove(late, transport=COALESCED.name, earlier_proof=proof)
    except ScheduleError:
        return coalesce_messages(program)
    return late


def prove_and_lower_once(
    plan: Schedule | Program,
    demand: Demand = NO_DEMAND,
    *,
    tied_groups: Sequence[Sequence[int]] = (),
    optimizer_step: bool = False,
    sharding: Sharding = NOT_SHARDED,
    messages: str = POSTED.name,
    offload: Sequence[int] = (),
    programs: RecentTables[Program] = PROGRAMS,
) -> Program:
    """Do what `prove_and_lower` does, or return the program that it made of an equal plan without a limit of memory."""
    options: dict[str, Any] = {"tied_groups": tied_groups, "optimizer_step": optimizer_step, "sharding": sharding}
    options |= {"messages": messages, "offload": tuple(offload)}
    if demand != NO_DEMAND or plan.num_rows > programs.most_rows:
        return prove_and_lower(plan, demand, **options)
    key = (type(plan), plan.name, plan.digest(), repr(options))
    return programs.once(key, lambda: prove_and_lower(plan, demand, **options))


def _build_once(name: str, options: Mapping[str, Any]) -> Schedule:
    """Build a family's schedule, or return what `build` returned of the same family and options in this process."""
    if not all(isinstance(value, _PLAIN) for value in options.values()):
        return build(name, **options)
    texts = sorted((key, repr(value)) for key, value in options.items())  # 1, 1.0 and True are equal, but not alike
    return SCHEDULES.once((name, find_family(name).generate, *texts), lambda: build(name, **options))


def _require_gathers(program: Program, sharding: Sharding) -> None:
    """Refuse a program that does not gather each stage that shall be sharded. Raises: ConfigError."""
    if sharding.shard == NONE:
        return
    missing = np.setdiff1d(program.stage[program.compute_rows()], np.flatnonzero(is_sharded(program))).tolist()
    units = tuple(unit for unit in sharding.units if len(unit) > 1)
    if missing:
        problem = f"never gathers stage {missing[0]}, but shard={sharding.shard!r} is given"
    elif tuple(unit for unit in program.units if len(unit) > 1) != units:
        problem = f"gathers the stages {program.units} together, but of the layers {units} share parameters on a rank"
    else:
        return
    fix = f"lower its schedule with shard={sharding.shard!r}"
    raise ConfigError(f"the program {program.name} {problem}; {fix}, or give the schedule itself", key="schedule")


def _require_fit(
    program: Program, tied_groups: Sequence[Sequence[int]], *, optimizer_step: bool, omits_reductions: bool
) -> None:
    """Refuse a program that is right, but not for this model and these options."""
    if program.is_forward_only:
        return
    groups = tuple(tuple(sorted(set(group))) for group in tied_groups)
    has_step = bool(len(program.rows_of(UPDATES_WEIGHTS)))
    if omits_reductions:
        problem, fix = "omits the reductions of its gradients", "lower its schedule with penstock.lower"
    elif program.tied_groups != groups:
        problem = f"reduces the tied groups {program.tied_groups}, but the layers tie the stages {groups}"
        fix = f"lower its schedule with tied_groups={groups}"
    elif optimizer_step and not has_step:
        problem = "has no optimizer step, but optimizer_step or a GradScaler is given"
        fix = "lower its schedule with optimizer_step=True"
    else:
        return
    raise ConfigError(f"the program {program.name} {problem}; {fix}, or give the schedule itself", key="schedule")


def stage_costs(costs: Costs | LayerCosts, table: Schedule | Program) -> Costs:
    """Return what the stages of a schedule or program cost; costs per layer are added up as `layers_of_stages` says.

    The stages of a rank share what has an entry per rank, as in `equal_work_costs`. One entry for all is that of each
    stage.

    Raises:
        PartitionError, ConfigError: as `layers_of_stages`.
    """
    if isinstance(costs, Costs):
        return share_of_rank(costs, table) if has_entry_per_rank(costs, table.placement) else costs
    return costs.of_table(table, layers_of_stages(costs, table.placement))


def equal_work_costs(costs: Costs | LayerCosts, schedule: Schedule, *, per_action: bool = False) -> Costs:
    """Return what one stage and slice of a schedule costs, where `costs` are those of a rank, of stages or of layers.

    So all schedules that get the same costs do equal work: this is what costs mean to `compare` and `search`. One entry
    is what every rank does for a microbatch, as many entries as ranks what each one does: its stages and slices share
    it. As many entries as stages are those of the stages. With `per_action`, costs are those of one action as they are.

    Raises:
        PartitionError, ConfigError: as `layers_of_stages`.
    """
    if isinstance(costs, LayerCosts):
        return stage_costs(costs, schedule)
    return costs if per_action else share_of_rank(costs, schedule)


def layers_of_stages(costs: LayerCosts, placement: Placement) -> tuple[range, ...]:
    """Return the layers of each stage for which costs per layer are added up.

    The split that the costs come with counts where it has as many stages as a route of the placement. Otherwise what a
    forward and a backward of each layer take is balanced over the stages, as `Pipeline` balances measured weights.

    Raises:
        PartitionError: if there are more stages than layers.
        ConfigError: if the costs do not say how many layers there are.
    """
    num_layers = costs.num_layers
    if costs.split and len(costs.split) == len(placement.routes[0]):
        return split_over(placement, num_layers, split=costs.split)
    return split_over(placement, num_layers, weights=costs.seconds_of_layers.sum(axis=0).tolist())


def memory_demand(
    memory_limit: Any, costs: Costs | LayerCosts | None, schedule: Schedule | Program, layers_of_stage: Sequence[range]
) -> Demand:
    """Return what is asked of the memory of a model's schedule; costs per layer are split as the model is."""
    costs_of_stages = costs.of_table(schedule, layers_of_stage) if isinstance(costs, LayerCosts) else costs
    return Demand.of(memory_limit, costs_of_stages)


def predict_peaks(
    program: Program, layers_of_stage: Sequence[range], layer_bytes: Mapping[str, Sequence[int]], *, shards: int = 1
) -> tuple[int, ...]:
    """Return the most bytes that each rank holds of layers of these sizes, which are named as in `LayerCosts`.

    Parameters, gradients and optimizer state are stored in so many `shards`.
    """
    fields: dict[str, Any] = {**layer_bytes, "shards": shards}
    costs = LayerCosts(**fields).of_stages(layers_of_stage)
    sizes = costs.stage_bytes(program.placement, program.num_microbatches)
    static = sizes.static_of_ranks(program.placement)
    return tuple((static + peak_bytes(program, sizes)).tolist())


def few_microbatches(program: Program) -> str | None:
    """Return what to tell users of a program with fewer microbatches than stages: its ranks wait for much of a step."""
    num_stages = max(len(route) for route in program.placement.routes)
    num_parts = program.num_microbatches * program.num_slices
    if num_parts >= num_stages or program.num_ranks == 1:
        return None
    bubble = simulate(program, Costs.uniform()).bubble_fraction
    return (
        f"{program.num_microbatches} microbatches for {num_stages} stages leave ranks idle for {bubble:.0%} of a step "
        f"(predicted for {program.name}, for stages that take equally long); use {num_stages} or more"
    )


def count_stages_per_rank(schedule: ScheduleLike, num_layers: int, layers_per_stage: int, ranks: int) -> int:
    """Return the stages of each rank where each stage has so many layers; those of both copies where there are two.

    Raises:
        ConfigError: the ranks cannot hold equally many stages, or there is no such family.
    """
    try:
        num_stages = count_stages(num_layers, layers_per_stage, ranks)
    except PartitionError as error:
        raise ConfigError(str(error), key=LAYERS_PER_STAGE) from error
    is_twice = is_family_name(schedule) and find_family(schedule).placement.startswith("bidirectional")
    return num_stages // ranks * (2 if is_twice else 1)


def resolve_plan(
    plan: ScheduleLike,
    *,
    ranks: int,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    options: Mapping[str, Any],
) -> Schedule | Program:
    """Return the schedule or program that `plan` means, for this number of ranks.

    `plan` is the name of a family of schedules, such as "1f1b", which is built with `options`; or the path of a file;
    or a schedule or program, which is returned as it is. Where `microbatches` is None, a family gets 8 of them, and a
    schedule or program keeps its own number. `stages_per_rank` may be None likewise.

    Raises:
        ConfigError: if there is no such name or file, or a schedule or program is for other numbers of ranks, stages
            per rank or microbatches.
        FormatError: if the file cannot be read as a schedule or a program.
    """
    if is_family_name(plan):
        number = DEFAULT_MICROBATCHES if microbatches is None else microbatches
        shape = {"ranks": ranks, "microbatches": number, "stages_per_rank": stages_per_rank}
        return _build_once(plan, {**shape, **options})
    if options:
        name = next(iter(options))
        raise ConfigError("unknown option; a schedule that is given whole takes no options of a family", key=name)
    table = plan if isinstance(plan, Schedule | Program) else _read(Path(plan))
    if table.num_ranks != ranks:
        raise ConfigError(
            f"{table.name} is for {table.num_ranks} ranks, but {ranks} run; start {table.num_ranks} processes, or "
            "give a schedule for as many ranks as run",
            key="schedule",
        )
    if microbatches not in (None, table.num_microbatches):
        raise ConfigError(
            f"{microbatches}, but {table.name} is for {table.num_microbatches} microbatches; make them equal",
            key="microbatches",
        )
    if stages_per_rank is not None and stages_per_rank * ranks != table.num_stages:
        raise ConfigError(
            f"{stages_per_rank}, but {table.name} has {count_of(table.num_stages, 'stage')} on "
            f"{count_of(ranks, 'rank')}; leave it out, since a schedule that is given whole has its own",
            key="stages_per_rank",
        )
    return table


def _read(path: Path) -> Schedule | Program:
    """Read a file; formats other than JSON hold no slots, so a program without any gets them."""
    plan = read_file(path)
    return assign_slots(plan) if isinstance(plan, Program) and not plan.slot.any() else plan
