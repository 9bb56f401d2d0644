"""`Budget`: when a search ends."""

import time

MOVES_PER_ROUND = 1_000


class Budget:
    """The seconds that a search may take, or the sequences that it may time: then seconds do not count."""

    def __init__(self, seconds: float, evaluations: int | None) -> None:
        self._seconds, self._evaluations = seconds, evaluations
        self.spent = 0
        """How many sequences were timed."""
        self._begin_s = time.perf_counter()

    def begin(self) -> None:
        self._begin_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begin_s

    @property
    def counts_evaluations(self) -> bool:
        return self._evaluations is not None

    @property
    def left_s(self) -> float:
        return max(self._seconds - self.elapsed_s, 0.0)

    @property
    def is_over(self) -> bool:
        return self.is_over_at(1.0)

    def is_over_at(self, share: float) -> bool:
        """Whether a share of the budget is over."""
        if self._evaluations is not None:
            return self.spent >= share * self._evaluations
        return self.elapsed_s >= share * self._seconds

    def next_moves(self) -> int:
        """Return how many moves the next round may take."""
        num_moves = MOVES_PER_ROUND if self._evaluations is None else self._evaluations - self.spent
        return max(min(num_moves, MOVES_PER_ROUND), 0)

    def trials(self, share: float, trial_s: float) -> int:
        """Return how many sequences of `trial_s` each a share of the budget can time, and no more than what is left."""
        if self._evaluations is not None:
            return max(min(int(share * self._evaluations), self._evaluations - self.spent), 0)
        return int(min(share * self._seconds, self.left_s) / trial_s)
