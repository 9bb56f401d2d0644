"""Names every instruction in a profiler's trace: a range of torch.profiler, and of NVTX on a CUDA device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch.cuda import nvtx
from torch.profiler import record_function

from penstock.execute.observing.observer import Around, Observer
from penstock.execute.step import Bound, Step
from penstock.ir.instruction import Instruction
from penstock.ir.operations import OPERATIONS
from penstock.ir.program import Program


def range_name(instruction: Instruction) -> str:
    """Return an instruction's name in traces, such as `Forward stage 2 microbatch 5`."""
    name = f"{OPERATIONS[instruction.op].name} stage {instruction.stage}"
    if not OPERATIONS[instruction.op].is_of_stage:
        name += f" microbatch {instruction.microbatch}"
    return f"{name} slice {instruction.slice}" if instruction.slice else name


class Ranges(Observer):
    """Runs every call in a range; a wait for a message is told from posting its receive."""

    def __init__(self, device: torch.device) -> None:
        self._on_device: Callable[[str], AbstractContextManager[object]] = (
            nvtx.range if device.type == "cuda" else nullcontext
        )

    def around(self, program: Program, bound: Bound) -> Around:
        if bound.awaits is None:
            return partial(self._in_ranges, range_name(program.instruction(bound.row)))
        return partial(self._in_ranges, f"Wait: {range_name(program.instruction(bound.awaits))}")

    @contextmanager
    def _in_ranges(self, name: str, step: Step) -> Iterator[None]:
        with record_function(name), self._on_device(name):
            yield
