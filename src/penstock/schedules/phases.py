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
  way; `b` and `i` share one count. With `first=4` a count begins at microbatch 4.
* `w(stage)` belongs to the oldest `i` of the stage that has no `w` yet, `w()` to the oldest `i` of the rank.
* The two actions of a `pair` may overlap.
* With k slices, forward n is slice n % k of microbatch n // k, and backward n is its slice k - 1 - n % k.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError, count_of, described, shortened
from penstock.ir.action import Action, Kind

RANK = -1
"""Stands in the place of a stage for any stage of the rank."""
_Rows = NDArray[np.int32]
_Counts = dict[tuple[int, int], "_Count"]
"""The counts of a rank's actions, by kind and stage."""
FORWARD, BACKWARD = int(Kind.FORWARD), int(Kind.BACKWARD)
INPUT, WEIGHT = int(Kind.BACKWARD_INPUT), int(Kind.BACKWARD_WEIGHT)


class PhaseAction(NamedTuple):
    """An action whose microbatch is counted."""

    kind: int
    stage: int
    first: int | None = None
    is_joined: bool = False


class Phase(NamedTuple):
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
        texts = [str(Action(Kind(kind), *place)) for kind, *place in self.rows.tolist()]
        is_first, is_second = self.joined.tolist(), [False, *self.joined.tolist()]
        words = [
            f"({text};" if is_first[position] else f"{text})" if is_second[position] else text
            for position, text in enumerate(texts)
        ]
        return " ".join(words).replace("; ", ";")


@dataclass(slots=True, eq=False)
class _Count:
    """The number of forwards, of backwards (input gradients included) or of weight gradients of a stage."""

    first: int | None = None
    """The microbatch from which the phases count; None where they do not say."""
    size: int = 0
    num_inputs: int = 0
    """How many of the backwards are input gradients."""
    next: int = 0
    """The number of the next action; with slices, that of a slice of a microbatch."""
    step: int = 1
    """The difference between the numbers of two actions: -1 where backwards are in descending order."""


def f(stage: int, *, first: int | None = None) -> PhaseAction:
    """Forward of a stage."""
    return PhaseAction(FORWARD, stage, first)


def b(stage: int, *, first: int | None = None) -> PhaseAction:
    """Whole backward of a stage."""
    return PhaseAction(BACKWARD, stage, first)


def i(stage: int, *, first: int | None = None) -> PhaseAction:
    """Input gradient of a stage."""
    return PhaseAction(INPUT, stage, first)


def w(stage: int = RANK) -> PhaseAction:
    """Weight gradient for the oldest input gradient of a stage, or of the rank, that has none yet."""
    return PhaseAction(WEIGHT, stage)


def pair(first: PhaseAction, second: PhaseAction) -> tuple[PhaseAction, PhaseAction]:
    """Two actions that may overlap. Raises: ScheduleError for what is no action."""
    for action in (first, second):
        if not isinstance(action, PhaseAction):
            raise ScheduleError(f"pair: {described(action)}; expected two actions such as f(0) and b(1)")
    return first._replace(is_joined=True), second


def repeat(times: int, *actions: PhaseAction | tuple[PhaseAction, ...]) -> Phase:
    """Actions and pairs that run one after the other, `times` times.

    Raises:
        ScheduleError: for what is no number of times or no action.
    """
    _require_whole("repeat: times", times)
    if index(times) < 0:
        raise ScheduleError(f"repeat({times}, ...): expected 0 times or more; limit the number with max(0, ...)")
    flat: list[PhaseAction] = []
    for entry in actions:
        members = entry if isinstance(entry, tuple) and not isinstance(entry, PhaseAction) else (entry,)
        if not all(isinstance(member, PhaseAction) for member in members):
            raise ScheduleError(f"repeat: {described(entry)}; expected actions such as f(0), w() or pair(f(0), b(1))")
        flat += members
    return Phase(index(times), tuple(flat))


def phases(*parts: Phase, microbatches: int | None = None, slices: int = 1, order: str = "ascending") -> RankOrder:
    """Put phases one after the other, and give each action its microbatch; return the order of one rank.

    A phase is what `repeat` returns: actions without microbatches, and how often they run in turn. The n-th forward of
    a stage is that of microbatch n, and so is the n-th backward; with `f(stage, first=4)`, n is counted from 4. The
    n-th weight gradient belongs to the n-th input gradient. `microbatches` drops the actions of this microbatch and
    later ones, for phases that are written for more of them. With k `slices` per microbatch, action n is of microbatch
    n // k: a forward of slice n % k, a backward of slice k - 1 - n % k, since backwards go from the last slice to the
    first. With `order="descending"`, the backwards of a stage are those of its forwards in reverse order.

    Raises:
        ScheduleError: if something is computed twice, if a forward lacks its backward, or the reverse, and for what is
            no number of a stage, microbatch or slice.
    """
    _require_whole("phases: slices", slices, 1)
    if microbatches is not None:
        _require_whole("phases: microbatches", microbatches, 0)
    for phase in parts:
        if not isinstance(phase, Phase):
            raise ScheduleError(f"phases: {described(phase)}; expected phases such as repeat(1, f(0))")
    if order not in ("ascending", "descending"):
        raise ScheduleError(f"phases: order={shortened(order)}; expected 'ascending' or 'descending'")
    parts = tuple(phase for phase in parts if phase.times)
    # Count the actions by kind and stage, and refuse counts that no order can have.
    counts = _counts_of_actions(parts)
    _require_balance(counts, slices, microbatches)
    stages = _stages_with_late_weights(counts)
    # Set the number at which each count begins, and whether it goes up or down. A number is a microbatch or, with
    # slices, that of a slice among all slices. `count.first` is the `first=` of the actions, None for none.
    for (kind, _), count in counts.items():
        is_down = order == "descending" and kind != FORWARD
        count.next = (count.first or 0) * slices + (count.size - 1 if is_down else 0)
        count.step = -1 if is_down else 1
    # Number all actions in their order. Where a stage mixes whole and split backwards, its weight gradients cannot be
    # counted by themselves: they get the numbers of their input gradients once those are known.
    rows, joined = _number_actions(parts, counts)
    _number_weights_by_inputs(rows, stages)
    if microbatches is not None:
        _, _, number = rows
        is_in_range = number < microbatches * slices
        joined[:-1] &= is_in_range[1:]  # an action whose partner is dropped runs alone
        rows, joined = rows[:, is_in_range], joined[is_in_range]
    # Split each number into a microbatch and a slice.
    return RankOrder(rows.T if slices == 1 else _with_slices(rows, slices, order), joined)


def _number_actions(parts: Sequence[Phase], counts: _Counts) -> tuple[_Rows, NDArray[np.bool_]]:
    """Return [3, num_actions] kind, stage and number of all actions in order, and whether each is the first of a pair.

    A number is that of a microbatch, or of a slice if microbatches are cut. `counts` hold the next number of each kind
    and stage and its step, 1 or -1; they end at their last numbers.
    """
    num_actions = sum(phase.times * len(phase.actions) for phase in parts)
    rows, joined = np.empty((3, num_actions), np.int32), np.zeros(num_actions, np.bool_)
    kind, stage, number = rows
    end = 0
    for phase in parts:
        counts_of_actions = [counts[_count_key(action)] for action in phase.actions]
        begin, end = end, end + phase.times * len(phase.actions)
        for position, (action, count) in enumerate(zip(phase.actions, counts_of_actions, strict=True), begin):
            positions = slice(position, end, len(phase.actions))
            # Where an action stands k times in a phase, each run of the phase takes k numbers, so those of one of the k
            # are k steps apart.
            stride = count.step * counts_of_actions.count(count)
            kind[positions] = action.kind
            stage[positions] = action.stage
            number[positions] = np.arange(count.next, count.next + phase.times * stride, stride)
            if action.is_joined:
                joined[positions] = True
            count.next += count.step
        # The loop above has counted one of the phase's `times` runs. Here the counts go past the remaining ones.
        for count in set(counts_of_actions):
            count.next += (phase.times - 1) * count.step * counts_of_actions.count(count)
    return rows, joined


def _require_whole(subject: str, value: object, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or (least is not None and value < least):
        expected = "a whole number" if least is None else f"a whole number of {least} or more"
        raise ScheduleError(f"{subject}: {described(value)}; expected {expected}")


def _count_key(action: PhaseAction) -> tuple[int, int]:
    """Return the kind and the stage under which an action is counted; input gradients count as backwards."""
    return BACKWARD if action.kind == INPUT else action.kind, action.stage


def _counts_of_actions(parts: Sequence[Phase]) -> _Counts:
    """Count how often the phases run each kind of action of each stage."""
    counts: _Counts = {}
    for phase in parts:
        for action in phase.actions:
            _require_whole("phases: the stage", action.stage, RANK if action.kind == WEIGHT else 0)
            if action.first is not None:
                _require_whole("phases: first", action.first, 0)
            count = counts.setdefault(_count_key(action), _Count(action.first))
            if count.first is not None and action.first not in (None, count.first):
                raise ScheduleError(
                    f"phases: stage {action.stage} counts from {count.first} and again from {action.first}, which runs "
                    "something twice or never; expected one first microbatch, so give the same everywhere"
                )
            count.first = count.first if action.first is None else action.first
            count.size += phase.times
            count.num_inputs += phase.times * (action.kind == INPUT)
    return counts


def _with_slices(rows: _Rows, slices: int, order: str) -> _Rows:
    """[num_actions, 4] kind, stage, microbatch and slice, from rows that are numbered over all slices in turn."""
    kind, stage, number = rows
    microbatch, slice_index = np.divmod(number, slices)
    if order == "ascending":  # descending numbers have the last slice first already
        slice_index = np.where(kind == FORWARD, slice_index, slices - 1 - slice_index)
    return np.column_stack([kind, stage, microbatch, slice_index])


def _number_weights_by_inputs(rows: _Rows, stages: Iterable[int]) -> None:
    """Give the n-th weight gradient of each of these stages the number of the n-th input gradient there."""
    kind, stage_of_row, number = rows
    for stage in stages:
        is_input, is_weight = kind == INPUT, kind == WEIGHT
        if stage != RANK:
            is_input, is_weight = is_input & (stage_of_row == stage), is_weight & (stage_of_row == stage)
        inputs, weights = np.flatnonzero(is_input), np.flatnonzero(is_weight)
        stage_of_row[weights] = stage_of_row[inputs]
        number[weights] = number[inputs]


def _stages_with_late_weights(counts: _Counts) -> list[int]:
    """Check that each input gradient (I) has its weight gradient (W); return the stages whose W need a look-up.

    The n-th W of a stage belongs to its n-th I. Where all backwards of a stage are split, W and backwards are counted
    alike, so the number follows from the count. A look-up in the finished order is needed where a stage also has whole
    backwards, or where W name no stage (`RANK`).

    Raises:
        ScheduleError: a stage, or the rank, has more I than W or the reverse, or W both with a stage and without one.
    """
    weight_counts = {stage: count for (kind, stage), count in counts.items() if kind == WEIGHT}
    split_counts = {stage: count for (_, stage), count in counts.items() if count.num_inputs}
    if RANK in weight_counts and len(weight_counts) > 1:
        raise ScheduleError("phases: w() and w(stage) on one rank; expected one of them, so write w(stage) for all")
    num_inputs_of_stage = {stage: count.num_inputs for stage, count in split_counts.items()}
    # A W without a stage may belong to an I of any stage, so only the sums of the rank can be compared.
    if RANK in weight_counts:
        num_inputs_of_stage = {RANK: sum(num_inputs_of_stage.values())}
    for stage in num_inputs_of_stage | weight_counts:
        num_inputs = num_inputs_of_stage.get(stage, 0)
        num_weights = weight_counts[stage].size if stage in weight_counts else 0
        if num_inputs != num_weights:
            name = "the rank" if stage == RANK else f"stage {stage}"
            raise ScheduleError(
                f"phases: {name} has {count_of(num_inputs, 'input gradient')} and "
                f"{count_of(num_weights, 'weight gradient')}; expected one for the other, so repeat i and w as often"
            )
    # W begin at the microbatch at which the backwards of their stage begin.
    for stage, count in split_counts.items():
        if stage in weight_counts:
            weight_counts[stage].first = count.first
    return [stage for stage, count in weight_counts.items() if stage == RANK or split_counts[stage].size != count.size]


def _require_balance(counts: _Counts, slices: int, microbatches: int | None) -> None:
    """Refuse a stage that runs other microbatches forward than backward."""
    limit = sys.maxsize if microbatches is None else microbatches * slices
    unit = "microbatch" if slices == 1 else "slice"
    numbers = {}
    for key, count in counts.items():
        first = (count.first or 0) * slices
        numbers[key] = range(first, min(first + count.size, limit))
    stages = {stage for kind, stage in counts if kind != WEIGHT}
    if not any(kind == BACKWARD for kind, _ in counts):
        return  # forwards alone, for evaluation
    for stage in sorted(stages):
        forward, backward = (numbers.get((kind, stage), range(0)) for kind in (FORWARD, BACKWARD))
        if forward != backward:
            raise ScheduleError(
                f"phases: stage {stage} runs forward on {_spelled(forward)} and backward on {_spelled(backward)}; "
                f"expected each {unit} once in both, so let the repeats of f and of b and i add up to the same number"
            )


def _spelled(numbers: range) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
