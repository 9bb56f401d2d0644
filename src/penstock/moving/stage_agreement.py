"""Compare the stages that the ranks bring before a pipeline is made of them: every stage once, and copies alike.

With two routes, part k of the model is stage k of the first route and stage k of the second one, a copy of it.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.execute.control.agreement import digest
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import require_equal
from penstock.execute.parameters.tied import TiedCopy
from penstock.execute.transport.places import Places
from penstock.execute.transport.world import shares_process
from penstock.ir.schedule import Schedule
from penstock.partition.split import split_over
from penstock.placement import Placement

Pair = tuple[str, str]


def agree_on_stages(places: Places, modules: Mapping[int, nn.Module], schedule: Schedule) -> list[Pair]:
    """Make sure that every rank brings the stages that the schedule places there; every rank of all replicas calls it.

    With two routes through the model, as in a bidirectional schedule, each part of the model is on two ranks. Then
    return the pairs of names of parameters that a rank holds as one object in two parts: all ranks must treat them as
    tied, since both parts have copies on another rank. With one route, return an empty list.

    Raises:
        PipelineError: the ranks have different schedules.
        PartitionError: on every rank alike, naming the rank, its stage and the first difference.
    """
    placement = schedule.placement
    part_of_stage = parts_of_stages(placement) if len(placement.routes) > 1 else []
    reports = Control.of(places).together(lambda: _rank_report(modules, schedule, part_of_stage))
    require_equal([report["setup"] for report in reports], places.names)
    in_one_process = shares_process(places.pipeline)
    ties_of_replicas = []
    for replica in range(places.num_replicas):
        replica_reports = [reports[index] for index in places.replica_of(replica)]
        try:
            ties_of_replicas.append(
                _ties_of_replica(replica_reports, schedule, part_of_stage, in_one_process=in_one_process)
            )
        except PartitionError as error:
            if places.num_replicas == 1:
                raise
            raise PartitionError(f"replica {replica}: {error}") from error
    return ties_of_replicas[places.replica]


def _ties_of_replica(
    reports: Sequence[Any], schedule: Schedule, part_of_stage: Sequence[int], *, in_one_process: bool
) -> list[Pair]:
    """Compare what the ranks of one replica bring, and return the pairs of names that are one parameter there."""
    placement = schedule.placement
    stage_reports: dict[int, Any] = {}
    for rank, report in enumerate(reports):
        stages, expected_stages = sorted(map(int, report["stages"])), list(placement.stages_of_rank[rank])
        if stages != expected_stages:
            placement_text = " | ".join(" ".join(map(str, stages)) for stages in placement.stages_of_rank)
            raise PartitionError(
                f"rank {rank} brings the stages {stages}, but {schedule.name} with {schedule.num_stages} stages places "
                f"{expected_stages} there; bring these (in all: {placement_text}), or use another schedule"
            )
        stage_reports |= {int(stage): stage_report for stage, stage_report in report["stages"].items()}
    # Two stages with the same part, of which there are some with two routes, must be modules with equal parameters.
    for stage, part in enumerate(part_of_stage):
        first_stage = part_of_stage.index(part)
        if first_stage != stage:
            _require_equal_copies(stage_reports, first_stage, stage, placement, in_one_process=in_one_process)
    return _agreed_pairs([report["shared"] for report in reports], placement, part_of_stage) if part_of_stage else []


def _rank_report(modules: Mapping[int, nn.Module], schedule: Schedule, part_of_stage: Sequence[int]) -> dict[str, Any]:
    """Return what this rank tells the others of its stages: plain values.

    Of each stage: the identity of its module within this process, and a line for every parameter and buffer.
    """
    return {
        "setup": {"schedule": f"{schedule!r} #{digest(schedule.to_csv()):x}"},
        "stages": {
            str(stage): [id(module), TiedCopy(dict(module.named_parameters()), (), [module]).describe()]
            for stage, module in sorted(modules.items())
        },
        "shared": _shared_parameter_pairs(
            {stage: module for stage, module in modules.items() if stage < len(part_of_stage)}, part_of_stage
        ),
    }


def parts_of_stages(placement: Placement) -> list[int]:
    """Return, per stage, the index of the part of the model that it runs, which is its position on its route.

    Raises:
        PartitionError: the routes differ in length.
    """
    return [part.start for part in split_over(placement, len(placement.routes[0]))]


def _require_equal_copies(
    stage_reports: Mapping[int, Any], first_stage: int, stage: int, placement: Placement, *, in_one_process: bool
) -> None:
    """Refuse two copies of a part of the model that differ.

    On one rank, both copies must be one module; on two ranks, they must have the same names, shapes and types of
    parameters and buffers. `stage_reports` has for each stage the id of its module and the texts of its tensors.

    Raises:
        PartitionError: with the first difference.
    """
    first_rank, rank = placement.rank_of_stage[first_stage], placement.rank_of_stage[stage]
    first_identity, first_tensors = stage_reports[first_stage]
    identity, tensors = stage_reports[stage]
    if first_rank == rank:
        if first_identity != identity:
            raise PartitionError(
                f"rank {rank}: the stages {first_stage} and {stage} are two copies of one part of the model, and both "
                "here, but two modules are given; give the same module for both"
            )
        return
    for tensor_pair in zip_longest(first_tensors, tensors, fillvalue=("nothing more", "")):
        expected, actual = (" ".join(tensor).rstrip() for tensor in tensor_pair)
        if expected != actual:
            raise PartitionError(
                f"rank {rank} brings, as stage {stage}, a module with {actual}, where the other copy of this part of "
                f"the model, stage {first_stage} of rank {first_rank}, has {expected}; bring modules with the same "
                "parameters and buffers for both"
            )
    # Ranks that are threads would add to the gradients of one module at the same time.
    if in_one_process and first_identity == identity:
        raise PartitionError(
            f"rank {first_rank} and rank {rank} bring the very same module as the stages {first_stage} and {stage}; "
            "give each rank a module of its own"
        )


def _shared_parameter_pairs(modules: Mapping[int, nn.Module], part_of_stage: Sequence[int]) -> list[Pair]:
    """Return pairs of names, in different parts of the model, that are one parameter object on this rank."""
    names_by_id: dict[int, list[str]] = {}
    for stage in sorted(modules, key=lambda stage: (part_of_stage[stage], stage)):
        for name, parameter in modules[stage].named_parameters():
            full_name = f"{part_of_stage[stage]}.{name}"
            names = names_by_id.setdefault(id(parameter), [])
            if full_name not in names:  # both copies of a part have the same names
                names.append(full_name)
    return [pair for names in names_by_id.values() for pair in combinations(names, 2)]


def _agreed_pairs(
    reported_pairs: Sequence[list[Any]], placement: Placement, part_of_stage: Sequence[int]
) -> list[Pair]:
    """Return the pairs of all ranks; a rank that holds both parts of a pair must hold one object, too."""
    pairs_by_rank = [{(str(first), str(second)) for first, second in pairs} for pairs in reported_pairs]
    parts_by_rank = [{part_of_stage[stage] for stage in stages} for stages in placement.stages_of_rank]
    for rank, pair in ((rank, pair) for rank, pairs in enumerate(pairs_by_rank) for pair in sorted(pairs)):
        pair_parts = {int(name.partition(".")[0]) for name in pair}
        for peer_rank, parts in enumerate(parts_by_rank):
            if pair_parts <= parts and pair not in pairs_by_rank[peer_rank]:
                raise PartitionError(
                    f"{pair[0]!r} and {pair[1]!r} are one parameter on rank {rank}, but two on rank {peer_rank}, which "
                    "holds the other copies of both; share them on both ranks, or on neither and name them in tied"
                )
    return sorted(set().union(*pairs_by_rank))
