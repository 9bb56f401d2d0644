"""`Observer`: the one protocol of all that looks at a step; and how observers get around the calls of a step.

    around(program, bound)  once per call of a program, when it is compiled: the context in which the call is to run
    begin(step)             before the first call of a step
    end(step, failed)       behind the last call, or behind the failure

Guarantees: without observers the calls of a step are those that were compiled. Each call runs once, with any
observers around it. An observer that raises is removed and reported once, and the step goes on. Each `begin` has
its `end`, and each context that was entered is left, in the thread that entered it.
Relies on: overlapped computations may run in two threads at once, so what an observer keeps between entering and
leaving belongs to the call (or the thread), not to the observer.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from penstock.errors import PipelineError
from penstock.execute.step import Bound, Step
from penstock.ir.program import Program

Around = Callable[[Step], AbstractContextManager[object]]
"""Makes the context for one run of a call."""

_LOG = logging.getLogger("penstock")
T = TypeVar("T")


class Observer:
    """Looks at the steps of one rank; a subclass defines what it needs of the three methods.

    An error in them is the observer's own: it is logged with its traceback, the observer is not asked again, and the
    step goes on. Two kinds of errors do end the step: a PipelineError, by which an observer says that it found
    something wrong, and any error of an observer that `needs_all_ranks`.
    """

    needs_all_ranks: ClassVar[bool] = False
    """Whether it exchanges messages, so that the other ranks would wait for one that is removed."""
    failure: Exception | None = None
    """The error for which it was removed."""

    def begin(self, step: Step) -> None:
        """Prepare for a step."""

    def around(self, program: Program, bound: Bound) -> Around | None:
        """Return what makes the context in which a call runs; None to leave the call alone."""
        return None

    def end(self, step: Step, failed: bool) -> None:
        """Clean up behind a step, and look back at it unless it `failed`, or this observer did.

        Behind a failed step no messages can be exchanged, and what this method raises is dropped.
        """

    def attempt(self, act: Callable[..., T], *args: Any) -> T | None:
        """Do something of this observer's within a call, such as in a hook; None if it fails or has failed before."""
        return None if self.failure is not None else self._guarded(act, *args)

    def _guarded(self, act: Callable[..., T], *args: Any) -> T | None:
        try:
            return act(*args)
        except PipelineError:
            raise
        except Exception as error:
            if self.needs_all_ranks:
                raise
            if self.failure is None:
                self.failure = error
                text = "%s raised %s: %s. It does not look at steps any more, which go on without it"
                _LOG.warning(text, type(self).__name__, type(error).__name__, error, exc_info=error)
            return None


@contextmanager
def observing(observers: Sequence[Observer], step: Step) -> Iterator[None]:
    """Begin a step with all observers, in order, and end it in reverse order."""
    with ExitStack() as stack:
        for observer in observers:
            if observer.failure is None:
                # First: what `begin` does before it raises is undone too.
                stack.push(partial(_end, observer, step))
                observer.attempt(observer.begin, step)
        yield


def observed(observers: Sequence[Observer], program: Program, bounds: Sequence[Bound]) -> list[Bound]:
    """Return the calls with what the observers put around them; the first observer is the innermost."""
    # Around what the observers before have put there, so the last one is outermost and sees their time as well.
    for observer in observers:
        bounds = [_observed(observer, program, bound) for bound in bounds]
    return list(bounds)


def once_per_program(make: Callable[[Program], T]) -> Callable[[Program], T]:
    """Return `make`, which is asked for each call of a program, with the last program's answer kept."""
    last_answer: list[tuple[Program, T]] = []

    def ask(program: Program) -> T:
        if not last_answer or last_answer[0][0] is not program:
            last_answer[:] = [(program, make(program))]
        return last_answer[0][1]

    return ask


def _end(observer: Observer, step: Step, kind: type[BaseException] | None, *_: object) -> None:
    try:
        observer._guarded(observer.end, step, kind is not None or observer.failure is not None)
    except Exception:
        if kind is None:
            raise


def _observed(observer: Observer, program: Program, bound: Bound) -> Bound:
    around = observer.attempt(observer.around, program, bound)
    if around is None:
        return bound
    call = bound.call

    def observed_call(step: Step) -> None:
        context = observer.attempt(_entered, around, step)
        if context is None:
            return call(step)
        try:
            call(step)
        except BaseException as error:
            # The call's error, not the one that leaving raises, ends the step.
            with suppress(Exception):
                observer._guarded(_leave, context, error)
            raise
        observer._guarded(_leave, context)

    return replace(bound, call=observed_call)


def _entered(around: Around, step: Step) -> AbstractContextManager[object]:
    context = around(step)
    context.__enter__()
    return context


def _leave(context: AbstractContextManager[object], error: BaseException | None = None) -> None:
    """Leave a context behind a call, which may have raised an error that goes through it."""
    details = (None, None, None) if error is None else (type(error), error, error.__traceback__)
    try:
        context.__exit__(*details)
    except Exception as found:
        if found is not error:
            raise
