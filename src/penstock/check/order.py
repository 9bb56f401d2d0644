"""Proof 1: every action is there once, on its rank, and nothing stands in front of what it needs on its own rank."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.check.report import Findings, Subject
from penstock.ir.action import Action, Kind
from penstock.ir.deps import NONE
from penstock.ir.instruction import Op
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The computations of a table as a schedule, and the row of the table for each of them."""

    schedule: Schedule
    row: NDArray[np.int64]
    rank: NDArray[np.int32]

    @classmethod
    def of(cls, subject: Subject) -> "Actions":
        table = subject.table
        if isinstance(table, Schedule):
            return cls(table, np.arange(subject.num_rows), subject.rank)
        keep = table.is_compute
        kept_before = np.concatenate([[0], np.cumsum(keep)])
        schedule = Schedule(
            table.name, table.placement, table.num_microbatches, table.num_slices, table.route_of_microbatch,
            table.op[keep], table.stage[keep], table.microbatch[keep], table.slice[keep], table.joined[keep],
            kept_before[table.offsets],
        )  # fmt: skip
        return cls(schedule, np.flatnonzero(keep), subject.rank[keep])


def check_pairs(subject: Subject, findings: Findings) -> bool:
    """Prove that every joined row is a computation followed by its partner on the same rank."""
    table = subject.table
    first = np.flatnonzero(table.joined)
    if not len(first):
        return True
    second = np.minimum(first + 1, subject.num_rows - 1)
    good = (
        (second > first)
        & (subject.rank[second] == subject.rank[first])
        & (subject.op[first] <= Op.BACKWARD_WEIGHT)
        & (subject.op[second] <= Op.BACKWARD_WEIGHT)
        & ~table.joined[second]
    )
    for row in first[~good].tolist():
        findings.add(
            row,
            "is marked as the first of an overlapped pair, but no partner follows; expected exactly two computations",
            "Take the mark away, or put the second computation of the pair right behind it",
        )
    return bool(good.all())


def check_names(subject: Subject, findings: Findings) -> bool:
    """Prove that no row names a stage, microbatch or slice that does not exist or belongs elsewhere."""
    table = subject.table
    stage_exists = (table.stage >= 0) & (table.stage < table.num_stages)
    microbatch_exists = (table.microbatch >= 0) & (table.microbatch < table.num_microbatches)
    slice_exists = (table.slice >= 0) & (table.slice < table.num_slices)
    exists = stage_exists & microbatch_exists & slice_exists
    stage, microbatch = np.where(stage_exists, table.stage, 0), np.where(microbatch_exists, table.microbatch, 0)
    at_home = subject.rank_of_stage[stage] == subject.rank
    route_of_stage = np.array(table.placement.route_of_stage)
    on_route = route_of_stage[stage] == table.route_of_microbatch[microbatch]
    on_route |= subject.op > Op.RECEIVE_BACKWARD  # the others name no microbatch
    wrong = np.flatnonzero(~(exists & at_home & on_route))
    for row in wrong.tolist():
        if not exists[row]:
            _add_foreign(subject, findings, row)
        elif not at_home[row]:
            owner = subject.rank_of_stage[table.stage[row]]
            findings.add(
                row,
                f"is on the wrong rank: stage {table.stage[row]} is held by rank {owner}",
                f"Move it to rank {owner}, or change the placement",
            )
        else:
            findings.add(
                row,
                f"is foreign: microbatch {table.microbatch[row]} does not travel the route of stage {table.stage[row]}",
                "Drop it, or change the microbatch's route",
            )
    return not len(wrong)


def _add_foreign(subject: Subject, findings: Findings, row: int) -> None:
    table = subject.table
    fields = (
        ("stage", int(table.stage[row]), table.num_stages),
        ("microbatch", int(table.microbatch[row]), table.num_microbatches),
        ("slice", int(table.slice[row]), table.num_slices),
    )
    for word, value, count in fields:
        if not 0 <= value < count:
            findings.add(row, f"names the foreign {word} {value}; expected 0..{count - 1}", "Drop it, or rename it")


def check_complete(actions: Actions, findings: Findings) -> bool:
    """Prove one F, and one B or one I and one W (none in a forward-only schedule), of all that every stage must run."""
    schedule = actions.schedule
    shape = (len(Kind), schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    inside = np.ones(schedule.num_actions, np.bool_)
    for column, size in ((schedule.stage, shape[1]), (schedule.microbatch, shape[2]), (schedule.slice, shape[3])):
        inside &= (column >= 0) & (column < size)
    rows = np.flatnonzero(inside)
    columns = (schedule.kind[rows], schedule.stage[rows], schedule.microbatch[rows], schedule.slice[rows])
    key = np.ravel_multi_index(tuple(column.astype(np.int64) for column in columns), shape)
    counts = np.bincount(key, minlength=int(np.prod(shape))).reshape(shape)
    last = np.full(shape, NONE, np.int64)
    last.reshape(-1)[key] = rows
    before = len(findings.violations)

    if (counts > 1).any():
        _add_duplicates(actions, findings, rows, key)
    route_of_stage = np.array(schedule.placement.route_of_stage)
    expected = (route_of_stage[:, None] == schedule.route_of_microbatch[None, :])[:, :, None]
    _Completeness(actions, findings, counts > 0, last).add_all(np.broadcast_to(expected, shape[1:]))
    return len(findings.violations) == before


def _add_duplicates(actions: Actions, findings: Findings, rows: NDArray[Any], key: NDArray[Any]) -> None:
    order = np.argsort(key, kind="stable")
    repeats = np.flatnonzero(np.diff(key[order]) == 0) + 1
    for index in repeats.tolist():
        row, first = int(actions.row[rows[order[index]]]), int(actions.row[rows[order[index - 1]]])
        findings.add(
            row,
            f"is a duplicate of {findings.subject.place(first)}; expected one",
            "Drop one of the two",
        )


@dataclass(frozen=True, slots=True)
class _Completeness:
    """What is there of each (stage, microbatch, slice), by kind, and in which row."""

    actions: Actions
    findings: Findings
    there: NDArray[np.bool_]
    """[num_kinds, num_stages, num_microbatches, num_slices]"""
    last: NDArray[np.int64]

    def add_all(self, expected: NDArray[np.bool_]) -> None:
        forward, whole, inputs, weights = self.there
        trains = not self.actions.schedule.is_forward_only
        for where in self._where(whole & (inputs | weights)):
            part = Kind.BACKWARD_INPUT if inputs[where] else Kind.BACKWARD_WEIGHT
            other = self.findings.subject.place(self._row(part, where))
            problem = f"computes again what {other} computes; expected one B, or one I and one W"
            self.findings.add(self._row(Kind.BACKWARD, where), problem, "Drop the B, or the I and the W")
        for where in self._where(inputs & ~weights & ~whole):
            weight = self._text(Kind.BACKWARD_WEIGHT, where)
            problem = f"has no weight part; expected one {weight} behind it"
            self.findings.add(self._row(Kind.BACKWARD_INPUT, where), problem, f"Add {weight} behind it")
        for where in self._where(weights & ~inputs & ~whole):
            text = self._text(Kind.BACKWARD_INPUT, where)
            problem = f"has no input part; expected one {text} before it"
            self.findings.add(self._row(Kind.BACKWARD_WEIGHT, where), problem, f"Add {text} before it")
        has_backward = whole | inputs | weights
        for where in self._where(has_backward & ~forward):
            self._add_lone_backward(where)
        for where in self._where(forward & ~has_backward & trains):
            text = self._text(Kind.BACKWARD, where)
            problem = f"has no backward; expected one {text}, or one I and one W"
            self.findings.add(self._row(Kind.FORWARD, where), problem, f"Add {text} behind it, or drop every backward")
        for where in self._where(expected & ~forward & ~has_backward):
            self._add_absent(where, trains)

    def _add_lone_backward(self, where: tuple[int, int, int]) -> None:
        kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        kind = next(kind for kind in kinds if self.there[(kind, *where)])
        text = self._text(Kind.FORWARD, where)
        problem = f"has no forward; expected one {text} before it"
        self.findings.add(self._row(kind, where), problem, f"Add {text} before it")

    def _add_absent(self, where: tuple[int, int, int], trains: bool) -> None:
        missing = self._text(Kind.FORWARD, where)
        if trains:
            missing += f" and {self._text(Kind.BACKWARD, where)} (or its I and W)"
        rank = int(self.findings.subject.rank_of_stage[where[0]])
        verb = "are" if trains else "is"
        problem = f"{missing} {verb} missing; every stage runs every microbatch of its route once"
        self.findings.add_missing(rank, problem, f"Add {missing}")

    def _row(self, kind: Kind, where: tuple[int, int, int]) -> int:
        return int(self.actions.row[self.last[(kind, *where)]])

    @staticmethod
    def _text(kind: Kind, where: tuple[int, int, int]) -> str:
        return str(Action(kind, *where))

    @staticmethod
    def _where(found: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
        if not found.any():
            return []
        return [(int(stage), int(microbatch), int(part)) for stage, microbatch, part in np.argwhere(found)]


def check_positions(actions: Actions, before: NDArray[np.int32], findings: Findings) -> bool:
    """Prove that nothing stands in front of what it needs on its own rank, or is paired with it."""
    schedule = actions.schedule
    group = np.arange(schedule.num_actions)
    group[1:] -= schedule.joined[:-1]
    needed = np.where(before == NONE, 0, before)
    own_rank = (before != NONE) & (actions.rank[needed] == actions.rank[:, None])
    wrong = own_rank & (group[needed] >= group[:, None])
    for action, column in np.argwhere(wrong).tolist() if wrong.any() else []:
        other = int(before[action, column])
        _add_position(actions, findings, action, other, together=bool(group[other] == group[action]))
    return not wrong.any()


def _add_position(actions: Actions, findings: Findings, action: int, other: int, *, together: bool) -> None:
    row, needed = int(actions.row[action]), int(actions.row[other])
    subject = findings.subject
    text = subject.text(needed)
    if together:
        problem = f"is paired with {subject.place(needed, seen_from=row)}, for which it must wait"
        findings.add(row, problem, "Take the pair apart")
        return
    kinds = (Kind(int(actions.schedule.kind[action])), Kind(int(actions.schedule.kind[other])))
    same_stage = actions.schedule.stage[action] == actions.schedule.stage[other]
    role = {
        (Kind.BACKWARD, Kind.FORWARD): "its forward ",
        (Kind.BACKWARD_INPUT, Kind.FORWARD): "its forward ",
        (Kind.BACKWARD_WEIGHT, Kind.BACKWARD_INPUT): "its input part ",
    }.get(kinds, "")
    reason = "" if role and same_stage else ", whose result it needs"
    findings.add(
        row,
        f"runs before {role}{subject.place(needed, seen_from=row)}{reason}",
        f"Move {text} in front of it, or drop microbatch {actions.schedule.microbatch[action]}",
    )
