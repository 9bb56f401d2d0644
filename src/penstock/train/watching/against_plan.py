"""A run beside the plan that it was started with: the step and the memory that were predicted, and those measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.ir.units import format_bytes
from penstock.show.text import format_seconds
from penstock.train.settings.sections import PlanSection
from penstock.train.watching.metrics import PEAK_BYTES

SKIPPED_STEPS = 3
"""The number of steps at a run's begin that say nothing of how long the others take."""


@dataclass(frozen=True, slots=True)
class AgainstPlan:
    """What `penstock plan` predicted of a run, and what its metrics say."""

    plan: PlanSection
    step_s: float
    """The median of the measured steps."""
    peak_bytes: tuple[int, ...]
    """The most memory of each rank of the first replica; empty where it was not gathered."""

    @classmethod
    def of(
        cls, plan: PlanSection, rows: Sequence[Mapping[str, float]], *, counts_memory: bool = True
    ) -> "AgainstPlan | None":
        """Return the comparison for the rows of a `metrics.jsonl`; None where nothing was planned or measured.

        Without `counts_memory`, the memory of the rows is that of whole processes, and left out.
        """
        durations_s = [row["duration_s"] for row in rows[SKIPPED_STEPS:] or rows if "duration_s" in row]
        if not plan.step_s or not durations_s:
            return None
        gathered = [row for row in rows if counts_memory and f"{PEAK_BYTES}0" in row]
        peaks = [int(value) for key, value in gathered[-1].items() if key.startswith(PEAK_BYTES)] if gathered else []
        return cls(plan, median(durations_s), tuple(peaks))

    def lines(self) -> list[str]:
        """Return the lines of the comparison."""
        plan, share = self.plan, self.step_s / self.plan.step_s - 1
        lines = [
            f"planned:    step {format_seconds(plan.step_s)}, measured {format_seconds(self.step_s)} ({share:+.1%})"
            + self._range_text()
        ]
        if not self.peak_bytes or not plan.peak_bytes:
            return lines
        pairs = list(zip(plan.peak_bytes, self.peak_bytes, strict=False))
        rank = max(range(len(pairs)), key=lambda index: abs(pairs[index][1] / max(pairs[index][0], 1) - 1))
        planned, measured = pairs[rank]
        return [
            *lines,
            f"planned:    peak {format_bytes(planned)} on rank {rank}, measured {format_bytes(measured)} "
            f"({measured / max(planned, 1) - 1:+.1%})",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "planned_step_s": self.plan.step_s,
            "planned_step_range_s": list(self.plan.step_range_s),
            "measured_step_s": self.step_s,
            "planned_peak_bytes": list(self.plan.peak_bytes),
            "measured_peak_bytes": list(self.peak_bytes),
        }

    def _range_text(self) -> str:
        if len(self.plan.step_range_s) != 2:
            return ""
        low, high = self.plan.step_range_s
        where = "within" if low <= self.step_s <= high else "outside"
        return f", {where} {format_seconds(low)} to {format_seconds(high)}"
