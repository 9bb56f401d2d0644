"""Phases: the vocabulary in which the order of one rank is written.

    def order(rank, ranks, microbatches):                    # 1F1B
        warmup = min(microbatches, ranks - rank - 1)
        return phases(
            repeat(warmup, f(rank)),
            repeat(microbatches - warmup, f(rank), b(rank)),
            repeat(warmup, b(rank)),
        )

`f`, `b`, `i` and `w` are the forward, the whole backward, the input gradient and the weight gradient of a stage. They
name no microbatch: microbatches are counted.

* A stage counts its forwards from 0 on, in the order in which the phases run them. It counts its backwards in the same
  way; `b` and `i` share one count. `first=4` begins a count at microbatch 4.
* `w(stage)` belongs to the oldest `i` of the stage that has no `w` yet, `w()` to the oldest `i` of the rank.
* The two actions of a `pair` may overlap.
* With k slices, forward n is slice n % k of microbatch n // k, and backward n is its slice k - 1 - n % k.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError, count_of, described
from penstock.ir.action import Action, Kind

RANK = -1
"""In the place of a stage: any stage of the rank."""
FORWARDS, BACKWARDS, WEIGHTS = "forward", "backward", "weight gradient"
COUNTED = {
    Kind.FORWARD: FORWARDS,
    Kind.BACKWARD: BACKWARDS,
    Kind.BACKWARD_INPUT: BACKWARDS,
    Kind.BACKWARD_WEIGHT: WEIGHTS,
}
_KIND, _STAGE, _NUMBER = range(3)
_Columns = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PhaseAction:
    """An action whose microbatch is counted."""

    kind: Kind
    stage: int
    first: int | None = None
    is_joined: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """Actions that run one after the other, `times` times."""

    times: int
    actions: tuple[PhaseAction, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The actions of one rank, in order."""

    rows: NDArray[np.int32]
    """[num_actions, 3 or 4] kind, stage, microbatch and, where microbatches are cut, slice."""
    joined: NDArray[np.bool_]
    """[num_actions] whether an action is the first of an overlapped pair."""

    def __str__(self) -> str:
        """Write the actions as a row of a grid."""
        texts = [str(Action(Kind(kind), *rest)) for kind, *rest in self.rows.tolist()]
        opens, closes = self.joined.tolist(), [False, *self.joined.tolist()]
        words = [f"({text};" if opens[n] else f"{text})" if closes[n] else text for n, text in enumerate(texts)]
        return " ".join(words).replace("; ", ";")


class _Count(NamedTuple):
    """The forwards, the backwards or the weight gradients of a stage, counted from one microbatch on."""

    what: str
    stage: int
    first: int


def f(stage: int, *, first: int | None = None) -> PhaseAction:
    """Forward of a stage."""
    return PhaseAction(Kind.FORWARD, stage, first)


def b(stage: int, *, first: int | None = None) -> PhaseAction:
    """Whole backward of a stage."""
    return PhaseAction(Kind.BACKWARD, stage, first)


def i(stage: int, *, first: int | None = None) -> PhaseAction:
    """Input gradient of a stage."""
    return PhaseAction(Kind.BACKWARD_INPUT, stage, first)


def w(stage: int = RANK) -> PhaseAction:
    """Weight gradient for the oldest input gradient of a stage, or of the rank, that has none yet."""
    return PhaseAction(Kind.BACKWARD_WEIGHT, stage)


def pair(first: PhaseAction, second: PhaseAction) -> tuple[PhaseAction, PhaseAction]:
    """Two actions that may overlap."""
    return replace(first, is_joined=True), second


def repeat(times: int, *actions: PhaseAction | tuple[PhaseAction, ...]) -> Phase:
    """Actions and pairs that run one after the other, `times` times.

    Raises:
        ScheduleError: for a negative number of times, or what is no action.
    """
    if index(times) < 0:
        raise ScheduleError(f"repeat({times}, ...): expected 0 times or more; limit the number with max(0, ...)")
    flat = [action for given in actions for action in (given if isinstance(given, tuple) else (given,))]
    for action in flat:
        if not isinstance(action, PhaseAction):
            raise ScheduleError(f"repeat: {described(action)}; expected actions such as f(0), w() or pair(f(0), b(1))")
    return Phase(index(times), tuple(flat))


def phases(*parts: Phase, microbatches: int | None = None, slices: int = 1, order: str = "ascending") -> RankOrder:
    """Put phases one after the other and number their actions.

    `microbatches` drops what is numbered so or higher, for phases that are written for more microbatches than there
    are. `order="descending"` numbers the backwards from the last to the first.

    Raises:
        ScheduleError: if something is computed twice, or if a forward lacks its backward, or the reverse.
    """
    for part in parts:
        if not isinstance(part, Phase):
            raise ScheduleError(f"phases: {described(part)}; expected phases such as repeat(1, f(0))")
    if order not in ("ascending", "descending"):
        raise ScheduleError(f"phases: order={order!r}; expected 'ascending' or 'descending'")
    parts = tuple(part for part in parts if part.times)
    counts = _counts(parts)
    sizes = Counter[_Count]()
    for part, of_actions in zip(parts, counts, strict=True):
        for count in of_actions:
            sizes[count] += part.times
    _require_balance(sizes, slices, microbatches)

    # The next number of each count, and the step to the one after it.
    steps = {count: -1 if order == "descending" and count.what is BACKWARDS else 1 for count in sizes}
    following = {count: count.first * slices + (size - 1) * (steps[count] < 0) for count, size in sizes.items()}
    num_actions = sum(part.times * len(part.actions) for part in parts)
    columns, joined = np.empty((3, num_actions), np.int32), np.zeros(num_actions, np.bool_)
    end = 0
    for part, of_actions in zip(parts, counts, strict=True):
        begin, end = end, end + part.times * len(part.actions)
        for position, (action, count) in enumerate(zip(part.actions, of_actions, strict=True), begin):
            rows = slice(position, end, len(part.actions))
            stride = steps[count] * of_actions.count(count)
            columns[_KIND, rows] = action.kind
            columns[_STAGE, rows] = action.stage
            columns[_NUMBER, rows] = np.arange(following[count], following[count] + part.times * stride, stride)
            if action.is_joined:
                joined[rows] = True
            following[count] += steps[count]
        for count in set(of_actions):
            following[count] += (part.times - 1) * steps[count] * of_actions.count(count)
    _own_weights(columns, _weight_stages(parts))
    if microbatches is not None:
        keep = columns[_NUMBER] < microbatches * slices
        joined[:-1] &= keep[1:]
        columns, joined = columns[:, keep], joined[keep]
    return RankOrder(columns.T if slices == 1 else _in_slices(columns, slices, order), joined)


def _counts(parts: tuple[Phase, ...]) -> list[list[_Count]]:
    """Per phase and action its count; without a `first`, the one that the stage is at."""
    current: dict[tuple[str, int], _Count] = {}

    def count_at(action: PhaseAction) -> _Count:
        key = COUNTED[action.kind], action.stage
        if action.first is not None or key not in current:
            current[key] = _Count(*key, action.first or 0)
        return current[key]

    return [[count_at(action) for action in part.actions] for part in parts]


def _in_slices(columns: _Columns, slices: int, order: str) -> NDArray[np.int32]:
    """[num_actions, 4] what is numbered over the slices of all microbatches, with microbatch and slice."""
    microbatch, part = np.divmod(columns[_NUMBER], slices)
    if order == "ascending":  # descending numbers have the last slice first already
        part = np.where(columns[_KIND] == Kind.FORWARD, part, slices - 1 - part)
    return np.column_stack([columns[_KIND], columns[_STAGE], microbatch, part])


def _own_weights(columns: _Columns, stages: set[int]) -> None:
    """Give the n-th weight gradient of each of these stages the number of the n-th input gradient there."""
    kind, stage_of_row, number = columns
    for stage in stages:
        givers, takers = kind == Kind.BACKWARD_INPUT, kind == Kind.BACKWARD_WEIGHT
        if stage == RANK:
            stage_of_row[np.flatnonzero(takers)] = stage_of_row[np.flatnonzero(givers)]
        else:
            givers, takers = givers & (stage_of_row == stage), takers & (stage_of_row == stage)
        number[np.flatnonzero(takers)] = number[np.flatnonzero(givers)]


def _weight_stages(parts: tuple[Phase, ...]) -> set[int]:
    """The stages that weight gradients name, each with as many input gradients."""
    inputs, weights = Counter[int](), Counter[int]()
    for part in parts:
        for action in part.actions:
            inputs[action.stage] += part.times * (action.kind is Kind.BACKWARD_INPUT)
            weights[action.stage] += part.times * (action.kind is Kind.BACKWARD_WEIGHT)
    if RANK in weights:
        if weights[RANK] != weights.total():
            raise ScheduleError("phases: w() and w(stage) on one rank; expected one of them, so write w(stage) for all")
        inputs = Counter({RANK: inputs.total()})
    for stage in inputs | weights:
        if inputs[stage] != weights[stage]:
            name = "the rank" if stage == RANK else f"stage {stage}"
            raise ScheduleError(
                f"phases: {name} has {count_of(inputs[stage], 'input gradient')} and "
                f"{count_of(weights[stage], 'weight gradient')}; expected one for the other, so repeat i and w as often"
            )
    return {stage for stage, number in weights.items() if number}


def _require_balance(sizes: Mapping[_Count, int], slices: int, microbatches: int | None) -> None:
    """Refuse a stage that computes something twice, or other microbatches forward than backward."""
    most = max((count.first * slices + size for count, size in sizes.items()), default=0)
    limit = most if microbatches is None else microbatches * slices
    unit = "microbatch" if slices == 1 else f"slice, of {slices} per microbatch,"
    spans = defaultdict[tuple[str, int], list[range]](list)
    for what, stage, first in sorted(sizes):
        there = spans[what, stage]
        numbers = range(first * slices, min(first * slices + sizes[_Count(what, stage, first)], limit))
        if there and numbers and numbers[0] < there[-1].stop:
            raise ScheduleError(
                f"phases: stage {stage} runs {what} of {unit} {numbers[0]} twice, as counts begin at "
                f"{there[-1].start // slices} and {first}; expected once, so repeat it less often or give another first"
            )
        if there and numbers and numbers[0] == there[-1].stop:
            numbers = range(there.pop().start, numbers.stop)
        there += [numbers] * bool(numbers)
    if not any(what is BACKWARDS for what, *_ in sizes):
        return  # forwards alone, for evaluation
    for stage in sorted({count.stage for count in sizes if count.what is not WEIGHTS}):
        forward, backward = spans[FORWARDS, stage], spans[BACKWARDS, stage]
        if forward != backward:
            raise ScheduleError(
                f"phases: stage {stage} runs forward on {_spelled(forward)} and backward on {_spelled(backward)}; "
                f"expected each {unit} once in both, so let the repeats of f and of b and i add up to the same number"
            )


def _spelled(spans: list[range]) -> str:
    return ", ".join(f"{span[0]} to {span[-1]}" for span in spans) or "none"
