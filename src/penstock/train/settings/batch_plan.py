"""`BatchPlan`: how many batches each optimizer step adds up, and which ones, also while that number grows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A function of the step alone, so that a run which goes on finds its place in the data."""

    full: int
    """Batches of a step behind the ramp-up."""
    first: int = 1
    """Batches of the first step of a ramp-up."""
    ramp_steps: int = 0
    """Steps over which the number grows; 0: it is `full` from the beginning."""

    @property
    def is_constant(self) -> bool:
        """Whether all steps add up as many batches."""
        return self.ramp_steps == 0 or self.first == self.full

    def count(self, step: int) -> int:
        """Return the number of batches of an optimizer step, counted from 1."""
        if step > self.ramp_steps:
            return self.full
        return self.first + (self.full - self.first) * (step - 1) // self.ramp_steps

    def begin(self, step: int) -> int:
        """Return the first batch of an optimizer step; batches are counted from 0."""
        ramped = min(step - 1, self.ramp_steps)
        return sum(map(self.count, range(1, ramped + 1))) + (step - 1 - ramped) * self.full
