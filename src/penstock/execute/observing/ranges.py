"""Names every instruction in a profiler's trace: a range of torch.profiler, and of NVTX on a CUDA device."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch.cuda import nvtx
from torch.profiler import record_function

from penstock.execute.observing.observer import Around, Observer
from penstock.execute.step import Bound, Step
from penstock.ir.instruction import Instruction
from penstock.ir.operations import IS_BACKWARD, OPERATIONS, RUNS_FORWARD
from penstock.ir.program import Program


def range_name(instruction: Instruction) -> str:
    """Return an instruction's name in traces, such as `Forward stage 2 microbatch 5`."""
    name = f"{OPERATIONS[instruction.op].name} stage {instruction.stage}"
    if not OPERATIONS[instruction.op].is_of_stage:
        name += f" microbatch {instruction.microbatch}"
    return f"{name} slice {instruction.slice}" if instruction.slice else name


def phase_of(program: Program, row: int) -> str:
    """Return where a row is in the step of its rank.

    Warm-up is before the rank's first backward, cool-down behind its last forward, where it has both.
    """
    first, end = program.offsets[(rank := int(program.rank_of_row[row])) : rank + 2].tolist()
    op = program.op[first:end]
    forwards, backwards = (first + np.flatnonzero(flags[op]) for flags in (RUNS_FORWARD, IS_BACKWARD))
    if not len(backwards) or not len(forwards):
        return ""
    if row < backwards[0]:
        return "warm-up"
    return "cool-down" if row > forwards[-1] else "steady"


class Ranges(Observer):
    """Runs every call in a range, within that of its phase; a wait for a message is told from posting its receive."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def around(self, program: Program, bound: Bound) -> Around:
        name = range_name(program.instruction(bound.row if bound.awaits is None else bound.awaits))
        names = [phase_of(program, bound.row), name if bound.awaits is None else f"Wait: {name}"]
        return partial(self._in_ranges, list(filter(None, names)))

    @contextmanager
    def _in_ranges(self, names: Sequence[str], step: Step) -> Iterator[None]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(record_function(name))
                if self._is_cuda:
                    stack.enter_context(nvtx.range(name))
            yield
