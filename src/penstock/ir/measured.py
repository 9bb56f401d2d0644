"""Values that are measured of a step beside the times of its instructions; a `Timeline` holds them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prologue:
    """The moments of one rank before a step, on the step's timeline, so below 0."""

    free_s: float
    """When the rank was done with what came before."""
    loaded_s: float
    """When the rank had its batch."""
    asked_s: float
    """When the rank asked for the step."""

    @property
    def data_s(self) -> float:
        """Seconds that it waited for its batch."""
        return self.loaded_s - self.free_s


@dataclass(frozen=True, slots=True)
class ImmediateWeights:
    """The weight gradients of a stage that are computed in I, where W was to compute them."""

    share: float
    """The share of these weights in all elements of matrices in the stage."""
    names: tuple[str, ...]
    """The names of their parameters, small ones too."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why each was computed early, by name: a `Reason` of the planner, or that its layer computes it by itself."""
