"""Which of many simulated changes are worth making: what each saves is weighed against the memory that it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.searching.what_if import Change, Sort

WORTH_SHARE = 0.02
"""The share of the step that a change must save to be worth it; no prediction is more exact."""
WORTH_MEMORY = 2.0
"""A change may let activations grow by so many times the share of the step that it saves."""
NUM_CHANGES: dict[Sort, int] = {"schedule": 6, "split": 2, "microbatches": 2, "weights": 1}
"""The most changes of each sort that a group lists: one sort alone would crowd out the others."""
SIMPLEST: tuple[Sort, ...] = ("split", "microbatches", "weights", "schedule")


@dataclass(frozen=True, slots=True)
class Advice:
    """The changes that save at least 2 % of the step, the most helpful of each group first."""

    worth: tuple[Change, ...]
    """The changes whose activations grow by at most twice the share of the step that they save."""
    costly: tuple[Change, ...]
    """The changes whose activations grow by more: by 80 % for a step that is 20 % shorter."""
    second_copy: tuple[Change, ...]
    """The changes that hold a second copy of the weights, whatever their activations take."""

    @property
    def best(self) -> Change | None:
        """The change to make, which takes least memory of those that save as much but for 2 %."""
        if not self.worth:
            return None
        least = self.worth[0].step_change + WORTH_SHARE
        near = [change for change in self.worth if change.step_change <= least]
        return min(near, key=lambda change: (change.memory_change, SIMPLEST.index(change.sort), change.step_change))


def advice_of(changes: Sequence[Change]) -> Advice:
    """Return the groups of the changes that are worth doing."""
    groups: dict[str, list[Change]] = {"worth": [], "costly": [], "second_copy": []}
    for change in sorted(changes, key=lambda change: change.step_change):
        name = _group_of(change)
        if name and [listed.sort for listed in groups[name]].count(change.sort) < NUM_CHANGES[change.sort]:
            groups[name].append(change)
    return Advice(**{name: tuple(group) for name, group in groups.items()})


def _group_of(change: Change) -> str:
    if change.step_change > -WORTH_SHARE:
        return ""
    if change.copies_weights:
        return "second_copy"
    return "worth" if change.memory_change <= -WORTH_MEMORY * change.step_change else "costly"
