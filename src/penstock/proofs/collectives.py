"""Proof 5: every gradient is reduced once and late enough, and all members of a group run its collectives in one order.

A training program reduces the gradient of each stage that has a backward and of each member of each tied group, and it
takes the optimizer step on all ranks or on none, as `lower` makes it. A unit of stages that are sharded may also reduce
what it has so far, before it is dropped, and reduces the rest behind its last backward. Two kinds of programs have none
of these: those that say so (`omits_reductions`), and those that only run forwards.

Tied reductions (members: the ranks of the tied stages), the optimizer step and BARRIER rows (members: all ranks) are
barriers: they join ranks of the pipeline. The n-th BARRIER rows of all ranks are one. Gradient reductions join replicas
of one stage, which run the same program, so only their own place counts.
"""

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import num_barriers_before
from penstock.ir.collectives import IS_BARRIER, IS_REDUCTION, JOINS_RANKS, REDUCES_REPLICAS
from penstock.ir.hot import Int32s, Int64s
from penstock.ir.operations import NEEDS_BACKWARD, OPERATIONS, Op
from penstock.ir.program import Program
from penstock.ir.whole import have_new_gradients, is_sharded
from penstock.proofs.report import Subject

REDUCES_STAGE = next(op for op in Op if REDUCES_REPLICAS[op])
"""The reduction that every stage needs."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """One collective that joins ranks: per member rank the rows that take part, in order."""

    rows: dict[int, list[int]]
    is_exchange: bool
    """Whether its members send their gradients to each other on the channels of the pipeline, as tied stages do."""


def check_collectives(subject: Subject) -> list[Barrier] | None:
    """Prove that every gradient is reduced once and that collectives can run; return the collectives that join ranks.

    Those are tied reductions (sums of the copies of one parameter on several ranks) and the optimizer step; reductions
    over replicas join no ranks of a pipeline. This function and its helpers add violations to `subject`; if there are
    any new ones, return None.
    """
    program = subject.program
    num_earlier_violations = len(subject.violations)
    last_backwards = program.last_backwards()
    # Gradients are reduced once and late enough; then find the collectives that join ranks, and the ranks in each.
    _check_reductions(subject, last_backwards)
    barriers = _find_barriers(subject)
    # A program that only runs forwards, or says that it omits its reductions, need not have them.
    is_complete = not program.is_forward_only and not leaves_reductions_out(program)
    # A unit (stages of a rank that share a sharded parameter) is reduced as one, so a reduction covers all its stages.
    if is_complete:
        reduced_stages = program.stage[program.op == REDUCES_STAGE]
        is_reduced = is_sharded(program) & np.isin(program.unit_of_stage, program.unit_of_stage[reduced_stages])
        is_reduced[reduced_stages] = True
        for stage in np.flatnonzero((last_backwards >= 0) & ~is_reduced).tolist():
            text = f"{stage}{OPERATIONS[REDUCES_STAGE].text}"
            problem = f"is the last backward of stage {stage}, whose gradient is never reduced; expected one {text}"
            subject.add(int(last_backwards[stage]), f"{problem} after it", f"Add {text} after it")
    # Members of a tied group all reduce or none; `barriers` has the step under the index behind the last group.
    for index in range(len(program.tied_groups)):
        if is_complete or index in barriers:
            _check_tied_members(subject, index, barriers.get(index))
    step_barrier = barriers.get(len(program.tied_groups))
    if step_barrier is not None:
        _check_step(subject, step_barrier)
    for number, barrier in barriers.items():
        if number > len(program.tied_groups):
            _check_all_wait(subject, barrier)
    # No deadlock: all members run the collectives that they share in one order, and nothing else contradicts it.
    if len(subject.violations) == num_earlier_violations:
        _check_total_order(subject, list(barriers.values()))
    return list(barriers.values()) if len(subject.violations) == num_earlier_violations else None


def leaves_reductions_out(program: Program) -> bool:
    """Whether a training program says that it omits its reductions, and holds none."""
    return program.omits_reductions and not len(program.rows_of(NEEDS_BACKWARD))


def _check_reductions(subject: Subject, last_backwards: Int64s) -> None:
    """Prove that each gradient is reduced once, after the last backward of its stage.

    `last_backwards` [num_stages] is the row of each stage's last backward, negative for none. Violations are added to
    `subject`. Reductions of sharded units, which may reduce what they have so far several times, are left to
    `_check_units`.
    """
    program = subject.program
    updates = program.rows_of(NEEDS_BACKWARD)
    reductions = program.rows_of(IS_REDUCTION)
    is_of_unit = is_sharded(program)[program.stage[reductions]] & REDUCES_REPLICAS[program.op[reductions]]
    unit_reductions = reductions[is_of_unit]
    _check_units(subject, last_backwards, unit_reductions)
    # Here and below, np.setdiff1d would import numpy.ma: a third of the time that a process waits for its first plan.
    reductions = reductions[~is_of_unit]
    for row in reductions[reductions < last_backwards[program.stage[reductions]]].tolist():
        last_row = int(last_backwards[program.stage[row]])
        place = subject.place(last_row, seen_from=row)
        subject.add(
            row,
            f"runs before {place}, the last backward of its stage: the gradient is not whole yet",
            f"Move it after {subject.text(last_row)}",
        )
    # A reduction without any backward has nothing to reduce.
    is_local = ~JOINS_RANKS[program.op[updates]] | program.is_forward_only
    for row in updates[is_local & (last_backwards[program.stage[updates]] < 0)].tolist():
        subject_name = "the program" if program.is_forward_only else f"stage {program.stage[row]}"
        subject.add(row, f"belongs to training, but {subject_name} has no backward", "Drop it")
    # A stage's gradient is reduced once over replicas, and once per tied group; group 0 stands for the replicas.
    is_tied = JOINS_RANKS[program.op[reductions]]
    group = np.where(is_tied, program.peer[reductions].astype(np.int64) + 1, 0)
    gradient = program.stage[reductions] + program.num_stages * group
    is_again = np.ones(len(gradient), np.bool_)
    is_again[np.unique(gradient, return_index=True)[1]] = False
    for index in np.flatnonzero(is_again).tolist():
        earlier = int(reductions[np.flatnonzero(gradient == gradient[index])[0]])
        problem = f"reduces the same gradient again as {subject.place(earlier)}"
        subject.add(int(reductions[index]), problem, "Drop one of the two")


def _check_units(subject: Subject, last: Int64s, reductions: NDArray[np.intp]) -> None:
    """Prove that each reduction of a sharded unit has something to reduce, and that nothing is left behind the last."""
    program = subject.program
    unit = program.unit_of_stage[program.stage[reductions]]
    for row in reductions[~have_new_gradients(program, reductions)].tolist():
        problem = "reduces nothing: since its stage was reduced last, or from the start, it has run no backward"
        subject.add(row, problem, "Drop it")
    last_reduction = np.full(program.num_stages, -1, np.int64)
    last_reduction[unit] = reductions  # rows ascend, and the last assignment stays
    last_of_stage = last_reduction[program.unit_of_stage]
    for stage in np.flatnonzero((last_of_stage >= 0) & (last > last_of_stage)).tolist():
        row, last_backward = int(last_of_stage[stage]), int(last[stage])
        place = subject.place(last_backward, seen_from=row)
        subject.add(
            row,
            f"runs before {place}, the last backward of its stage, and no reduction follows: a part of the gradient "
            "is never reduced",
            f"Add a reduction after {subject.text(last_backward)}",
        )


def _find_barriers(subject: Subject) -> dict[int, Barrier]:
    """Return the collectives by number: tied groups by their index, then the optimizer step, then BARRIER rows."""
    program = subject.program
    barriers: dict[int, Barrier] = {}
    num_groups = len(program.tied_groups)
    index_of_barrier = num_barriers_before(program)
    for row in program.rows_of(JOINS_RANKS).tolist():
        is_tied = bool(IS_REDUCTION[program.op[row]])
        number = int(program.peer[row]) if is_tied else num_groups
        if IS_BARRIER[program.op[row]]:
            number = num_groups + 1 + int(index_of_barrier[row])
        barrier = barriers.setdefault(number, Barrier({}, is_tied))
        barrier.rows.setdefault(int(subject.rank[row]), []).append(row)
    return barriers


def check_crossings(subject: Subject, send: Int32s, receive: Int32s) -> None:
    """Prove that both ends of each message are between the same barriers; `send` and `receive` are [num_messages] rows.

    A barrier is a message between hosts too. On a channel that both use, one that is crossed would be taken for it.
    """
    num_before = num_barriers_before(subject.program)
    crosses = num_before[send] != num_before[receive]
    for send_row, receive_row in zip(send[crosses].tolist(), receive[crosses].tolist(), strict=True):
        counts = f"{num_before[send_row]} barriers before it and {num_before[receive_row]} before its receive"
        problem = f"has {counts}, {subject.place(receive_row)}; expected as many"
        subject.add(send_row, problem, "Move one of the two, so that both are between the same barriers")


def _check_all_wait(subject: Subject, barrier: Barrier) -> None:
    first = min(row for rows in barrier.rows.values() for row in rows)
    for rank in sorted(set(range(subject.table.num_ranks)) - barrier.rows.keys()):
        problem = f"a barrier is missing, while {subject.place(first)} waits for all ranks"
        subject.add_missing(rank, problem, f"Add it on rank {rank}, or drop it on all ranks")


def _check_tied_members(subject: Subject, index: int, barrier: Barrier | None) -> None:
    group, name = subject.program.tied_groups[index], f"the reduction of tied group {index}"
    members = () if barrier is None else barrier.rows.values()
    stage_of = {int(subject.table.stage[row]): row for rows in members for row in rows}
    for stage in sorted(set(group) - set(stage_of)):
        if stage_of:
            why = f"while {subject.place(min(stage_of.values()))} takes part and would wait for it"
        else:
            why = f"so the copies of its parameter on stages {group} would not stay equal"
        rank = int(subject.rank_of_stage[stage])
        problem = f"{name} is missing for stage {stage}, {why}"
        subject.add_missing(rank, problem, f"Add it on rank {rank} after the last backward of stage {stage}")
    for stage in set(stage_of) - set(group):
        problem = f"is no member of {name}, whose stages are {group}"
        subject.add(stage_of[stage], problem, "Drop it, or add the stage to the group")


def _check_step(subject: Subject, step: Barrier) -> None:
    offsets = subject.table.offsets
    first = min(row for rows in step.rows.values() for row in rows)
    for rank in range(subject.table.num_ranks):
        rows = step.rows.get(rank, [])
        end = int(offsets[rank + 1]) - 1
        if not rows:
            problem = f"the optimizer step is missing, while {subject.place(first)} takes it"
            subject.add_missing(rank, problem, "Add it at the end, or drop it on all ranks")
        for row in rows[:-1]:
            subject.add(row, f"is taken again: {subject.place(rows[-1], seen_from=row)}", "Drop one of the two")
        if rows and rows[-1] != end:
            after = subject.place(end, seen_from=end)
            subject.add(rows[-1], f"runs before {after}; expected as the last instruction", "Move it to the end")


def _check_total_order(subject: Subject, barriers: list[Barrier]) -> None:
    """Prove that the union of all ranks' orders of collectives has no cycle."""
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for number, barrier in enumerate(barriers):
        for rank, rows in barrier.rows.items():
            by_rank.setdefault(rank, []).extend((row, number) for row in rows)
    for places in by_rank.values():
        places.sort()
        for (row, number), (later, following) in pairwise(places):
            if number != following:
                edges.setdefault((number, following), (row, later))
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for earlier_barrier, later_barrier in edges:
        sorter.add(later_barrier, earlier_barrier)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1]
        (row, later), *other_edges = sorted(edges[pair] for pair in pairwise(cycle))
        orders = [f"rank {subject.rank[a]} runs {subject.text(a)} before {subject.text(b)}" for a, b in other_edges]
        problem = f"runs before {subject.place(later, seen_from=row)}, but {' and '.join(orders) or 'they are one'}"
        fix = "Give the collectives one order on all ranks"
        subject.add(row, f"{problem}: they would wait for each other", fix)
