"""The results of a step."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from penstock.errors import PipelineError, nearest
from penstock.execute.batch.reader import DataTimes
from penstock.execute.losses.step_losses import StepLosses

_Loss = TypeVar("_Loss")


class MicrobatchLosses(list[Tensor]):
    """The losses of the microbatches, in order."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and not -len(self) <= index < len(self):
            choices = f"there are those of microbatches 0 to {len(self) - 1}" if self else "there are none"
            raise PipelineError(
                f"there is no loss of microbatch {index}: {choices}. Only a step with a loss function and a target has "
                "losses, one for each of the schedule's microbatches"
            )
        return super().__getitem__(index)


class NamedLosses(dict[str, _Loss]):
    """Losses by name."""

    def __missing__(self, name: object) -> _Loss:
        choices = f"there are {', '.join(map(repr, self))}" if self else "there are none with a name"
        raise PipelineError(
            f"there is no loss {name!r}: {choices}.{nearest(str(name), self)} Names come from a loss function that "
            "returns a dict, and from the AuxiliaryLoss of a layer"
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a step, on every rank alike but for the outputs."""

    loss: Tensor | None
    """0-dim, the loss of the whole batch as the loss function has it; None without a loss function."""
    losses: MicrobatchLosses
    """0-dim, one per microbatch in order, before weighting."""
    outputs: Any = None
    """The merged outputs of the last layer, if asked for, on the rank of the last stage (with two routes: of the first
    route's); else None."""
    named_losses: NamedLosses[Tensor] = field(default_factory=NamedLosses)
    """0-dim, of the whole batch: what the loss function named, each weighted as the loss is (by its own count where
    `count` returns a dict), and what layers added to an `AuxiliaryLoss`, before its weight. An auxiliary loss is
    weighted by rows for a mean, whatever `count` says."""
    named_microbatch_losses: NamedLosses[MicrobatchLosses] = field(default_factory=NamedLosses)
    """The same per microbatch in order; 0 where a microbatch has none of that name."""
    total: Tensor | None = None
    """0-dim, what the gradients are of: `loss` plus each auxiliary loss times its own weight; None without a loss."""
    reported: list[Any] = field(default_factory=list)
    """The values that the loss function reported (`LossOutput`), one per microbatch in order (where microbatches are
    cut, a list with one per slice), on the rank that computed their losses; empty elsewhere, and where nothing was."""
    data_times: DataTimes | None = None
    """The time that the data of a `Stream` cost this rank in this step; None for a batch that was there as a whole."""


def reported_by_microbatch(losses: StepLosses) -> list[Any]:
    """Return what the loss function reported of the microbatches whose losses this rank computed."""
    if not losses.reported:
        return []
    microbatches = sorted({microbatch for microbatch, _ in losses.computed})
    rows = [
        [losses.reported.get((microbatch, index)) for index in range(losses.num_slices)] for microbatch in microbatches
    ]
    return [row[0] if losses.num_slices == 1 else row for row in rows]
