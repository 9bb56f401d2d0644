"""Runs the two computations of an overlapped pair as the caller wants them to, such as on two streams at once.

    rows      RECV_F RECV_B (F1;B0)OVERLAP_F_B SEND_F SEND_B
    in order  ... wait F, F1, wait B, B0 ...
    by hook   ... wait F, wait B, overlap(F1, B0) ...

A schedule starts both computations of a pair together, and proves that neither needs what the other makes. So the waits
may come first, and the hook may run the two in any order, or in two threads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from penstock.errors import PipelineError
from penstock.execute.step import Bound, Call, Change, Step
from penstock.ir.instruction import Instruction
from penstock.ir.operations import RUNS_FORWARD
from penstock.ir.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """One computation of a pair, to be called once, in any thread."""

    instruction: Instruction
    """Which one it is."""
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()


Overlap = Callable[[Computation, Computation], None]
"""overlap(first, second): runs both, each once, and returns when both have run; the order is that of the pair, as a
rule the forward first. An error of either is to be raised."""
Note = Callable[[int], None]
"""Notes the row at work, a number in the whole program."""


def overlapping(program: Program, overlap: Overlap, device: torch.device, note: Note) -> Change:
    """Return the change that gives the pairs of a program to a hook."""
    call_of_pair = partial(_call_of_pair, program, overlap, device, note)
    return lambda bounds: list(_with_pairs_joined(program, bounds, call_of_pair))


def _with_pairs_joined(
    program: Program, bounds: Sequence[Bound], call_of_pair: Callable[[Bound, Bound], Call]
) -> Iterator[Bound]:
    """Yield the calls of a rank with the two computations of each overlapped pair as one call, behind their waits."""
    joined = program.joined
    for first_row, calls in groupby(bounds, lambda bound: bound.row - int(bound.row > 0 and joined[bound.row - 1])):
        if not joined[first_row]:
            yield from calls
            continue
        members = list(calls)
        yield from (bound for bound in members if bound.awaits is not None)
        first, second = (bound for bound in members if bound.awaits is None)
        # In the forward's place, which is where the data that it takes are there.
        place = first if RUNS_FORWARD[program.op[first.row]] else second
        yield replace(place, call=call_of_pair(first, second))


def _call_of_pair(
    program: Program, overlap: Overlap, device: torch.device, note: Note, first: Bound, second: Bound
) -> Call:
    """Return one call that lets the user's hook `overlap` run both computations of an overlapped pair.

    An overlapped pair is a forward and a backward that need nothing of each other. `first` and `second` are their calls
    in the order of the schedule. The hook may run the two in any order, or at one time on two threads or streams.

    The call raises PipelineError if the hook has not run each computation once, and the error of a computation as it
    is; `note` then tells the other ranks which of the two rows of the program has failed.
    """
    instructions = [program.instruction(bound.row) for bound in (first, second)]

    def run_both(step: Step) -> None:
        # Grad mode and autocast are states of a thread, so a thread of the hook must take over those of this one.
        state = _ThreadState(device)
        num_runs = [0, 0]

        def run_computation(index: int, bound: Bound) -> None:
            num_runs[index] += 1
            try:
                with state.restored():
                    bound.call(step)
            except Exception:
                note(bound.row)
                raise

        overlap(
            Computation(instructions[0], lambda: run_computation(0, first)),
            Computation(instructions[1], lambda: run_computation(1, second)),
        )
        _require_one_run_of_each(instructions, num_runs)

    return run_both


def _require_one_run_of_each(instructions: Sequence[Instruction], num_runs: Sequence[int]) -> None:
    """Refuse a hook that has not run each computation of a pair once. Raises: PipelineError."""
    counts = zip(instructions, num_runs, strict=True)
    wrong_counts = [f"{instruction} {count} times" for instruction, count in counts if count != 1]
    if wrong_counts:
        raise PipelineError(
            f"the overlap hook ran {' and '.join(wrong_counts)}; call both of its arguments once, and return when "
            "both have ended"
        )


class _ThreadState:
    """The state of torch per thread that computations depend on, as it is in the thread that made this."""

    def __init__(self, device: torch.device) -> None:
        self._is_grad_enabled = torch.is_grad_enabled()
        self._autocasts: list[dict[str, Any]] = [
            {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
            for kind in dict.fromkeys((device.type, "cpu"))
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have it in the current thread."""
        with torch.set_grad_enabled(self._is_grad_enabled), ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(torch.autocast(**autocast))
            yield
