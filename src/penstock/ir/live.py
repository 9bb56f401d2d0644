"""The memory model: what is alive while each row of a schedule or program runs, in counts and in bytes.

    value             from                                   until
    activation        the start of its F, or of its R        the end of its B or I
    checkpoint        the start of an F that has an R        the start of its R, of whose activation it becomes a part
    either of them    the start of its RELOAD                as above; at first until the end of its OFFLOAD
    on the host       the start of its OFFLOAD               the end of its RELOAD
    wgrad tensors     the end of its I                       the end of its W
    message, to send  the start of the F, B or I making it   the end of its send
    message, to take  its receive, which posts the buffer    the start of its F, of whose activation it becomes a part;
                                                             the end of its B or I
    workspace         the start of its F, R, B, I or W       the end of the same row
    whole weights     its UNSHARD                            its RESHARD
    whole gradients   the start of the first B or W of a     where its rank knows that their reduction is over, as
                      sharded unit since its reduction       `ir.whole` finds
    static            parameters, gradients and optimizer state, or the shards of them: always

A message between stages of one rank is there from its maker to its consumer. A schedule says nothing of messages: those
of its program count. Without any backward, an activation ends with its F.

    0F0 0F1 0F2 0B0 0F3 0B1
     1   2   3   3   3   3      activations, counted

An overlapped pair runs together: what either row takes is there for both, and what either frees is there until both
have ended. The tensors saved for wgrad are those that W needs once I has run. Bytes on the host are counted apart, and
a copy has ended before the next row begins.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.collectives import GATHERS
from penstock.ir.deps import NONE
from penstock.ir.hot import Array, Bools, Int64s
from penstock.ir.keeps import keeps
from penstock.ir.operations import NAMES_MICROBATCH, NUM_OPS, OPERATIONS, Size, Value
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.ir.whole import is_sharded, sums_of_units, whole_gradients
from penstock.placement import Placement, stages_without_copies

WORKSPACES = ("forward_workspace", "backward_workspace")
_SIZES = ("activation", "weight_context", "checkpoint", "message", "static", "weights", "gradient", *WORKSPACES)


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """[num_stages] bytes of what one microbatch (or slice) leaves on each stage, and of what is always there."""

    activation: Int64s
    weight_context: Int64s
    """Bytes of the tensors saved for wgrad."""
    checkpoint: Int64s
    """Bytes of the inputs that a forward keeps which runs again."""
    message: Int64s
    """Bytes of the stage's output, and of its gradient."""
    static: Int64s
    """Bytes of parameters, gradients and optimizer state, or of a rank's shards of them."""
    weights: Int64s
    """Bytes of the whole weights of a stage that is sharded, while they are gathered."""
    gradient: Int64s
    """Bytes of the whole gradients of a stage that is sharded, from its first backward to their reduction."""
    forward_workspace: Int64s
    """Bytes that a forward takes while it runs, beside what it keeps."""
    backward_workspace: Int64s
    """Bytes that each part of a backward takes while it runs."""
    microbatch_factor: NDArray[np.float64] | None = None
    """[num_microbatches] how many times these bytes the values of each have; None: once."""
    not_given: tuple[str, ...] = ()
    """Names of the costs in bytes that are 0 throughout."""

    @classmethod
    def of(cls, num_stages: int, **sizes: Any) -> "StageBytes":
        """Make the bytes from some fields, with an entry per stage or one for all; the other fields are 0."""
        sizes_by_name: dict[str, Any] = {name: np.full(num_stages, sizes.get(name, 0), np.int64) for name in _SIZES}
        return cls(**sizes_by_name)

    def static_of_ranks(self, placement: Placement) -> Int64s:
        """[num_ranks] what each rank always holds; the copies of a stage on one rank are one module, and count once."""
        static_bytes = np.zeros(placement.num_ranks, np.int64)
        ranks, stages = np.array(placement.rank_of_stage), stages_without_copies(placement)
        np.add.at(static_bytes, ranks[stages], self.static[stages])
        return static_bytes


def live_bytes(table: Table, sizes: StageBytes) -> Int64s:
    """[num_rows] bytes that the row's rank holds while the row runs, without what is static."""
    return whole_bytes(live_shares(table, sizes))


def live_shares(table: Table, sizes: StageBytes) -> Array:
    """[num_rows] the bytes of `live_bytes` before rounding: where microbatches differ, they have fractions."""
    return np.concatenate([live for live, _ in _levels_by_rank(table, sizes)])


def left_bytes(table: Table, sizes: StageBytes) -> Int64s:
    """[num_rows] bytes that the row's rank still holds once the row has ended; in a pair, once both have."""
    return whole_bytes(np.concatenate([remaining for _, remaining in _levels_by_rank(table, sizes)]))


def whole_bytes(num_bytes: Array) -> Int64s:
    """Round shares of bytes; half a byte is one in whatever order the shares were added."""
    if num_bytes.dtype == np.int64:
        return num_bytes
    return np.rint(np.round(num_bytes, 4)).astype(np.int64)


def changes_of_rows(table: Table, sizes: StageBytes) -> tuple[Int64s, Int64s]:
    """[num_rows] bytes that a row adds to its rank at its start, and [num_rows] that it frees at its end.

    Gradients of sharded units are left out; where two rows run together, each has its own.
    """
    added, freed = zip(*_changes_by_rank(table, sizes, on_host=False), strict=True)
    return whole_bytes(np.concatenate(added)), whole_bytes(np.concatenate(freed))


def peak_activations(table: Table) -> list[int]:
    """Per rank, the most activations alive at once."""
    return peak_bytes(table, one_each(table))


def peak_bytes(table: Table, sizes: StageBytes) -> list[int]:
    """Per rank, the largest value of `live_bytes`, without the column itself."""
    return _peaks(live for live, _ in _levels_by_rank(table, sizes))


def peak_host_bytes(table: Table, sizes: StageBytes) -> list[int]:
    """Per rank, the most bytes that are on its host at once because rows moved them there."""
    if not any(OPERATIONS[op].on_host_at_start for op in table.ops):
        return [0] * table.num_ranks
    return _peaks(live for live, _ in _levels_by_rank(table, sizes, on_host=True))


def peak_alive(table: Table, added: Array, freed: Array) -> list[int]:
    """Return for each rank the most that is alive at once, from what rows add at their start and free at their end."""
    return _peaks(
        _alive(table.joined[part], added[part].astype(np.int64), freed[part].astype(np.int64)) for part in table.ranks
    )


def one_each(table: Table) -> StageBytes:
    """Return the sizes that count activations."""
    return StageBytes.of(table.num_stages, activation=1, weight_context=1)


def _peaks(live_by_rank: Iterable[Array]) -> list[int]:
    return [int(whole_bytes(live.max(initial=0))) for live in live_by_rank]


def _levels_by_rank(table: Table, sizes: StageBytes, *, on_host: bool = False) -> Iterator[tuple[Array, Array]]:
    """Yield for each rank [num_rows] bytes alive while each row runs, and after it, before rounding."""
    gradients = _gradients(table, sizes) if isinstance(table, Program) and not on_host else None
    changes = _changes_by_rank(table, sizes, on_host=on_host)
    for part, (added, freed) in zip(table.ranks, changes, strict=True):
        if gradients is not None:
            added, freed = added + gradients[0][part], freed + gradients[1][part]
        live = _alive(table.joined[part], added, freed)
        yield live, live - freed


def _changes_by_rank(table: Table, sizes: StageBytes, *, on_host: bool) -> Iterator[tuple[Array, Array]]:
    """Yield for each rank [num_rows] bytes that each row adds at its start, and that it frees at its end."""
    # Rows that make or move a checkpoint look into a second table, in which it stands for the activation.
    checkpoint_sizes = replace(sizes, activation=sizes.checkpoint)
    changes = [_changes(table, stage_bytes, on_host) for stage_bytes in (sizes, checkpoint_sizes)]
    start, end = np.concatenate(changes, axis=1)
    has_checkpoint = keeps(table) == Value.CHECKPOINT
    for part in table.ranks:
        flat_index = (table.op[part] + NUM_OPS * has_checkpoint[part]) * table.num_stages + table.stage[part]
        added: Array = start.take(flat_index)
        freed: Array = end.take(flat_index)
        if sizes.microbatch_factor is not None:
            factor = sizes.microbatch_factor[table.microbatch[part]]
            factor = np.where(NAMES_MICROBATCH[table.op[part]], factor, 1.0)
            # Rounded at the end: rounded parts of a value would not add up to it.
            added, freed = added * factor, freed * factor
        yield added, freed


def _changes(table: Table, sizes: StageBytes, on_host: bool) -> Int64s:
    """Return [2, num_ops, num_stages] bytes: what a row adds at its start, and (negative) what it frees at its end.

    A row is an action or instruction of the table; entries are by its operation and stage. The bytes are those of the
    row's rank or, with `on_host`, of the memory of its host, to which activations are offloaded.
    """
    # A cumulative sum of these changes over a rank's rows is what is alive: a value is added by one row and taken by
    # one row of the same rank, with the same size, so the sum holds each value from its maker to its last reader. Where
    # a value becomes a part of another one, both happen at the start of one row (F takes its message, and the
    # activation that holds it begins), so no value counts twice or is missing for a moment. A message is as large as
    # its sender's output: at the receiver the size is that of the previous stage (INPUT), and 0 at the ends of a route,
    # where nothing is sent. Several sizes may be 0 or unknown; the sum is then a lower bound.
    placement = table.placement
    message = sizes.message if isinstance(table, Program) else np.zeros_like(sizes.message)
    previous_stage, next_stage = np.array(placement.previous_stage), np.array(placement.next_stage)
    bytes_of_size = {
        Size.OUTPUT: np.where(next_stage == NONE, 0, message),
        Size.INPUT: np.where(previous_stage == NONE, 0, message[previous_stage]),
        Size.ACTIVATION: sizes.activation,
        Size.CHECKPOINT: sizes.checkpoint,
        Size.WEIGHT_INPUTS: sizes.weight_context,
        Size.WEIGHTS: _of_units(table, sizes.weights) if isinstance(table, Program) else np.zeros_like(message),
        Size.FORWARD_WORKSPACE: sizes.forward_workspace,
        Size.BACKWARD_WORKSPACE: sizes.backward_workspace,
    }
    changes = np.zeros((2, NUM_OPS, placement.num_stages), np.int64)
    for op, row in OPERATIONS.items():
        at_start, at_end = (row.on_host_at_start, row.on_host_at_end) if on_host else (row.at_start, row.at_end)
        changes[0, op] = sum(count * bytes_of_size[size] for size, count in at_start.items())
        changes[1, op] = -sum(count * bytes_of_size[size] for size, count in at_end.items())
        if row.begins_keeping and table.is_forward_only:
            changes[1, op] += sizes.activation  # nothing is kept
    return changes


def _of_units(program: Program, of_stages: Int64s) -> Int64s:
    """[num_stages] the sum over the unit of each stage; 0 where it is not sharded."""
    return np.where(is_sharded(program), sums_of_units(program, of_stages), 0)


def _gradients(program: Program, sizes: StageBytes) -> Int64s | None:
    """[2, num_rows] bytes of whole gradients of sharded units that rows begin to hold, and that are freed behind them.

    None where there are none.
    """
    if not sizes.gradient.any() or not len(program.rows_of(GATHERS)):
        return None
    changes, times = np.zeros((2, program.num_rows), np.int64), whole_gradients(program)
    unit_bytes = _of_units(program, sizes.gradient)[times.unit]
    np.add.at(changes[0], times.begin, unit_bytes)
    np.add.at(changes[1], times.end, unit_bytes)
    return changes


def _alive(joined: Bools, added: Array, freed: Array) -> Array:
    """[num_rows] what is alive on one rank; `added` and `freed` are overwritten."""
    first = np.flatnonzero(joined)
    if len(first):  # a pair takes at its first row and frees at its second
        added[first] += added[first + 1]
        added[first + 1] = 0
        freed[first + 1] += freed[first]
        freed[first] = 0
    added[1:] -= freed[:-1]  # what a row frees is still there while it runs
    return np.cumsum(added)
