"""Megatron-LM's schedule table of interleaved 1F1B: the one order in which every rank visits microbatches and stages.

    Megatron-LM schedule table
    ranks: 2
    group size: 2
    warm-up: 4 2
    (0, 0) (1, 0)
    (0, 1) (1, 1)
    (2, 0)
    (2, 1)

A pair is (microbatch, model chunk), as in the list of Megatron's `get_schedule_table`, which may be pasted in place of
these lines. Chunk c of rank r is stage c x p + r. Groups of so many microbatches run on one chunk after the other; the
last group may be smaller. A rank runs as many forwards as its warm-up says, then F and B in turn, then the backwards
that are left. The backwards follow the table too, with the chunks counted from the last. `forward only` stands in place
of the warm-up where there are none.

Megatron makes the table from its `microbatch_group_size_per_vp_stage`, which must be from p to m and leave p or more
for the last group, and the warm-up of rank r as 2 (p - r - 1) + (v - 1) x group size. Here any size and warm-up are
taken.
"""

import re
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from penstock.errors import FormatError, count_of
from penstock.ir.formats.cells import MAX_CELLS, cannot_express, describe_placement, require_whole_actions
from penstock.ir.hot import Bools, Int32s
from penstock.ir.interleaving import Ints, in_turn
from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement

TITLE = "Megatron-LM schedule table"
FORWARD_ONLY = "forward only"
_FORMAT_NAME = "a table of Megatron-LM"
_refusal = partial(cannot_express, _FORMAT_NAME)

_FIELD = re.compile(r"\s*(ranks|group size|warm-up):((?:\s+[0-9]{1,9})+)\s*")
_PAIR = re.compile(r"\(\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*\)|[^\s,\[\]]")
"""A pair, or a character that is neither a part of one nor between pairs."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The sizes that define an interleaved 1F1B of Megatron-LM, but for its warm-ups."""

    num_ranks: int
    num_microbatches: int
    num_local_stages: int
    group_size: int

    def table(self) -> Int32s:
        """[num_pairs, 2] microbatch and local stage: groups of microbatches, each through all stages of a rank."""
        local_stage = np.repeat(np.arange(self.num_local_stages), self.num_microbatches)
        microbatch = np.tile(np.arange(self.num_microbatches), self.num_local_stages)
        in_turn = np.lexsort((microbatch, local_stage, microbatch // self.group_size))
        return np.column_stack([microbatch, local_stage])[in_turn].astype(np.int32)

    def order(self, rank: int, num_warmup: int | None) -> Int32s:
        """[num_actions, 3] kind, stage and microbatch of a rank's actions; forwards alone without a warm-up."""
        microbatch, local_stage = self.table().T
        turn = np.arange(len(microbatch))
        # With as much warm-up as there are turns, all forwards come first.
        rows = in_turn(turn, local_stage, microbatch, len(turn) if num_warmup is None else num_warmup)
        rows = rows[: len(turn)] if num_warmup is None else rows
        rows[:, 1] = rows[:, 1] * self.num_ranks + rank
        return rows


def to_megatron(schedule: Schedule) -> str:
    """Write the table of an interleaved 1F1B. Raises: ConfigError, if the schedule is of another form."""
    form, warmups = _form_and_warmups(schedule)
    lines = [TITLE, f"ranks: {form.num_ranks}", f"group size: {form.group_size}"]
    lines.append(f"warm-up: {' '.join(map(str, warmups))}" if warmups else FORWARD_ONLY)
    previous = None
    for microbatch, local_stage in form.table().tolist():
        pair = f"({microbatch}, {local_stage})"
        if local_stage == previous:
            lines[-1] += f" {pair}"
        else:
            lines.append(pair)
        previous = local_stage
    return "\n".join(lines) + "\n"


def from_megatron(text: str, *, file: str = "<text>", name: str = "from Megatron") -> Schedule:
    """Read what `to_megatron` writes, or such a text with the list that Megatron prints.

    Raises:
        FormatError: with line and column of the first place that is not of this form.
    """
    reader = _Reader(file)
    for number, line in enumerate(text.split("\n"), start=1):
        reader.read(number, line)
    form, warmups = reader.finish()
    orders = [form.order(rank, warmups[rank] if warmups else None) for rank in range(form.num_ranks)]
    placement = Placement.loop(form.num_ranks, form.num_ranks * form.num_local_stages)
    return Schedule.from_arrays(name, placement, orders, num_microbatches=form.num_microbatches)


def _form_and_warmups(schedule: Schedule) -> tuple[_Form, list[int]]:
    """Return the sizes that define an interleaved 1F1B, and the warm-up of each rank; no warm-ups if forward only.

    The sizes are read from the placement and from the forwards of rank 0; a warm-up is the number of forwards that a
    rank runs before its first forward-backward pair. Megatron-LM's order is then made again from these numbers.

    Raises:
        ConfigError: the schedule is not interleaved over a loop of ranks, or a rank's order is not Megatron-LM's.
    """
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    num_local_stages, rest = divmod(schedule.num_stages, num_ranks)
    loop = Placement.loop(num_ranks, schedule.num_stages)
    placement = schedule.placement
    is_loop = (placement.rank_of_stage, placement.routes) == (loop.rank_of_stage, loop.routes)
    if rest or num_local_stages < 2 or not is_loop:
        raise _refusal(describe_placement(schedule), "a loop with as many stages on each rank, 2 or more")
    require_whole_actions(schedule, _FORMAT_NAME)
    num_leading_forwards = [_num_leading(schedule.kind[rows] == Kind.FORWARD) for rows in schedule.ranks]
    # The group size is how many microbatches rank 0 runs in a row on its first stage.
    rows_of_rank_0 = schedule.ranks[0]
    stages = schedule.stage[rows_of_rank_0][schedule.kind[rows_of_rank_0] == Kind.FORWARD]
    group_size = max(_num_leading(stages == 0), 1)
    form = _Form(num_ranks, num_microbatches, num_local_stages, group_size)
    # Where the last group has fewer microbatches than ranks, Penstock's own family idles instead of going on with the
    # next stage. The message names this as the likely cause of an order that differs.
    rest = num_microbatches % group_size
    cause = f" (its last group has {count_of(rest, 'microbatch')} for {num_ranks} ranks; Megatron-LM leaves no turns "
    cause = f"{cause}empty for that)" if 0 < rest < num_ranks else ""
    warmups = []
    if not schedule.is_forward_only:
        warmups = [_warmup_of_rank(form, rank, num) for rank, num in enumerate(num_leading_forwards)]
    for rank, rows in enumerate(schedule.ranks):
        expected = form.order(rank, warmups[rank] if warmups else None)
        actions = np.column_stack([column[rows] for column in (schedule.kind, schedule.stage, schedule.microbatch)])
        _refuse_other_order(schedule, rank, actions, expected, cause=cause)
    return form, warmups


def _num_leading(claims: Bools) -> int:
    """Return how many entries are true before the first false one."""
    return int(np.argmin(np.append(claims, False)))


def _warmup_of_rank(form: _Form, rank: int, num_leading: int) -> int:
    """The warm-up of a rank by the forwards that stand first; one less than all of them gives the same order as all."""
    num_forwards = form.num_microbatches * form.num_local_stages
    if num_leading < num_forwards:
        return max(num_leading - 1, 0)
    usual = 2 * (form.num_ranks - rank - 1) + (form.num_local_stages - 1) * form.group_size
    return num_forwards - 1 if usual == num_forwards - 1 else num_forwards


def _refuse_other_order(schedule: Schedule, rank: int, actions: Ints, expected: Int32s, *, cause: str) -> None:
    if len(actions) != len(expected):
        raise _refusal(f"rank {rank} has {len(actions)} actions", str(len(expected)))
    different = np.flatnonzero((actions != expected).any(axis=1))
    if len(different):
        position = int(different[0])
        kind, stage, microbatch = expected[position].tolist()
        problem = f"rank {rank}, position {position} is {schedule.action(int(schedule.offsets[rank]) + position)}"
        raise _refusal(problem + cause, f"{stage}{Kind(kind).letter}{microbatch} in its form of interleaved 1F1B")


@dataclass(slots=True)
class _Reader:
    """Takes a text line by line; `finish` says what it holds."""

    file: str
    has_title: bool = False
    is_forward_only: bool = False
    fields: dict[str, list[int]] = field(default_factory=dict)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Line and column of each pair."""

    def fail(self, problem: str, line: int, column: int = 1) -> FormatError:
        return FormatError(problem, file=self.file, line=line, column=column)

    def read(self, number: int, line: str) -> None:
        words = " ".join(line.split())
        match = _FIELD.fullmatch(line)
        if not words:
            return
        if not self.has_title:
            if words.lower() != TITLE.lower():
                raise self.fail(f"{words[:60]!r} is no title; expected {TITLE!r}", number)
            self.has_title = True
        elif words == FORWARD_ONLY:
            self.is_forward_only = True
        elif match is None:
            self._read_pairs(number, line)
        elif match[1] in self.fields:
            raise self.fail(f"{match[1]} is there twice; expected it once", number)
        else:
            self.fields[match[1]] = [int(value) for value in match[2].split()]

    def finish(self) -> tuple[_Form, list[int]]:
        """Return the numbers and the warm-ups; none where it is forward only."""
        if not self.has_title:
            raise self.fail(f"the text is empty; expected {TITLE!r}", 1)
        num_ranks, group_size = self._single("ranks"), self._single("group size")
        warmups = self.fields.get("warm-up", [])
        if bool(warmups) == self.is_forward_only:
            raise self.fail(f"expected either warm-up with a number per rank, or {FORWARD_ONLY!r}", 1)
        if not self.pairs:
            raise self.fail("the table is empty; expected pairs (microbatch, chunk) such as (0, 0) (1, 0)", 1)
        table = np.array(self.pairs, np.int32)
        num_microbatches, num_local_stages = (table.max(axis=0) + 1).tolist()
        form = _Form(num_ranks, num_microbatches, num_local_stages, group_size)
        self._check_sizes(form, warmups)
        different = np.flatnonzero((table != form.table()).any(axis=1))
        if len(different):
            index = int(different[0])
            expected = tuple(form.table()[index].tolist())
            problem = f"{self.pairs[index]} is here; expected {expected} with groups of {group_size} microbatches"
            raise self.fail(problem, *self.places[index])
        return form, warmups

    def _read_pairs(self, number: int, line: str) -> None:
        for match in _PAIR.finditer(line):
            place = (number, match.start() + 1)
            if match[1] is None:
                problem = (
                    f"{line[match.start() : match.start() + 20]!r} is neither a pair (microbatch, chunk) nor a field"
                )
                raise self.fail(f"{problem}; the fields are ranks, group size and warm-up", *place)
            self.pairs.append((int(match[1]), int(match[2])))
            self.places.append(place)

    def _single(self, name: str) -> int:
        values = self.fields.get(name, [])
        if len(values) != 1 or values[0] < 1:
            raise self.fail(f"{name}: {values or 'nothing'}; expected one number of 1 or more", 1)
        return values[0]

    def _check_sizes(self, form: _Form, warmups: list[int]) -> None:
        num_pairs = form.num_microbatches * form.num_local_stages
        if len(self.pairs) != num_pairs:
            problem = f"the table ends with {len(self.pairs)} pairs; expected {form.num_microbatches} microbatches"
            raise self.fail(f"{problem} x {form.num_local_stages} chunks = {num_pairs}", *self.places[-1])
        if form.num_local_stages < 2:
            raise self.fail("the table has a single chunk; expected 2 or more", *self.places[-1])
        if 2 * num_pairs * form.num_ranks > MAX_CELLS:
            problem = f"{form.num_ranks} ranks have more than {MAX_CELLS} actions; expected at most as many"
            raise self.fail(problem, 1)
        if warmups and (len(warmups) != form.num_ranks or max(warmups) > num_pairs):
            problem = f"warm-up: {' '.join(map(str, warmups))}; expected {form.num_ranks} numbers"
            raise self.fail(f"{problem}, none above {num_pairs}", 1)
