"""Brings the losses of a step from the ranks that computed them to all ranks; it is also the end of the step.

All of them travel in one gather, as numbers in JSON: float64 holds every loss exactly, and JSON brings one to the
other ranks with the same bits. Names, types and shares travel with the losses.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import Place
from penstock.execute.control.collectives import Control
from penstock.execute.losses.loss import LossShares, combine_losses
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.losses.results import MicrobatchLosses, NamedLosses, StepResult, reported_by_microbatch
from penstock.execute.losses.step_losses import StepLosses

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types travel as indices."""
_Losses = tuple[Tensor, MicrobatchLosses]
"""One loss of a batch, and of each microbatch."""


class LossExchange:
    """Shares the losses of one rank's steps with the other ranks; every rank has one and calls it alike."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control = control
        self._device = device
        self._is_auxiliary: dict[str, bool] = {}
        """Per name that has come in any step, whether layers add the loss."""

    def share(self, own: StepLosses) -> StepResult:
        """Give every rank every loss of the step; one gather.

        Raises:
            PipelineError: on every rank, if a layer and the loss function use one name for two losses.
        """
        everyone = cast(list[dict[str, Any]], self._control.all_gather_object(_told(own)))
        main, shares = self._main([_Computed(*row) for theirs in everyone for row in theirs["computed"]], own)
        named = dict(self._named([row for theirs in everyone for row in theirs["named"]], own, shares))
        loss, losses = main or (None, MicrobatchLosses())
        added, _ = named.pop(ALL_TOGETHER, (None, None))
        return StepResult(
            loss=loss,
            losses=losses,
            named_losses=NamedLosses({name: of_batch for name, (of_batch, _) in named.items()}),
            named_microbatch_losses=NamedLosses({name: each for name, (_, each) in named.items()}),
            total=loss if loss is None or added is None else loss + added,
            reported=reported_by_microbatch(own),
        )

    def _main(self, rows: "Sequence[_Computed]", own: StepLosses) -> tuple[_Losses | None, LossShares]:
        """What the loss function gave, None where it was not called, and the shares of its losses."""
        if len(rows) < own.num_microbatches * own.num_slices:
            return None, own.shares
        rows = sorted(rows)  # by place
        exact = self._exact([row.loss for row in rows])
        of_type = {dtype: exact.to(_DTYPES[dtype]).unbind() for dtype in {row.dtype for row in rows}}
        weights = [row.weight for row in rows if row.slice == 0]
        shares = LossShares(weights, _by_microbatch([row.fraction for row in rows], own.num_slices))
        return _combined([of_type[row.dtype][index] for index, row in enumerate(rows)], shares), shares

    def _named(
        self, rows: Sequence[Sequence[Any]], own: StepLosses, shares: LossShares
    ) -> Iterator[tuple[str, _Losses]]:
        """Each loss that any rank has under a name; of several types the sum, in the wider one."""
        found: dict[LossName, dict[Place, float]] = {}
        for text, is_auxiliary, dtype, cells in rows:
            noted = found.setdefault(LossName(text, is_auxiliary, _DTYPES[dtype]), {})
            for *place, loss in cells:
                noted[tuple(place)] = noted.get(tuple(place), 0.0) + loss
        places = list(product(range(own.num_microbatches), range(own.num_slices)))
        sums: dict[str, tuple[Tensor, torch.dtype]] = {}
        for name in sorted(found, key=lambda name: name.is_auxiliary):
            self._require_one_meaning(name)
            values, dtype = self._exact([found[name].get(place, 0.0) for place in places]), name.dtype
            if name.name in sums:
                others, other = sums[name.name]
                values, dtype = others + values, torch.promote_types(other, dtype)
            sums[name.name] = values, dtype
        for text, (values, dtype) in sums.items():
            own_shares = own.auxiliary_shares if self._is_auxiliary[text] else shares
            yield text, _combined(values.to(dtype).unbind(), own_shares)

    def _exact(self, losses: Sequence[float]) -> Tensor:
        return torch.tensor(losses, dtype=torch.float64, device=self._device)

    def _require_one_meaning(self, name: LossName) -> None:
        if self._is_auxiliary.setdefault(name.name, name.is_auxiliary) != name.is_auxiliary:
            raise PipelineError(
                f"both the loss function and an auxiliary loss of a layer are named {name.name!r}; rename one of them, "
                "so that they can be reported apart"
            )


class _Computed(NamedTuple):
    """A loss of the loss function as it travels."""

    microbatch: int
    slice: int
    loss: float
    dtype: int
    weight: float
    fraction: float


def _combined(values: Sequence[Tensor], shares: LossShares) -> _Losses:
    """Put together the losses of all slices of all microbatches."""
    width = len(shares.fractions[0])
    pairs = zip(_by_microbatch(values, width), shares.fractions, strict=True)
    losses = [row[0] if width == 1 else combine_losses(row, fractions) for row, fractions in pairs]
    return combine_losses(losses, shares.weights), MicrobatchLosses(losses)


def _told(own: StepLosses) -> dict[str, object]:
    """What a rank tells the others: the losses that it has computed."""
    losses = [loss for column in (own.computed, *own.named.values()) for loss in column.values()]
    # The only time in a step that the host waits for the device.
    exact = iter(torch.stack([loss.to(torch.float64) for loss in losses]).tolist() if losses else ())
    weights, fractions = own.shares.weights, own.shares.fractions
    computed = [
        _Computed(part, index, next(exact), _DTYPES.index(loss.dtype), weights[part], fractions[part][index])
        for (part, index), loss in own.computed.items()
    ]
    named = [
        [name.name, name.is_auxiliary, _DTYPES.index(name.dtype), [[*place, next(exact)] for place in column]]
        for name, column in own.named.items()
    ]
    return {"computed": computed, "named": named}


def _by_microbatch(values: Sequence[Any], num_slices: int) -> list[Sequence[Any]]:
    return [values[first : first + num_slices] for first in range(0, len(values), num_slices)]
