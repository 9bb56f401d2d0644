"""Names every instruction in a profiler's trace: a range of torch.profiler, and of NVTX on a CUDA device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
from torch.cuda import nvtx
from torch.profiler import record_function

from penstock.execute.calls import Bound, Call, Change, around_each
from penstock.ir.instruction import INSTRUCTIONS, Instruction, Op
from penstock.ir.program import Program

NAMES: dict[Op, str] = {
    Op.FORWARD: "Forward",
    Op.BACKWARD: "Backward",
    Op.BACKWARD_INPUT: "Backward input",
    Op.BACKWARD_WEIGHT: "Backward weight",
    Op.SEND_FORWARD: "Send forward",
    Op.RECEIVE_FORWARD: "Receive forward",
    Op.SEND_BACKWARD: "Send backward",
    Op.RECEIVE_BACKWARD: "Receive backward",
    Op.UNSHARD: "Unshard",
    Op.RESHARD: "Reshard",
    Op.REDUCE_GRADIENT: "Reduce gradients",
    Op.REDUCE_TIED: "Reduce tied gradients",
    Op.OPTIMIZER_STEP: "Optimizer step",
}
"""What an operation is called in traces, in the words of the field's tools."""
Open = Callable[[str], AbstractContextManager[object]]
"""Opens a range of this name."""


def range_name(instruction: Instruction) -> str:
    """Return an instruction's name in traces, such as `Forward stage 2 microbatch 5`."""
    name = f"{NAMES[instruction.op]} stage {instruction.stage}"
    if INSTRUCTIONS[instruction.op].names_microbatch:
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
    def call_in_ranges() -> None:
        with ExitStack() as stack:
            for open_range in opens:
                stack.enter_context(open_range(name))
            call()

    return call_in_ranges
