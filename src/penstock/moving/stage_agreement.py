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
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.world import shares_process
from penstock.ir.schedule import Schedule
from penstock.partition.split import split_over
from penstock.placement import Placement

Pair = tuple[str, str]


def agree_on_stages(transport: Transport, own: Mapping[int, nn.Module], schedule: Schedule) -> list[Pair]:
    """Make sure that every rank brings the stages that the schedule places there; a collective.

    Returns, with two routes, the names of parameters that a rank holds as one object in two parts of the model: what
    all ranks must treat as tied, since both parts have copies elsewhere.

    Raises:
        PipelineError: the ranks have different schedules.
        PartitionError: on every rank alike, naming the rank, its stage and the first difference.
    """
    has_copies = len(schedule.placement.routes) > 1
    parts = parts_of_stages(schedule.placement) if has_copies else []
    everyone = Control(transport).together(
        lambda: {
            "setup": {"schedule": f"{schedule!r} #{digest(schedule.to_csv()):x}"},
            # An identity within this process, and every parameter and buffer.
            "stages": {
                str(stage): [id(module), TiedCopy(dict(module.named_parameters()), (), [module]).describe()]
                for stage, module in sorted(own.items())
            },
            "shared": _shared({stage: own[stage] for stage in own if stage < len(parts)}, parts),
        }
    )
    require_equal([theirs["setup"] for theirs in everyone])
    described: dict[int, Any] = {}
    for rank, theirs in enumerate(everyone):
        found, wanted = sorted(map(int, theirs["stages"])), list(schedule.placement.stages_of_rank[rank])
        if found != wanted:
            drawn = " | ".join(" ".join(map(str, stages)) for stages in schedule.placement.stages_of_rank)
            raise PartitionError(
                f"rank {rank} brings the stages {found}, but {schedule.name} with {schedule.num_stages} stages places "
                f"{wanted} there; bring these (in all: {drawn}), or use another schedule"
            )
        described |= {int(stage): module for stage, module in theirs["stages"].items()}
    if not has_copies:
        return []
    for stage, part in enumerate(parts):
        first = parts.index(part)
        if first != stage:
            _require_copies(described, first, stage, schedule.placement, in_one_process=shares_process(transport))
    return _agreed_pairs([theirs["shared"] for theirs in everyone], schedule.placement, parts)


def parts_of_stages(placement: Placement) -> list[int]:
    """Return per stage the part of the model that it runs: its place on its route.

    Raises:
        PartitionError: the routes differ in length.
    """
    return [part.start for part in split_over(placement, len(placement.routes[0]))]


def _require_copies(
    described: Mapping[int, Any], first: int, other: int, placement: Placement, *, in_one_process: bool
) -> None:
    """Two copies on one rank are one module, on two ranks modules of the same form."""
    first_rank, rank = placement.rank_of_stage[first], placement.rank_of_stage[other]
    (identity, expected), (other_identity, found) = described[first], described[other]
    if first_rank == rank:
        if identity != other_identity:
            raise PartitionError(
                f"rank {rank}: the stages {first} and {other} are two copies of one part of the model, and both here, "
                "but two modules are given; give the same module for both"
            )
        return
    for both in zip_longest(expected, found, fillvalue=("nothing more", "")):
        wanted, brought = (" ".join(named).rstrip() for named in both)
        if wanted != brought:
            raise PartitionError(
                f"rank {rank} brings, as stage {other}, a module with {brought}, where the other copy of this part of "
                f"the model, stage {first} of rank {first_rank}, has {wanted}; bring modules with the same parameters "
                "and buffers for both"
            )
    # Ranks that are threads would add to the gradients of one module at the same time.
    if in_one_process and identity == other_identity:
        raise PartitionError(
            f"rank {first_rank} and rank {rank} bring the very same module as the stages {first} and {other}; give "
            "each rank a module of its own"
        )


def _shared(own: Mapping[int, nn.Module], parts: Sequence[int]) -> list[Pair]:
    """Names of parameters of different parts that are one object on this rank."""
    names: dict[int, list[str]] = {}
    for stage in sorted(own, key=lambda stage: (parts[stage], stage)):
        for name, parameter in own[stage].named_parameters():
            full = f"{parts[stage]}.{name}"
            if full not in names.setdefault(id(parameter), []):
                names[id(parameter)].append(full)
    return [pair for same in names.values() for pair in combinations(same, 2)]


def _agreed_pairs(shared: Sequence[list[Any]], placement: Placement, parts: Sequence[int]) -> list[Pair]:
    """All ranks' pairs; a rank that holds both parts of a pair must hold one object, too."""
    everyone = [{(str(one), str(other)) for one, other in theirs} for theirs in shared]
    for rank, pair in ((rank, pair) for rank, pairs in enumerate(everyone) for pair in sorted(pairs)):
        needed = {int(name.partition(".")[0]) for name in pair}
        for other, stages in enumerate(placement.stages_of_rank):
            if needed <= {parts[stage] for stage in stages} and pair not in everyone[other]:
                raise PartitionError(
                    f"{pair[0]!r} and {pair[1]!r} are one parameter on rank {rank}, but two on rank {other}, which "
                    "holds the other copies of both; share them on both ranks, or on neither and name them in tied"
                )
    return sorted(set().union(*everyone))
