"""Brings the losses from the ranks that computed them to all, which ends the step (part 6 of a step).

All of them travel in one gather, as numbers in JSON: float64 holds every loss exactly, and JSON brings one to the
other ranks with the same bits. Names, types and shares travel with the losses.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.accelerator import is_queued
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.control.collectives import Control
from penstock.execute.losses.loss import LossShares, combine_losses
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.losses.results import MicrobatchLosses, NamedLosses, StepResult, reported_by_microbatch
from penstock.execute.losses.step_losses import StepLosses

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of losses, which travel as indices in this tuple."""
_MAIN = "\0"
"""Stands in the place of a name for the loss that the loss function returned."""
_Losses = tuple[Tensor, MicrobatchLosses]
"""One loss of a batch, and the same loss of each microbatch."""


class LossExchange:
    """Shares the losses of one rank's steps with the other ranks; every rank has one and calls it alike."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._within = control, control.within
        self._device = device
        self._is_auxiliary: dict[str, bool] = {}
        """Whether layers add the loss, by each name that has come in any step."""

    def share(self, step_losses: StepLosses) -> StepResult:
        """Give every rank every loss of the step, and those of the job: one gather, with replicas a second.

        Raises:
            PipelineError: on every rank, if a layer and the loss function use one name for two losses.
        """
        reports = cast(list[dict[str, Any]], self._within.all_gather_object(_report(step_losses)))
        main = _main(sorted(row for report in reports for row in report["computed"]), step_losses)
        shares = step_losses.shares if main is None else main.shares
        named_shares = {name: LossShares(*row) for report in reports for name, row in report["shares"].items()}
        shares = replace(shares, by_name=named_shares)
        columns = self._named_columns([row for report in reports for row in report["named"]], step_losses, shares)
        results = self._of_job(columns if main is None else {_MAIN: main} | columns)
        loss, losses = results.pop(_MAIN, (None, MicrobatchLosses()))
        if loss is not None and named_shares:
            # No shares of the microbatches make this sum of their losses: every named loss has shares of its own.
            loss = sum((results[name][0] for name in named_shares), start=torch.zeros_like(loss))
            if step_losses.num_slices > 1:  # nor do shares of slices make the loss of their microbatch
                losses = _sums_of_named({name: (named_shares[name], results[name][1]) for name in named_shares}, losses)
        auxiliary_total, _ = results.pop(ALL_TOGETHER, (None, None))
        return StepResult(
            loss=loss,
            losses=losses,
            named_losses=NamedLosses({name: batch_loss for name, (batch_loss, _) in results.items()}),
            named_microbatch_losses=NamedLosses({name: column for name, (_, column) in results.items()}),
            total=loss if loss is None or auxiliary_total is None else loss + auxiliary_total,
            reported=reported_by_microbatch(step_losses),
        )

    def _named_columns(self, rows: "_Rows", step_losses: StepLosses, shares: LossShares) -> dict[str, "_Column"]:
        """Return the column of each loss that any rank has under a name; of several types the sum, in the wider one."""
        losses_by_name: dict[LossName, dict[MicrobatchKey, float]] = {}
        for text, is_auxiliary, dtype, cells in rows:
            losses_by_place = losses_by_name.setdefault(LossName(text, is_auxiliary, _DTYPES[dtype]), {})
            for *place, loss in cells:
                losses_by_place[tuple(place)] = losses_by_place.get(tuple(place), 0.0) + loss
        places = list(product(range(step_losses.num_microbatches), range(step_losses.num_slices)))
        columns: dict[str, _Column] = {}
        for name in sorted(losses_by_name, key=lambda name: name.is_auxiliary):
            self._require_one_meaning(name)
            values, dtype = [losses_by_name[name].get(place, 0.0) for place in places], name.dtype
            if name.name in columns:
                column = columns[name.name]
                values = [loss + value for loss, value in zip(column.losses, values, strict=True)]
                dtype = torch.promote_types(column.dtypes[0], dtype)
            column_shares = shares.by_name.get(name.name, shares)
            if name.is_auxiliary:
                column_shares = step_losses.auxiliary_shares
            columns[name.name] = _Column(values, [dtype] * len(places), column_shares)
        return columns

    def _of_job(self, columns: "dict[str, _Column]") -> dict[str, "_Losses"]:
        """Put together the losses of each column; those of the batch are the sums over the replicas, in their order."""
        exact = self._on_device([column.losses for column in columns.values()])
        local_losses = dict(zip(columns, map(_losses_of, columns.values(), exact), strict=True))
        if self._control.places.num_replicas == 1:
            return local_losses
        local_shares = {
            name: (_share_of_job(column), _DTYPES.index(reduce(torch.promote_types, column.dtypes)))
            for name, column in columns.items()
        }
        totals: dict[str, float] = {}
        types: dict[str, torch.dtype] = {}
        for name, (loss, dtype) in (item for report in self._control.across(local_shares) for item in report.items()):
            totals[name] = totals.get(name, 0.0) + loss
            types[name] = torch.promote_types(types.get(name, _DTYPES[dtype]), _DTYPES[dtype])
        exact = self._on_device([[total] for total in totals.values()])
        return {
            name: (values[0].to(types[name]), local_losses[name][1] if name in local_losses else MicrobatchLosses())
            for name, values in zip(totals, exact, strict=True)
        }

    def _on_device(self, losses: Sequence[Sequence[float]]) -> Sequence[Tensor]:
        """Return each row of losses as a tensor on the device, to which all rows are brought at once."""
        if not losses:
            return []
        # From memory that is not pinned the host would wait for all that was queued; the copy of pinned one is queued.
        is_ahead = is_queued(self._device)
        on_host = torch.tensor(losses, dtype=torch.float64, device="cpu", pin_memory=is_ahead)
        return on_host.to(self._device, non_blocking=is_ahead).unbind()

    def _require_one_meaning(self, name: LossName) -> None:
        if self._is_auxiliary.setdefault(name.name, name.is_auxiliary) != name.is_auxiliary:
            raise PipelineError(
                f"both the loss function and an auxiliary loss of a layer are named {name.name!r}; rename one of them, "
                "so that they can be reported apart"
            )


_Rows = Sequence[Sequence[Any]]
"""Losses in the reports of ranks, as `_report` makes them."""


class _Column(NamedTuple):
    """One loss of a batch as it was in each slice of each microbatch, in order."""

    losses: Sequence[float]
    dtypes: Sequence[torch.dtype]
    shares: LossShares


def _main(rows: _Rows, step_losses: StepLosses) -> _Column | None:
    """Return the column of the loss function's losses, of rows in order; None where it was not called."""
    if len(rows) < step_losses.num_microbatches * step_losses.num_slices:
        return None
    _, _, losses, dtypes, weights, fractions = zip(*rows, strict=True)
    shares = LossShares(weights[:: step_losses.num_slices], _by_microbatch(fractions, step_losses.num_slices))
    return _Column(losses, [_DTYPES[dtype] for dtype in dtypes], shares)


def _losses_of(column: _Column, exact: Tensor) -> _Losses:
    """Put together the losses of all slices of all microbatches; `exact` has them on the device."""
    values_by_dtype = {dtype: exact.to(dtype).unbind() for dtype in set(column.dtypes)}
    values = [values_by_dtype[dtype][index] for index, dtype in enumerate(column.dtypes)]
    shares = column.shares
    width = len(shares.fractions[0])
    pairs = zip(_by_microbatch(values, width), shares.fractions, strict=True)
    losses = [row[0] if width == 1 else combine_losses(row, fractions) for row, fractions in pairs]
    return combine_losses(losses, shares.weights), MicrobatchLosses(losses)


def _sums_of_named(
    columns: "dict[str, tuple[LossShares, MicrobatchLosses]]", like: MicrobatchLosses
) -> MicrobatchLosses:
    """Return the sum of the named losses of each microbatch, without those in which it counts nothing."""
    return MicrobatchLosses(
        sum((named[index] for shares, named in columns.values() if shares.weights[index]), start=torch.zeros_like(loss))
        for index, loss in enumerate(like)
    )


def _share_of_job(column: _Column) -> float:
    """Return the share of a replica's losses in the loss of the job, in float64."""
    shares, total = column.shares, 0.0
    rows = zip(_by_microbatch(column.losses, len(shares.fractions[0])), shares.fractions, shares.weights, strict=True)
    for losses, fractions, weight in rows:
        # A loss that weighs nothing may be the mean of no tokens, and so not a number.
        parts = [loss * fraction for loss, fraction in zip(losses, fractions, strict=True) if fraction]
        total += sum(parts) * weight if weight else 0.0
    return total


def _report(step_losses: StepLosses) -> dict[str, object]:
    """Return the losses that a rank has computed, for the others.

    A row of the loss function is (microbatch, slice, loss, index of its type, weight, fraction).
    """
    losses = [loss for column in (step_losses.computed, *step_losses.named_losses.values()) for loss in column.values()]
    # Here the host waits for the device, the only time in the exchange. Of several types torch makes the wider one.
    exact = iter(torch.stack(losses).to(torch.float64).tolist() if losses else ())
    weights, fractions = step_losses.shares.weights, step_losses.shares.fractions
    computed_rows = [
        (part, index, next(exact), _DTYPES.index(loss.dtype), weights[part], fractions[part][index])
        for (part, index), loss in step_losses.computed.items()
    ]
    named_rows = [
        (name.name, name.is_auxiliary, _DTYPES.index(name.dtype), [(*place, next(exact)) for place in column])
        for name, column in step_losses.named_losses.items()
    ]
    named_shares = {name: (shares.weights, shares.fractions) for name, shares in step_losses.shares.by_name.items()}
    return {"computed": computed_rows, "named": named_rows, "shares": named_shares}


def _by_microbatch(values: Sequence[Any], num_slices: int) -> list[Sequence[Any]]:
    return [values[first : first + num_slices] for first in range(0, len(values), num_slices)]
