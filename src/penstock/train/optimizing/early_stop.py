"""`EarlyStop`: ends a run whose held-out loss does not fall any more."""

from dataclasses import dataclass

from penstock.errors import count_of


@dataclass(slots=True)
class EarlyStop:
    """Counts the evaluations since the lowest held-out loss; every rank counts alike."""

    patience: int
    """Evaluations in a row without a lower loss that end a run; 0: none does."""
    lowest: float | None = None
    num_since: int = 0
    """Evaluations since the lowest."""

    def note(self, held_out_loss: float | None) -> bool:
        """Take in a step, which may not have been evaluated; return whether the run ends with it."""
        if held_out_loss is None or not self.patience:
            return False
        if self.lowest is None or held_out_loss < self.lowest:
            self.lowest, self.num_since = held_out_loss, 0
            return False
        self.num_since += 1
        return self.num_since >= self.patience

    def describe(self) -> str:
        """Say why the run ends."""
        return f"{count_of(self.num_since, 'evaluation')} in a row without a held-out loss below {self.lowest:.4f}"
