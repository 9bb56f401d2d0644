"""Brings the losses of a step from the ranks that computed them to all ranks; it is also the end of the step.

All of them travel in one sum over the ranks of a table of float64, which holds every loss exactly; adding the zeros of
the ranks that have nothing in a cell changes nothing. Names do not fit into such a table: a rank that has one that the
others may not know says so in the table, and then, once, they exchange names and sum up a larger table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.losses.loss import LossShares, combine_losses
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.losses.results import MicrobatchLosses, NamedLosses, StepResult, reported_by_microbatch
from penstock.execute.losses.step_losses import StepLosses

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LossExchange:
    """Shares the losses of one rank's steps with the other ranks; every rank has one and calls it alike."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control = control
        self._device = device
        self._names: list[LossName] = []
        """What all ranks know, in the same order: those of the loss function, then those of layers."""

    def share(self, own: StepLosses) -> StepResult:
        """Give every rank every loss of the step.

        Raises:
            PipelineError: on every rank, if a layer and the loss function use one name for two losses.
        """
        table = self._summed(own)
        if table.has_new_names:  # on all ranks alike, since they read it off the same sum
            self._learn_names(own)
            table = self._summed(own)
        main, named = table.main(), dict(table.named(own.auxiliary_shares))
        added = named.pop(ALL_TOGETHER, None)
        return StepResult(
            loss=None if main is None else main.of_batch,
            losses=MicrobatchLosses([] if main is None else main.of_microbatches),
            named_losses=NamedLosses({name: losses.of_batch for name, losses in named.items()}),
            named_microbatch_losses=NamedLosses({name: losses.of_microbatches for name, losses in named.items()}),
            total=None if main is None else main.of_batch if added is None else main.of_batch + added.of_batch,
            reported=reported_by_microbatch(own),
        )

    def _summed(self, own: StepLosses) -> "_Table":
        table = _Table(own, self._names, self._device)
        cells = table.cells.to("cpu")  # the only time in a step that the host waits for the device
        self._control.all_reduce(cells)
        table.numbers, table.cells = cells.tolist(), cells.to(self._device)
        return table

    def _learn_names(self, own: StepLosses) -> None:
        described = [[name.name, name.is_auxiliary, _DTYPES.index(name.dtype)] for name in own.named]
        names = list(self._names)
        for theirs in self._control.all_gather_object(described):
            assert isinstance(theirs, list)
            names += [LossName(name, is_auxiliary, _DTYPES[dtype]) for name, is_auxiliary, dtype in theirs]
        _require_one_meaning(names)
        self._names = sorted(dict.fromkeys(names), key=lambda name: name.is_auxiliary)


@dataclass(frozen=True, slots=True, eq=False)
class _Losses:
    """One loss of a batch, and of each microbatch."""

    of_batch: Tensor
    of_microbatches: MicrobatchLosses

    @classmethod
    def combined(cls, values: Sequence[Tensor], shares: LossShares) -> "_Losses":
        """Put together the losses of all slices of all microbatches."""
        width = len(shares.fractions[0])
        rows = [values[first : first + width] for first in range(0, len(values), width)]
        pairs = zip(rows, shares.fractions, strict=True)
        losses = [row[0] if width == 1 else combine_losses(row, fractions) for row, fractions in pairs]
        return cls(combine_losses(losses, shares.weights), MicrobatchLosses(losses))


class _Table:
    """What one rank knows of the losses of a step, and, once summed up, what all know.

        has a rank new names? | types | fractions | weights | losses | per known name: how many ranks have it, losses

    All but the first and the numbers of ranks have a cell per microbatch and slice.
    """

    def __init__(self, own: StepLosses, names: Sequence[LossName], device: torch.device) -> None:
        self._names = names
        self._num_slices = own.num_slices
        places = list(product(range(own.num_microbatches), range(own.num_slices)))
        self._num_places = len(places)
        # From 1: 0 is what a rank has that did not compute the loss, so the sum over the ranks is the type of the one.
        types = [1.0 + _DTYPES.index(own.computed[place].dtype) if place in own.computed else 0.0 for place in places]
        fractions = [own.shares.fractions[place[0]][place[1]] if place in own.computed else 0.0 for place in places]
        weights = [own.shares.weights[place[0]] if place in own.computed else 0.0 for place in places]
        none = [0.0] * len(places)
        plain = [float(not own.named.keys() <= set(names)), *types, *fractions, *weights, *none]
        for name in names:
            plain += [float(name in own.named), *none]
        self.cells = torch.tensor(plain, dtype=torch.float64, device=device)
        """The table itself."""
        self._put(own.computed, places, self._start(3))
        for index, name in enumerate(names):
            self._put(own.named.get(name, {}), places, self._start_of_name(index) + 1)
        self.numbers: list[float] = []
        """The cells of all ranks together."""

    @property
    def has_new_names(self) -> bool:
        """Whether any rank has a loss by a name that not all ranks know."""
        return self.numbers[0] > 0

    def main(self) -> _Losses | None:
        """Return what the loss function gave; None where it was not called."""
        types = self._row(0)
        if not all(types):
            return None
        dtypes = [_DTYPES[int(number) - 1] for number in types]
        cells = self.cells[self._start(3) : self._start(4)]
        if len(set(dtypes)) == 1:
            values = list(cells.to(dtypes[0]))
        else:
            values = [value.to(dtype) for value, dtype in zip(cells, dtypes, strict=True)]
        return _Losses.combined(values, self._shares())

    def named(self, auxiliary_shares: LossShares) -> Iterator[tuple[str, _Losses]]:
        """Give each loss that any rank has under a name; of several types the sum, in the wider one."""
        sums: dict[str, tuple[Tensor, torch.dtype]] = {}
        shares: dict[str, LossShares] = {}
        for index, name in enumerate(self._names):
            start = self._start_of_name(index)
            if not self.numbers[start]:
                continue
            values, dtype = self.cells[start + 1 : start + 1 + self._num_places], name.dtype
            if name.name in sums:
                others, other = sums[name.name]
                values, dtype = others + values, torch.promote_types(other, dtype)
            sums[name.name] = values, dtype
            shares[name.name] = auxiliary_shares if name.is_auxiliary else self._shares()
        for text, (values, dtype) in sums.items():
            yield text, _Losses.combined(list(values.to(dtype)), shares[text])

    def _start(self, row: int) -> int:
        return 1 + row * self._num_places

    def _start_of_name(self, index: int) -> int:
        return self._start(4) + index * (1 + self._num_places)

    def _row(self, row: int) -> list[float]:
        return self.numbers[self._start(row) : self._start(row + 1)]

    def _shares(self) -> LossShares:
        fractions, width = self._row(1), self._num_slices
        by_microbatch = [fractions[first : first + width] for first in range(0, len(fractions), width)]
        return LossShares(self._row(2)[::width], by_microbatch)

    def _put(self, losses: dict[tuple[int, int], Tensor], places: Sequence[tuple[int, int]], start: int) -> None:
        if losses:
            where = [start + index for index, place in enumerate(places) if place in losses]
            values = torch.stack([losses[place].to(torch.float64) for place in places if place in losses])
            self.cells[torch.tensor(where, device=self.cells.device)] = values


def _require_one_meaning(names: Sequence[LossName]) -> None:
    """Refuse a name that a layer and the loss function both use."""
    of_layers = {name.name for name in names if name.is_auxiliary}
    for name in names:
        if not name.is_auxiliary and name.name in of_layers:
            raise PipelineError(
                f"both the loss function and an auxiliary loss of a layer are named {name.name!r}; rename one of them, "
                "so that they can be reported apart"
            )
