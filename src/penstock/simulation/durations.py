"""How long every instruction of a program keeps its rank busy: its launch, and what it does after it.

Gathers, reductions over replicas and copies keep it busy for their launch alone: they run beside its computations.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.collectives import GATHERS, LOADS_DATA, REDUCES_REPLICAS, UPDATES_WEIGHTS
from penstock.ir.hot import blocks
from penstock.ir.operations import IS_COMPUTE, IS_COPY, NUM_OPS, OPERATIONS, Group, Kind, Lane, Op
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.ir.whole import is_sharded, sums_of_units
from penstock.placement import Placement
from penstock.simulation.costs.costs import FIELD_OF_KIND, FIELD_OF_OP, Costs

IS_BESIDE = GATHERS | REDUCES_REPLICAS | IS_COPY
"""[NUM_OPS] which operations run beside the computations of their rank: exchanges of replicas in one queue, copies in
another."""
BESIDE = [op for op in Op if IS_BESIDE[op]]
IS_TIED = np.array([OPERATIONS[op].group is Group.TIED for op in Op])
IS_BUSY = IS_COMPUTE | (np.array([OPERATIONS[op].lane is Lane.COLLECTIVE for op in Op]) & ~IS_BESIDE)
"""[NUM_OPS] which operations keep their rank busy. Their launch is host time before them, and no part of them."""


def durations_s(program: Program, costs: Costs) -> NDArray[np.float64]:
    """[num_instructions] seconds: what a computation, a tied reduction or the optimizer takes, and a launch of each.

    Raises:
        ConfigError: if the costs are for another number of stages or tied groups, or do not know a kind that the
            program runs.
    """
    seconds = seconds_of_rows(program, costs, seconds_of_ops(program, costs))
    seconds[loaded_before(program)] = costs.launch_s
    if program.tied_groups:
        tied_reductions = program.rows_of(IS_TIED)
        seconds_of_group = costs.spread_out("tied_reduce_s", len(program.tied_groups), "tied group")
        seconds[tied_reductions] += np.array(seconds_of_group)[program.peer[tied_reductions]]
    return seconds


def loaded_before(program: Program) -> NDArray[np.intp]:
    """Return the LOADs of microbatches that an earlier LOAD of their rank has brought, whole: they do nothing."""
    loads = program.rows_of(LOADS_DATA)
    place = program.rank_of_row[loads].astype(np.int64) * program.num_microbatches + program.microbatch[loads]
    first = np.zeros(len(loads), np.bool_)
    first[np.unique(place, return_index=True)[1]] = True
    return loads[~first]


def seconds_of_ops(table: Table, costs: Costs) -> NDArray[np.float64]:
    """[num_ops, num_stages] seconds by operation and stage, without launches and factors; NaN for unknown kinds.

    Raises:
        ConfigError: as `durations_s`.
    """
    seconds = costs.durations_s(table.num_stages, table.split_stages if costs.split_forward_s else ())
    _require_known(table, seconds, costs)
    for op, name in FIELD_OF_OP.items():
        if op not in BESIDE:
            seconds[op] = costs.per_stage(name, table.num_stages)
        if UPDATES_WEIGHTS[op]:
            seconds[op] = _sums_of_ranks(table.placement, seconds[op])
    return seconds


def seconds_beside(program: Program, costs: Costs) -> NDArray[np.float64]:
    """[num_ops, num_stages] seconds of what runs beside the ranks, by operation and stage.

    A collective of a stage that is sharded takes the seconds of all stages of its unit.
    """
    seconds, is_sharded_stage = np.zeros((NUM_OPS, program.num_stages)), is_sharded(program)
    for op in BESIDE:
        of_stages = costs.per_stage(FIELD_OF_OP[op], program.num_stages)
        is_of_unit = is_sharded_stage & bool(OPERATIONS[op].is_of_stage)
        seconds[op] = np.where(is_of_unit, sums_of_units(program, of_stages), of_stages)
    return seconds


def seconds_of_rows(table: Table, costs: Costs, seconds_of_op: NDArray[np.float64]) -> NDArray[np.float64]:
    """[num_rows] the seconds of operations with the factors of microbatches and pairs, and with launches."""
    seconds = np.empty(table.num_rows)
    for part in blocks(table.num_rows):
        np.take(seconds_of_op, table.op[part] * np.int32(table.num_stages) + table.stage[part], out=seconds[part])
    factors = costs.per_microbatch("microbatch_compute_factor", table.num_microbatches)
    if (factors != 1).any():
        computes = table.compute_rows()
        seconds[computes] *= factors[table.microbatch[computes]]
    if costs.overlap_factor != 1:
        first = np.flatnonzero(table.joined)
        seconds[first] *= costs.overlap_factor
        seconds[first + 1] *= costs.overlap_factor
    if costs.launch_s:
        seconds += costs.launch_s
    return seconds


def start_after_launch(table: Table, costs: Costs, start_s: NDArray[np.float64]) -> None:
    """Let computations and reductions start when they are launched, as in a measured timeline; changes `start_s`.

    An overlapped pair starts when both are launched.
    """
    if costs.launch_s:
        start_s[np.flatnonzero((IS_BUSY | REDUCES_REPLICAS)[table.op])] += costs.launch_s
        first = np.flatnonzero(table.joined)
        start_s[first] += costs.launch_s
        start_s[first + 1] += costs.launch_s


def _require_known(table: Table, seconds: NDArray[np.float64], costs: Costs) -> None:
    missing = [kind for kind in Kind if np.isnan(seconds[kind]).any() and Op(kind) in table.ops]
    if missing:
        row = int(np.flatnonzero(table.op == missing[0])[0])
        letters = " and ".join(f"{kind.letter}=" for kind in missing)
        raise costs.error(
            f"is missing, but {table.name} runs {table.row(row)}; give the seconds of every kind that runs "
            f"({letters} where costs are a text)",
            FIELD_OF_KIND[missing[0]],
        )


def _sums_of_ranks(placement: Placement, per_stage: NDArray[np.float64]) -> NDArray[np.float64]:
    """[num_stages] the seconds of all stages of the rank that holds the stage, as the optimizer takes."""
    ranks = np.array(placement.rank_of_stage)
    per_rank = np.bincount(ranks, weights=per_stage, minlength=placement.num_ranks)
    return np.asarray(per_rank[ranks])
