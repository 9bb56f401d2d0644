"""Logs a pipeline's plan at INFO and every message at DEBUG, by Python's logger `penstock`.

Nothing is set up here: the user gives the logger a handler and a level. A step asks once whether messages
are wanted; if not, nothing is asked for any of them.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from torch.nn.parameter import is_lazy

from penstock.errors import count_of
from penstock.execute.control.collectives import Control
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.gradient_norm import norms_of
from penstock.execute.step import Bound, Step
from penstock.execute.values.tensors import local_part
from penstock.ir.operations import BEGINS_KEEPING
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

LOG = logging.getLogger("penstock")


def log_plan(schedule: Schedule, rank: int) -> None:
    """Say which schedule this rank is to run; at DEBUG, how many forwards come before and backwards after the rest."""
    stages = ", ".join(map(str, schedule.placement.stages_of_rank[rank]))
    counts = {"microbatch": schedule.num_microbatches, "slice": schedule.num_slices, "stage": schedule.num_stages}
    sizes = ", ".join(count_of(number, noun) for noun, number in counts.items())
    LOG.info("rank %d of %d: %s, %s, of which it holds %s", rank, schedule.num_ranks, schedule.name, sizes, stages)
    if LOG.isEnabledFor(logging.DEBUG):
        is_forward = BEGINS_KEEPING[schedule.kind[slice(*schedule.offsets[rank : rank + 2])]]
        warm_up = int(np.argmin(is_forward)) if not is_forward.all() else len(is_forward)
        cool_down = int(np.argmax(is_forward[::-1])) if is_forward.any() else len(is_forward)
        steady = len(is_forward) - warm_up - cool_down if warm_up < len(is_forward) else 0
        LOG.debug("rank %d: %d actions in warm-up, %d steady, %d in cool-down", rank, warm_up, steady, cool_down)


class MessageLog(Observer):
    """Logs every message of a step at DEBUG."""

    def around(self, program: Program, bound: Bound) -> Around | None:
        row = bound.row if bound.awaits is None else bound.awaits
        instruction = program.instruction(row)
        if not (instruction.op.is_send or instruction.op.is_receive):
            return None
        rank = int(program.rank_of_row[row])
        peer = program.placement.rank_of_stage[instruction.peer]
        route = f"to rank {peer}" if instruction.op.is_send else f"from rank {peer}"
        message_text = f"{instruction} {'arrived' if bound.awaits is not None else 'posted'}, {route}"
        return partial(self._logging, rank, message_text)

    @contextmanager
    def _logging(self, rank: int, message_text: str, step: Step) -> Iterator[None]:
        yield
        LOG.debug("rank %d, step %d: %s", rank, step.serial, message_text)


def message_log() -> list[Observer]:
    """Return what logs the messages of a step; nothing where nobody listens."""
    return [MessageLog()] if LOG.isEnabledFor(logging.DEBUG) else []


def norms_by_name(
    control: Control,
    assembly: Assembly,
    *,
    gradient_attribute: str = "",
    local: bool = False,
    is_sharded: bool = False,
) -> dict[str, float]:
    """Return the norm of each parameter of all ranks, by its owner's name; a collective, with one result on all ranks.

    With a `gradient_attribute`, such as "grad", the norms are those of the gradients there, of parameters that have
    one. Where replicas share parameters out (`is_sharded`), norms are of whole ones. With `local`, norms are of what
    this rank holds, by its own names, copies and parts of shards included; no message goes to another rank. Lazy
    parameters have no values, and no norm, before their first input.
    """
    tensors = {
        name: getattr(parameter, gradient_attribute, None) if gradient_attribute else parameter.detach()
        for name, parameter in assembly.named_parameters()
        if not is_lazy(parameter)
    }
    named_tensors = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    if local:
        return norms_of([(name, local_part(tensor)) for name, tensor in named_tensors])
    local_norms = norms_of(named_tensors, across=control.across if is_sharded else None)
    owned_norms = {name: norm for name, norm in local_norms.items() if name not in assembly.owner_names}
    all_norms: dict[str, float] = {}  # both ranks of a model with two routes have the same names, and equal norms
    for rank_norms in control.within.all_gather_object(owned_norms):
        assert isinstance(rank_norms, dict)
        all_norms |= rank_norms
    return all_norms


def log_norms(control: Control, step: int, assembly: Assembly, gradient_attribute: str) -> None:
    """Log the norms of this rank's parameters and gradients, and on rank 0 those over all ranks; a collective."""
    named_parameters, rank, copied = assembly.named_parameters(), control.transport.rank, assembly.owner_names
    across = None if control.places.data is None else control.across
    values = norms_of([(name, parameter.detach()) for name, parameter in named_parameters], across=across)
    named_gradients = [(name, getattr(parameter, gradient_attribute, None)) for name, parameter in named_parameters]
    gradients = norms_of([(name, grad) for name, grad in named_gradients if grad is not None], across=across)
    norms_by_name = {name: [values[name], gradients.get(name, 0.0)] for name in values}
    for name, (value, gradient) in norms_by_name.items():
        LOG.debug("rank %d, step %d: %s: parameter norm %.6g, gradient norm %.6g", rank, step, name, value, gradient)
    local_norms = {name: norms for name, norms in norms_by_name.items() if name not in copied}
    norms_of_ranks = control.within.all_gather_object(local_norms)
    all_norms: dict[str, list[float]] = {}  # a copy on another rank has the same name, and counts once
    for rank_norms in norms_of_ranks:
        assert isinstance(rank_norms, dict)
        all_norms |= rank_norms
    if rank == 0:
        columns = ([norms[index] for norms in all_norms.values()] for index in (0, 1))
        value, gradient = (math.hypot(*column) for column in columns)
        LOG.info("step %d: parameter norm %.6g, gradient norm %.6g over all ranks", step, value, gradient)
