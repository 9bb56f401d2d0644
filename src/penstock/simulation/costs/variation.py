"""How far apart equal computations are: on an idle machine next to nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.simulation.costs.costs import Spread

BUSY_SHARE = 0.15
"""The variation above which it is not that of the work: something else runs on the machine."""
SMALL_STAGE = 0.1
"""The share of the mean stage's seconds below which a stage is as short as the host's jitter, and does not count."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How much the seconds of equal computations of a stage differ."""

    stage: int
    share: float
    """Width of the middle half of the measurements over their median, weighted by the medians of its operations."""

    @property
    def is_busy(self) -> bool:
        return self.share > BUSY_SHARE


def largest_variation(spreads: Sequence[Spread]) -> Variation | None:
    """Return the stage whose equal computations differ most; None where nothing was measured twice.

    Equal are those of one operation and stage, over microbatches and recorded steps. The middle half leaves out single
    slow ones, which are stragglers and not a busy machine.
    """
    stages = sorted({spread.stage for spread in spreads})
    medians_s, ranges_s = dict.fromkeys(stages, 0.0), dict.fromkeys(stages, 0.0)
    for spread in spreads:
        medians_s[spread.stage] += spread.median_s
        ranges_s[spread.stage] += spread.quartile_range_s
    least_s = SMALL_STAGE * sum(medians_s.values()) / max(len(stages), 1)
    variations = [
        Variation(stage, ranges_s[stage] / medians_s[stage]) for stage in stages if medians_s[stage] > least_s
    ]
    return max(variations, key=lambda variation: variation.share, default=None)
