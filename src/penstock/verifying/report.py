"""`VerifyReport`: how a model in parts compares with the unsplit one, and the first tensor in which they differ."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from penstock.errors import PenstockError
from penstock.tables import NO_SCREEN, Column, Screen, table_text


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of the parts that is not that of the unsplit model."""

    mode: str
    """"evaluation" or "training"; "start" for a value that differs before anything ran."""
    batch: int
    """Index of the batch."""
    kind: str
    """"output", "loss", "gradient", "buffer" or "parameter"."""
    name: str
    """Name of the tensor, as the unsplit model has it."""
    module: str
    """Module that the tensor belongs to; of an output or a loss, the first module whose result differs. Empty for the
    model's own forward, around its modules."""
    error: float
    """Largest absolute difference, as a share of the largest value of its kind; infinite where a tensor is missing,
    has another shape or is not finite."""
    problem: str = ""
    """What is wrong, where that is no number."""

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "the model's own forward, around its modules"
        fault = self.problem or f"differs by {self.error:.2g} of the largest {self.kind}"
        return f"{self.mode}, batch {self.batch}: {self.kind} {self.name!r} of {place}: {fault}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tensors of one kind in one mode."""

    mode: str
    kind: str
    num_tensors: int
    error: float
    """Largest difference of all, as a share of the largest value of the kind."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`; its text is a table, and a last line that says whether the parts are right."""

    title: str
    """Model, split and batches that were compared."""
    tolerance: float
    """Largest difference that rounding explains, as a share of the largest value of a kind."""
    comparisons: Sequence[Comparison] = ()
    differences: Sequence[Difference] = ()
    """Tensors that differ, the first one first: forwards by the order of the model, gradients by that of a backward."""
    refusal: str = ""
    """Words with which the pipeline refused the model, or failed; empty where it ran."""
    notes: Sequence[str] = ()
    """What was compared otherwise than asked for, and why."""

    @property
    def is_right(self) -> bool:
        """Whether the pipeline ran, and everything is the same but for rounding."""
        return not self.differences and not self.refusal

    @property
    def largest_error(self) -> float:
        """The largest finite difference, as a share of the largest value of its kind."""
        return max((row.error for row in self.comparisons if isfinite(row.error)), default=0.0)

    def text(self, screen: Screen = NO_SCREEN) -> str:
        """Return the table of what was compared, notes, and the conclusion."""
        columns = [
            Column("mode", is_text=True),
            Column("kind", is_text=True),
            Column("tensors"),
            Column("largest difference"),
        ]
        rows = [
            [row.mode, row.kind, str(row.num_tensors), f"{row.error:.2g}"]
            for row in self.comparisons
            if row.num_tensors
        ]
        blocks = [screen.wrapped(self.title), *([table_text(columns, rows, screen)] if rows else [])]
        blocks += ["\n".join(screen.wrapped(f"note: {note}") for note in self.notes)] if self.notes else []
        return "\n\n".join([*blocks, screen.wrapped(self._conclusion())])

    def __str__(self) -> str:
        return self.text()

    def raise_if_wrong(self) -> None:
        """Raise a PenstockError with the conclusion, unless all is right."""
        if not self.is_right:
            raise PenstockError(self._conclusion())

    def _conclusion(self) -> str:
        if self.refusal:
            return f"refused: {self.refusal}"
        if not self.differences:
            return f"right: no difference is larger than {self.largest_error:.2g} of the largest of its kind"
        num_by_kind = Counter(difference.kind for difference in self.differences)
        counts = ", ".join(f"{kind} {number}" for kind, number in num_by_kind.items())
        return f"wrong: {self.differences[0]}. Tensors that differ: {counts}"
