"""Proof 1: every action is there once, on its rank, and nothing is before what it needs on its own rank.

`check_weight_order` is a proof for fused layers alone.
"""

from collections.abc import Collection, Sequence

import numpy as np

from penstock.ir.action import Action, Kind
from penstock.ir.deps import NONE, identities, num_identities
from penstock.ir.hot import Array, Bools, Int32s, Int64s, blocks
from penstock.ir.operations import (
    ENDS_KEEPING,
    IS_COMPUTE,
    KIND_INDEX,
    NAMES_MICROBATCH,
    OPERATIONS,
    RUNS_AUTOGRAD,
    At,
    Op,
)
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.placement import modules_of_ranks
from penstock.proofs.report import Subject

Place = tuple[int, int, int]
"""A stage, a microbatch and a slice."""

_NO_WEIGHT_GRADIENT = "has no weight gradient; expected one {} after it", "Add {} after it"
_NO_INPUT_GRADIENT = "has no input gradient; expected one {} before it", "Add {} before it"
_NO_READER = (
    "has no backward that needs it; expected one {}, or one I and one W, after it",
    "Drop it, or add the backward",
)
_NO_FORWARD = "has no forward; expected one {} before it", "Add {} before it"
_NO_BACKWARD = "has no backward; expected one {}, or one I and one W", "Add {} after it, or drop every backward"
"""Each says that an action lacks another one, and the fix; {} is the action that is missing."""


def bounds_of_stage(table: Table) -> tuple[Int32s, Int32s]:
    """[num_stages] the first row of the rank that holds each stage, and the end of that rank's rows."""
    rank, offsets = np.array(table.placement.rank_of_stage), table.offsets.astype(np.int32)
    return offsets[rank], offsets[rank + 1]


def check_pairs(subject: Subject) -> bool:
    """Prove that every overlapped pair is two computations in a row on one rank."""
    table = subject.table
    first = np.flatnonzero(table.joined)
    if not len(first):
        return True
    second = np.minimum(first + 1, table.num_rows - 1)
    good = (second > first) & (subject.rank[second] == subject.rank[first]) & ~table.joined[second]
    good &= IS_COMPUTE[table.op[first]] & IS_COMPUTE[table.op[second]]
    for row in first[~good].tolist():
        subject.add(
            row,
            "is marked as the first of an overlapped pair, but no partner follows; expected exactly two computations",
            "Take the mark away, or put the second computation of the pair right after it",
        )
    return bool(good.all())


def check_names(subject: Subject) -> bool:
    """Prove that each row is on the rank of its stage, and its microbatch travels that stage's route."""
    num_violations = len(subject.violations)
    for part in blocks(subject.table.num_rows):
        rows = part.start + np.flatnonzero(_is_wrongly_named(subject, part))
        for row in rows.tolist():
            _add_wrong_name(subject, row)
    return len(subject.violations) == num_violations


def _is_wrongly_named(subject: Subject, part: slice) -> Bools:
    table = subject.table
    stage, rows = table.stage[part], np.arange(part.start, part.stop, dtype=np.int32)
    begin, end = bounds_of_stage(table)
    is_wrong: Bools = (rows < begin.take(stage)) | (rows >= end.take(stage))
    if len(table.placement.routes) > 1:
        route_of_stage = np.array(table.placement.route_of_stage)
        is_elsewhere = route_of_stage.take(stage) != table.route_of_microbatch.take(table.microbatch[part])
        is_wrong |= is_elsewhere & NAMES_MICROBATCH.take(subject.table.op[part])
    return is_wrong


def _add_wrong_name(subject: Subject, row: int) -> None:
    table = subject.table
    stage, microbatch = int(table.stage[row]), int(table.microbatch[row])
    owner = subject.rank_of_stage[stage]
    if owner != subject.rank[row]:
        problem = f"is on the wrong rank: stage {stage} is held by rank {owner}"
        subject.add(row, problem, f"Move it to rank {owner}, or change the placement")
    else:
        problem = f"is out of place: microbatch {microbatch} does not travel the route of stage {stage}"
        subject.add(row, problem, "Drop it, or change the microbatch's route")


def check_complete(subject: Subject) -> bool:
    """Prove one F, and one B or one I and one W (none in a forward-only schedule), of all that every stage must run."""
    schedule = subject.schedule
    shape = (len(Kind), schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    identity = identities(schedule)
    is_there = np.zeros(shape, np.bool_)
    for part in blocks(schedule.num_actions):
        is_there.reshape(-1)[_keys(schedule, identity, part)] = True
    has_duplicates = np.count_nonzero(is_there) < schedule.num_actions
    route_of_stage = np.array(schedule.placement.route_of_stage)
    expected = (route_of_stage[:, None] == schedule.route_of_microbatch[None, :])[:, :, None]
    if not has_duplicates and _is_consistent(is_there, expected, schedule.is_forward_only):
        return True

    key = _keys(schedule, identity, slice(None))
    last = np.full(shape, NONE, np.int64)
    last.reshape(-1)[key] = np.arange(schedule.num_actions)
    num_violations = len(subject.violations)
    _suspect_lone_microbatches(subject)
    _add_duplicates(subject, key)
    _add_lacks(subject, is_there, last, np.broadcast_to(expected, shape[1:]))
    return len(subject.violations) == num_violations


def _suspect_lone_microbatches(subject: Subject) -> None:
    """Suspect the only action of its microbatch where a lower one has none: a text with a typo seems to have more."""
    schedule = subject.schedule
    count = np.bincount(schedule.microbatch, minlength=schedule.num_microbatches)
    unnamed = np.flatnonzero(count == 0)
    if not len(unnamed):
        return
    for row in np.flatnonzero((count[schedule.microbatch] == 1) & (schedule.microbatch > unnamed[0])).tolist():
        microbatch = int(schedule.microbatch[row])
        subject.add(
            int(subject.action_row[row]),
            f"alone names microbatch {microbatch}, and nothing names microbatch {unnamed[0]}; it may be a typo",
            "Rename it, or add all that is missing",
            is_suspect=True,
        )


def _keys(schedule: Schedule, identity: Int32s, part: slice) -> Int64s:
    """[num_rows] a number for each (kind, stage, microbatch, slice), for some rows."""
    keys: Int64s = KIND_INDEX[schedule.kind[part]].astype(np.int64) * num_identities(schedule)
    keys += identity[part]
    return keys


def _is_consistent(is_there: Bools, expected: Bools, forward_only: bool) -> bool:
    """Return whether each (stage, microbatch, slice) has all of its actions, or none where none is expected.

    `is_there` [num_kinds, num_stages, num_microbatches, num_slices] says which actions the table has.
    """
    forward, backward, inputs, weights, recompute = is_there
    if forward_only:
        return bool((forward | ~expected).all() and not recompute.any())
    is_all = forward & (inputs == weights) & (backward ^ inputs)
    return bool((is_all | ~(expected | is_there.any(axis=0))).all())


def _add_duplicates(subject: Subject, key: Array) -> None:
    order = np.argsort(key, kind="stable")
    repeats = np.flatnonzero(np.diff(key[order]) == 0) + 1
    for index in repeats.tolist():
        row, first = int(subject.action_row[order[index]]), int(subject.action_row[order[index - 1]])
        subject.add(row, f"is a duplicate of {subject.place(first)}; expected one", "Drop one of the two")


def _add_lacks(subject: Subject, is_there: Bools, last: Int64s, expected: Bools) -> None:
    """Add a violation for each action whose partner is missing, and for what a stage should run and never does.

    A forward needs a backward and the reverse; an input gradient (I) and a weight gradient (W) need each other, and a
    whole backward (B) must stand alone. The arrays are [num_kinds, num_stages, num_microbatches, num_slices]:
    `is_there` whether the table has an action and `last` its last row; `expected` [num_stages, num_microbatches,
    num_slices] whether its route visits the stage.
    """
    forward, backward, inputs, weights, recompute = is_there
    has_backward = backward | inputs | weights
    is_training = not subject.schedule.is_forward_only

    def row_of(kind: Kind, place: Place) -> int:
        return int(subject.action_row[last[(KIND_INDEX[kind], *place)]])

    # A whole backward computes what I and W would compute again.
    for place in _places(backward & (inputs | weights)):
        half = Kind.BACKWARD_INPUT if inputs[place] else Kind.BACKWARD_WEIGHT
        half_place = subject.place(row_of(half, place))
        problem = f"computes again what {half_place} computes; expected one B, or one I and one W"
        subject.add(row_of(Kind.BACKWARD, place), problem, "Drop the B, or the I and the W")
    # Each line: where an action lacks its partner, the action that is there, and the one that is missing.
    for lacks_action, kind, missing_kind, problem, fix in (
        (inputs & ~weights & ~backward, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, *_NO_WEIGHT_GRADIENT),
        (weights & ~inputs & ~backward, Kind.BACKWARD_WEIGHT, Kind.BACKWARD_INPUT, *_NO_INPUT_GRADIENT),
        (recompute & ~(backward | inputs), Kind.RECOMPUTE, Kind.BACKWARD, *_NO_READER),
        (backward & ~forward, Kind.BACKWARD, Kind.FORWARD, *_NO_FORWARD),
        (inputs & ~backward & ~forward, Kind.BACKWARD_INPUT, Kind.FORWARD, *_NO_FORWARD),
        (weights & ~backward & ~inputs & ~forward, Kind.BACKWARD_WEIGHT, Kind.FORWARD, *_NO_FORWARD),
        (forward & ~has_backward & is_training, Kind.FORWARD, Kind.BACKWARD, *_NO_BACKWARD),
    ):
        for place in _places(lacks_action):
            text = str(Action(missing_kind, *place))
            subject.add(row_of(kind, place), problem.format(text), fix.format(text))
    # Where a stage never runs a microbatch, runs of such microbatches are one violation.
    kinds = (Kind.FORWARD, Kind.BACKWARD) if is_training else (Kind.FORWARD,)
    for first, end in _runs(_places(expected & ~forward & ~has_backward)):
        _add_absent(subject, kinds, first, end)


def _add_absent(subject: Subject, kinds: Sequence[Kind], first: Place, last: Place) -> None:
    is_one, trains = first == last, len(kinds) > 1
    texts = [str(Action(kind, *first)) + ("" if is_one else f" to {Action(kind, *last)}") for kind in kinds]
    missing = " and ".join(texts) + (f" (or {'its' if is_one else 'their'} I and W)" if trains else "")
    rank = int(subject.rank_of_stage[first[0]])
    verb = "is" if is_one and not trains else "are"
    problem = f"{missing} {verb} missing; every stage runs every microbatch of its route once"
    subject.add_missing(rank, problem, f"Add {missing}")


def _places(is_place: Bools) -> list[Place]:
    return [(stage, microbatch, slice_index) for stage, microbatch, slice_index in np.argwhere(is_place).tolist()]


def _runs(places: list[Place]) -> list[tuple[Place, Place]]:
    """Return the first and the last place of each run of microbatches in a row, of one stage and slice."""
    runs: list[tuple[Place, Place]] = []
    for place in sorted(places, key=lambda place: (place[0], place[2], place[1])):
        stage, microbatch, slice_index = place
        if runs and runs[-1][1] == (stage, microbatch - 1, slice_index):
            runs[-1] = (runs[-1][0], place)
        else:
            runs.append((place, place))
    return runs


def check_positions(subject: Subject, predecessor_rows: Int32s) -> bool:
    """Prove that nothing is before what it needs on its own rank, or is paired with it."""
    schedule = subject.schedule
    _, end_of_stage = bounds_of_stage(schedule)
    is_second = np.append(False, schedule.joined)[:-1]
    num_violations = len(subject.violations)
    for part in blocks(schedule.num_actions):
        first_of_group = np.arange(part.start, part.stop, dtype=np.int32)
        first_of_group -= is_second[part]
        end = end_of_stage.take(schedule.stage[part])
        wrong = (predecessor_rows[part] >= first_of_group[:, None]) & (predecessor_rows[part] < end[:, None])
        for index, column in np.argwhere(wrong).tolist() if wrong.any() else []:
            action = part.start + index
            needed_action = int(predecessor_rows[action, column])
            together = bool(schedule.joined[min(action, needed_action)]) and abs(action - needed_action) == 1
            _add_position(subject, action, needed_action, together=together or action == needed_action)
    return len(subject.violations) == num_violations


def _add_position(subject: Subject, action: int, needed_action: int, *, together: bool) -> None:
    row, needed_row = int(subject.action_row[action]), int(subject.action_row[needed_action])
    text = subject.text(needed_row)
    if together:
        problem = f"is paired with {subject.place(needed_row, seen_from=row)}, for which it must wait"
        subject.add(row, problem, "Take the pair apart")
        return
    op, maker = (OPERATIONS[Op(int(subject.schedule.op[at]))] for at in (action, needed_action))
    is_own = any(read.at is At.OWN and read.value in maker.makes for read in op.reads)
    role, reason = (f"its {maker.label} ", "") if is_own else ("", ", whose result it needs")
    subject.add(
        row,
        f"runs before {role}{subject.place(needed_row, seen_from=row)}{reason}",
        f"Move {text} before it, or drop microbatch {subject.schedule.microbatch[action]}",
    )


def check_weight_order(subject: Subject, stages: Collection[int]) -> None:
    """Prove that the weight gradients of these stages come in the order of their input gradients, for fused layers.

    A fused layer that computes its weight gradients later keeps what they need in a queue, first in, first out, and
    does not know microbatches. So the first `W` after some `I`, and a whole backward, takes the entry of the first `I`
    whose `W` has not run. Copies of a part on one rank are one module, with one queue.
    """
    modules = modules_of_ranks(subject.schedule.placement)
    for stages_of_queue in filter(None, ([stage for stage in module if stage in stages] for module in modules)):
        _check_queue(subject, stages_of_queue)


def _check_queue(subject: Subject, stages: list[int]) -> None:
    """Prove that the queue of a module gives each weight gradient its own entry; else add the first violation."""
    is_of_module, kind = np.isin(subject.schedule.stage, stages), subject.schedule.kind
    writers, readers = (np.flatnonzero(is_of_module & flags[kind]) for flags in (RUNS_AUTOGRAD, ENDS_KEEPING))
    for writer, reader in zip(writers.tolist(), readers.tolist(), strict=False):
        if _place(subject, writer) != _place(subject, reader):
            _add_wrong_entry(subject, writer, reader)
            return  # all later entries are shifted by this one


def _place(subject: Subject, index: int) -> Place:
    schedule = subject.schedule
    return int(schedule.stage[index]), int(schedule.microbatch[index]), int(schedule.slice[index])


def _add_wrong_entry(subject: Subject, writer: int, reader: int) -> None:
    row, first = int(subject.action_row[reader]), int(subject.action_row[writer])
    subject.add(
        row,
        f"would take the weight gradients of {subject.place(first, seen_from=row)} from a fused layer's queue, which "
        "gives them in the order of the input gradients",
        f"Move the weight gradients that belong to {subject.text(first)} before {subject.text(row)}, or run these "
        "layers without delayed weight gradients",
    )
