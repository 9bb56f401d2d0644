"""How long every instruction of a program keeps its rank busy: its launch, and what it does after it."""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.hot import blocks
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.simulation.costs.costs import FIELD_OF_KIND, Costs

REDUCTIONS = (Op.REDUCE_GRADIENT, Op.REDUCE_TIED)
IS_BUSY = np.array([op.is_compute or op in (*REDUCTIONS, Op.OPTIMIZER_STEP) for op in Op])
"""By operation: whether it keeps its rank busy. Its launch is host time before it, and no part of it."""


def durations_s(program: Program, costs: Costs) -> NDArray[np.float64]:
    """[num_instructions] seconds: what a computation, a reduction or the optimizer takes, and a launch for everything.

    Raises:
        ConfigError: if the costs are for another number of stages or tied groups, or do not know a kind that the
            program runs.
    """
    return durations_by_table(program, costs, seconds_by_op(program, costs))


def seconds_by_op(program: Program, costs: Costs) -> NDArray[np.float64]:
    """[num_ops, num_stages] seconds without launches, factors and overlap; NaN where unknown and not needed.

    Raises:
        ConfigError: as `durations_s`.
    """
    table = costs.durations_s(program.num_stages)
    _require_known(program, table, costs)
    if costs.split_forward_s:
        is_split = _splits_backwards(program)
        table[Kind.FORWARD, is_split] = costs.per_stage("split_forward_s", program.num_stages)[is_split]
    table[Op.REDUCE_GRADIENT] = costs.per_stage("reduce_s", program.num_stages)
    table[Op.OPTIMIZER_STEP] = _optimizer_s(program, costs)
    return table


def durations_by_table(program: Program, costs: Costs, table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the durations that the seconds of a table lead to."""
    seconds = np.empty(program.num_instructions)
    for part in blocks(program.num_instructions):
        np.take(table, program.op[part] * np.int32(program.num_stages) + program.stage[part], out=seconds[part])
    factors = costs.per_microbatch("microbatch_compute_factor", program.num_microbatches)
    if (factors != 1).any():
        computes = np.flatnonzero(program.is_compute)
        seconds[computes] *= factors[program.microbatch[computes]]
    if costs.overlap_factor != 1:
        first = np.flatnonzero(program.joined)
        seconds[first] *= costs.overlap_factor
        seconds[first + 1] *= costs.overlap_factor
    if program.tied_groups:
        tied = np.flatnonzero(program.op == Op.REDUCE_TIED)
        seconds[tied] = costs.per_tied_group(len(program.tied_groups))[program.peer[tied]]
    if costs.launch_s:
        seconds += costs.launch_s
    return seconds


def start_after_launch(program: Program, costs: Costs, start_s: NDArray[np.float64]) -> None:
    """Let what keeps its rank busy start when it is launched, as in a measured timeline; changes `start_s`.

    An overlapped pair starts when both are launched.
    """
    if costs.launch_s:
        start_s[np.flatnonzero(IS_BUSY[program.op])] += costs.launch_s
        first = np.flatnonzero(program.joined)
        start_s[first] += costs.launch_s
        start_s[first + 1] += costs.launch_s


def _splits_backwards(program: Program) -> NDArray[np.bool_]:
    """[num_stages] whether any backward of a stage runs in two parts."""
    found = np.zeros(program.num_stages, np.bool_)
    found[program.stage[program.op == Op.BACKWARD_INPUT]] = True
    return found


def _require_known(program: Program, table: NDArray[np.float64], costs: Costs) -> None:
    missing = [kind for kind in Kind if np.isnan(table[kind]).any() and (program.op == kind).any()]
    if missing:
        row = int(np.flatnonzero(program.op == missing[0])[0])
        letters = " and ".join(f"{kind.letter}=" for kind in missing)
        raise costs.error(
            f"is missing, but {program.name} runs {program.instruction(row)}; give the seconds of every kind that runs "
            f"({letters} where costs are a text)",
            FIELD_OF_KIND[missing[0]],
        )


def _optimizer_s(program: Program, costs: Costs) -> NDArray[np.float64]:
    """[num_stages] what the optimizer takes on all stages of the rank that holds the stage."""
    ranks = np.array(program.placement.rank_of_stage)
    per_stage = costs.per_stage("optimizer_s", program.num_stages)
    per_rank = np.bincount(ranks, weights=per_stage, minlength=program.num_ranks)
    return np.asarray(per_rank[ranks])
