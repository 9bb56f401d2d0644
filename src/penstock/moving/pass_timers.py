"""Megatron-LM's timers around every pass: `timers("forward-compute", log_level=2).start()`, and `.stop()` behind it."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from penstock.execute.observing.observer import Around, Observer
from penstock.execute.step import Bound, Step
from penstock.ir.operations import IS_COMPUTE, OPERATIONS, At, Op, Read, Value
from penstock.ir.program import Program

Timers = Callable[..., Any]
"""Called with a name, and a log_level where it takes one, returns an object with `start()` and `stop()`."""
TAKES_INPUTS = np.array([Read(Value.OUTPUT, At.UPSTREAM) in OPERATIONS[op].reads for op in Op])
"""Per operation, whether it is a first forward, which takes what the stage before has made."""
LOG_LEVEL = 2


class PassTimers(Observer):
    """Starts and stops timers around the passes of a step."""

    timers: Timers | None = None
    """The timers of the last call; None where it has none."""
    _takes_log_level: bool = True

    def use(self, timers: Timers | None) -> None:
        """Take the timers of a call. Those of Megatron-LM's first releases take a name alone."""
        self.timers = timers
        self._takes_log_level = not callable(timers) or _takes_log_level(timers)

    def around(self, program: Program, bound: Bound) -> Around | None:
        op = int(program.op[bound.row])
        if bound.awaits is not None or not IS_COMPUTE[op]:
            return None
        return partial(self._timed, "forward-compute" if TAKES_INPUTS[op] else "backward-compute")

    @contextmanager
    def _timed(self, name: str, step: Step) -> Iterator[None]:
        if self.timers is None:
            yield
            return
        timer = self.timers(name, log_level=LOG_LEVEL) if self._takes_log_level else self.timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()


def _takes_log_level(timers: Timers) -> bool:
    try:
        parameters = inspect.signature(timers).parameters.values()
    except (TypeError, ValueError):  # a built-in may have no signature
        return True
    return any(parameter.name == "log_level" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
