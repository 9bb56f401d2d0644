"""Whole ticks in place of seconds, for a solver that counts, and what its bound then says of the seconds.

    exact    all seconds are whole multiples of one number, such as 0.1 s: this is the tick
    floored  a tick is a tiny power of two; dividing by it does not round, and what is left over is cut off

Why a bound in ticks holds for the seconds, where an order is one of the actions of each rank:

* Makespan. When an order runs, the makespan is the longest path through its actions, lags and messages. Shorter ones
  make no path longer. So no order takes less than the bound in floored ticks.
* Span. It is the difference of a last end and a first start. The first start comes after F, messages and lags of the
  stages before it, each of which may lose up to a tick. So many are subtracted.
* Exact ticks. Seconds in floating point are multiples only up to their last digits. By that share of all seconds, the
  end of a path and its begin may each be wrong. Both are subtracted.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from penstock.searching.problem import Problem, Seconds

MOST_TICKS = 2**40
"""The most ticks of all seconds. A finer tick makes no proof slower, and the solver's sums stay far below 2**63."""
MOST_PARTS = 10**9
"""The largest denominator of a tick that all seconds may be multiples of."""
DIGITS = 1e-14
"""The largest share of a number that rounding may change where the number is taken for a multiple."""
TIMES = ("seconds", "lag_s", "wire_s")


@dataclass(frozen=True, slots=True, eq=False)
class Ticks:
    """A problem in ticks, and what leads back to seconds."""

    problem: Problem
    """The problem, whose seconds, lags and messages are whole numbers of ticks; launches are left out."""
    tick_s: Fraction
    lost: Fraction
    """Ticks that a bound of the makespan loses to rounding."""
    lost_by_span: Fraction
    """Ticks that a bound of the span loses, of ranks that begin as soon as a first microbatch has come to them."""
    lost_by_times: int
    """The most ticks by which any time may be lower than in seconds."""
    launch_s: float

    @classmethod
    def of(cls, problem: Problem) -> "Ticks":
        """Choose a tick, and return the problem in ticks."""
        columns = [getattr(problem, name) for name in TIMES]
        tick_s = _common_tick(np.concatenate(columns))
        if tick_s is not None:
            tick_columns = [np.rint(column / float(tick_s)) for column in columns]
            error = max(_largest_error(*pair, tick_s) for pair in zip(columns, tick_columns, strict=True))
            lost = lost_by_span = 2 * error * int(_total(tick_columns))
            lost_by_times = 0
        else:
            tick_s = Fraction(2) ** (math.frexp(_total(columns))[1] - MOST_TICKS.bit_length() + 1)
            tick_columns = [np.floor(column / float(tick_s)) for column in columns]
            lost, lost_by_span = Fraction(0), Fraction(3 * problem.num_stages)
            lost_by_times = 3 * problem.num_actions
        in_ticks = replace(problem, **dict(zip(TIMES, tick_columns, strict=True)), launch_s=0.0)
        return cls(in_ticks, tick_s, lost, lost_by_span, lost_by_times, problem.launch_s)

    @property
    def total(self) -> int:
        """The ticks of all actions, lags and messages: any order that never waits for nothing ends within them."""
        return int(_total([getattr(self.problem, name) for name in TIMES]))

    def bound_s(self, ticks: int, *, by_span: bool) -> float:
        """Return the seconds that no order goes below, where it does not go below so many ticks."""
        lost = self.lost_by_span if by_span else self.lost
        return max(float((ticks - lost) * self.tick_s) - self.launch_s, 0.0)


def _total(columns: list[Seconds]) -> float:
    return sum(float(column.sum()) for column in columns)


def _common_tick(seconds: Seconds) -> Fraction | None:
    """Return the largest number of which all seconds are multiples; None where only a very small one is."""
    values = np.unique(seconds[seconds > 0]).tolist()
    fractions = [Fraction(value).limit_denominator(MOST_PARTS) for value in values]
    if any(abs(fraction - Fraction(value)) > DIGITS * value for fraction, value in zip(fractions, values, strict=True)):
        return None
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    tick_s = Fraction(math.gcd(*(int(fraction * denominator) for fraction in fractions)) or 1, denominator)
    return tick_s if float(seconds.sum()) <= MOST_TICKS * tick_s else None


def _largest_error(seconds: Seconds, whole_ticks: Seconds, tick_s: Fraction) -> Fraction:
    """Return the largest share by which a number of ticks is not the seconds."""
    pairs = {(value, ticks) for value, ticks in zip(seconds.tolist(), whole_ticks.tolist(), strict=True) if ticks}
    return max((abs(Fraction(value) / (int(ticks) * tick_s) - 1) for value, ticks in pairs), default=Fraction(0))
