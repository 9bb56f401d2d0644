"""Proof of what fused layers need: a stage's weight gradients come in the order of its input gradients.

A fused layer that computes its weight gradients later keeps what they need in a queue, first in, first out, and does
not know microbatches. So the first `W` after some `I` takes the entry of the first `I` whose `W` has not run.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from penstock.ir.operations import ENDS_KEEPING, RUNS_AUTOGRAD, Flags
from penstock.proofs.order import Actions
from penstock.proofs.report import Findings


def check_weight_order(actions: Actions, stages: Collection[int], findings: Findings) -> None:
    """Prove that each `W` of these stages, and each whole backward, takes from the queue what its own `I` has put in.

    Copies of a part on one rank are one module, with one queue.
    """
    placement = actions.schedule.placement
    parts = {stage: place for route in placement.routes for place, stage in enumerate(route)}
    shared: dict[tuple[int, int], list[int]] = {}  # by rank and part
    for stage in sorted(stages):
        shared.setdefault((placement.rank_of_stage[stage], parts[stage]), []).append(stage)
    for each in shared.values():
        _check_queue(actions, each, findings)


def _check_queue(actions: Actions, stages: list[int], findings: Findings) -> None:
    is_own = np.isin(actions.schedule.stage, stages)
    puts, takes = _rows(actions, is_own, RUNS_AUTOGRAD), _rows(actions, is_own, ENDS_KEEPING)
    for put, take in zip(puts.tolist(), takes.tolist(), strict=False):
        if _entry(actions, put) != _entry(actions, take):
            _add(actions, put, take, findings)
            return  # all later entries are shifted by this one


def _rows(actions: Actions, is_own: NDArray[np.bool_], flags: Flags) -> NDArray[np.intp]:
    """The actions whose kinds have a flag, in the order of their rank."""
    return np.flatnonzero(is_own & flags[actions.schedule.kind])


def _entry(actions: Actions, index: int) -> tuple[int, int, int]:
    schedule = actions.schedule
    return int(schedule.stage[index]), int(schedule.microbatch[index]), int(schedule.slice[index])


def _add(actions: Actions, put: int, take: int, findings: Findings) -> None:
    row, first = int(actions.row[take]), int(actions.row[put])
    subject = findings.subject
    findings.add(
        row,
        f"would take the weight gradients of {subject.place(first, seen_from=row)} from a fused layer's queue, which "
        "gives them in the order of the input gradients",
        f"Move the weight gradients that belong to {subject.text(first)} before {subject.text(row)}, or run these "
        "layers without delayed weight gradients",
    )
