"""Numbers of microbatches: the one that a step is asked for, and those that a stream brings step by step."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import index
from typing import Any

from penstock.errors import ConfigError, EndOfData, PipelineError, described

MAX_MICROBATCHES = 1_000_000
"""Number of microbatches that a step may ask for; a larger one is a mistake, for which memory must not be taken."""


def whole_number(value: Any) -> int | None:
    """Return a number of microbatches as an int, also where it is one of numpy's or torch's; None for anything else."""
    # Arrays and tensors have an `__index__`, too; several numbers, or one in a list, are for a step each.
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", False):
        return None
    try:
        number = index(value)
    except TypeError:  # it is a fraction
        return None
    return number if 1 <= number <= MAX_MICROBATCHES else None


def required_number(value: Any, name: str) -> int:
    """Return a number of microbatches, which messages call `name`. Raises: PipelineError: it is none."""
    number = whole_number(value)
    if number is None:
        raise PipelineError(f"{name} is {described(value)}; expected a whole number from 1 to {MAX_MICROBATCHES:,}")
    return number


class StreamNumbers:
    """How many microbatches each step takes off a stream, where the stream says so."""

    def __init__(self, numbers: int | Iterable[int] | None) -> None:
        """`numbers` is one for all steps, or an iterable with one for each; None where the pipeline or a call says it.

        Raises:
            ConfigError: it is neither.
        """
        one = whole_number(numbers)
        has_one_value = getattr(numbers, "ndim", None) == 0  # arrays and tensors without dimensions are Iterables, too
        if numbers is not None and one is None and (has_one_value or not isinstance(numbers, Iterable)):
            raise ConfigError(
                f"{described(numbers)}; expected a whole number from 1 to {MAX_MICROBATCHES:,}, or an iterable of such "
                "numbers, one for each step",
                key="microbatches",
            )
        self._numbers: Iterator[Any] | None = None
        if numbers is not None:
            self._numbers = repeat(one) if one is not None else iter(numbers)  # type: ignore[arg-type]
        self._number: int | None = None

    def next(self, asked: int | None, *, is_again: bool) -> int | None:
        """Return the number of the next step: `asked`, or what the stream says; None without either.

        `is_again` says that the step before was refused: it has taken none, so its number is that of the next step.

        Raises:
            EndOfData: there was a number for each of the steps before, and is none for this one.
            PipelineError: it is no number of microbatches, or there are two.
        """
        if self._numbers is None:
            return asked
        if asked is not None:
            raise PipelineError(
                f"microbatches is {asked}, but the stream says itself how many it brings; leave out one of the two"
            )
        if self._number is None or not is_again:
            self._number = None
            try:
                self._number = required_number(next(self._numbers), "a number that a stream was given as microbatches=")
            except StopIteration:
                raise EndOfData(
                    "the data are at an end: the numbers that a stream was given as microbatches= have all been used. "
                    "End the loop, or pass a new Stream on every rank"
                ) from None
        return self._number
