"""Names every instruction in a profiler's trace: a range of torch.profiler, and of NVTX on a CUDA device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
from torch.cuda import nvtx
from torch.profiler import record_function

from penstock.execute.calls import Bound, Call, Change, around_each
from penstock.execute.step import Step
from penstock.ir.instruction import Instruction
from penstock.ir.operations import OPERATIONS
from penstock.ir.program import Program

Open = Callable[[str], AbstractContextManager[object]]
"""Opens a range of this name."""


def range_name(instruction: Instruction) -> str:
    """Return an instruction's name in traces, such as `Forward stage 2 microbatch 5`."""
    name = f"{OPERATIONS[instruction.op].name} stage {instruction.stage}"
    if not OPERATIONS[instruction.op].is_of_stage:
        name += f" microbatch {instruction.microbatch}"
    return f"{name} slice {instruction.slice}" if instruction.slice else name


def ranges(program: Program, device: torch.device) -> Change:
    """Return the change that runs every call in a range; a wait for a message is told from posting its receive."""
    opens: list[Open] = [record_function]
    if device.type == "cuda":
        opens.append(nvtx.range)
    return around_each(lambda bound: _in_ranges(_name(program, bound), bound.call, opens))


def _name(program: Program, bound: Bound) -> str:
    if bound.receive_row is None:
        return range_name(program.instruction(bound.row))
    return f"Wait: {range_name(program.instruction(bound.receive_row))}"


def _in_ranges(name: str, call: Call, opens: list[Open]) -> Call:
    def call_in_ranges(step: Step) -> None:
        with ExitStack() as stack:
            for open_range in opens:
                stack.enter_context(open_range(name))
            call(step)

    return call_in_ranges
