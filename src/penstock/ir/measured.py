"""Values that are measured of a step beside the times of its instructions; a `Timeline` holds them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class HostTimes(NamedTuple):
    """When the host of each rank was in the call of a row, and when it waited for what a row had launched.

    A host calls its rows one after another, and between them it is held back, or does what observers ask for. A device
    runs a row later than its host calls it. Seconds on the step's timeline; [num_rows] each.
    """

    start_s: Floats
    end_s: Floats
    """When the call returned: a row that launches work returns at once."""
    wait_start_s: Floats
    """When the host began to wait for what the row had launched; the end of the call where it never did."""
    wait_end_s: Floats


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
