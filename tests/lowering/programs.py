"""Programs drawn as text and read from it, and what the tests of several passes look up in them.

A line per rank: `0SEND_F1`, with slots `0SEND_F1:0`, an overlapped pair as `(0F1;0B0)`.
"""

from itertools import pairwise

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from tests.proofs.tables import schedule_of

DEFAULT_ORDER = ("posted", "rendezvous", "pair_fifo")
"""The transports that share one lowering."""


def lines(text):
    """The lines of a drawing, with single blanks."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def drawn(program, *, slots=False):
    """Draw each rank's instructions as one line."""
    return [_line(program, rank, slots) for rank in range(len(program))]


def _line(program, rank, slots):
    words, begin = [], int(program.offsets[rank])
    for row, instruction in enumerate(program[rank], start=begin):
        word = f"{instruction}:{instruction.slot}" if slots else str(instruction)
        closes = row > begin and program.joined[row - 1]
        words.append(f"{words.pop()};{word})" if closes else f"({word}" if program.joined[row] else word)
    return " ".join(words)


def pairs(text):
    """Write the drawing's short pairs `(0F1;0B0)` as actions are read."""
    return text.replace(")", ")OVERLAP_F_B")


def program_of(text, *, tied_groups=(), **sizes):
    """Read a drawing of actions as a program of computations alone."""
    return Program.from_schedule(schedule_of(pairs(text), **sizes), tied_groups=tuple(tied_groups))


def groups(program, rank):
    """The rank's instructions in order, those that run together as one list."""
    found, together = [], False
    for row, instruction in enumerate(program[rank], start=int(program.offsets[rank])):
        if together:
            found[-1].append(instruction)
        else:
            found.append([instruction])
        together = bool(program.joined[row])
    return found


def computations(program):
    """Per rank, the computations in order; those that run together as one list."""
    kept = [[group for group in groups(program, rank) if group[0].op.is_compute] for rank in range(len(program))]
    return [[[str(row) for row in group] for group in rank] for rank in kept]


def is_message(row):
    return row.op.is_send or row.op.is_receive


def message(row):
    """What a send or receive moves: its direction, the stage that makes it, microbatch and slice."""
    forward = row.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD)
    return (forward, row.stage if row.op.is_send else row.peer, row.microbatch, row.slice)


def made(row):
    """The message that a computation would make."""
    return (row.op is Op.FORWARD, row.stage, row.microbatch, row.slice)


def consumer(row):
    """The computation that takes in a receive's message, whole backwards and input gradients alike."""
    return (row.op is Op.RECEIVE_FORWARD, row.stage, row.microbatch, row.slice)


def crossings(schedule):
    """All messages that leave a rank: along each microbatch's route, where two neighbours lie on different ranks."""
    where, found = schedule.placement.rank_of_stage, []
    for microbatch in range(schedule.num_microbatches):
        route = schedule.placement.routes[schedule.route_of_microbatch[microbatch]]
        for part in range(schedule.num_slices):
            for stage, following in pairwise(route):
                if where[stage] != where[following]:
                    found.append((True, stage, microbatch, part))
                    found += [] if schedule.is_forward_only else [(False, following, microbatch, part)]
    return sorted(found)


def between(program, rank, peer):
    """The messages that a rank sends to or receives from a peer, in the rank's order."""
    where = program.placement.rank_of_stage
    return [message(row) for row in program[rank] if is_message(row) and where[row.peer] == peer]


def pairs_of_ranks(program):
    return [(one, other) for one in range(len(program)) for other in range(one)]


def assert_in_time(program):
    """Sends are after what makes their message, receives before its consumer, alike at both ends of a pair."""
    for rank in range(len(program)):
        rows = program[rank]
        at = {
            made(row): place for place, row in enumerate(rows) if row.op.is_compute and row.op is not Op.BACKWARD_WEIGHT
        }
        assert all(at[message(row)] < place for place, row in enumerate(rows) if row.op.is_send)
        assert all(at[consumer(row)] > place for place, row in enumerate(rows) if row.op.is_receive)
    for one, other in pairs_of_ranks(program):
        assert between(program, one, other) == between(program, other, one)
