"""Names the rank to blame when a step stands still: one verdict, the same on every rank.

In this order: a verdict that another rank has written down; the rank whose own work raised first; a rank whose process
is gone; one whose process is stopped; else whoever the chain of waits leads to, or the cycle that it closes.
"""

import os
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self

from penstock.execute.control.positions import SEPARATOR, PositionBoard, RankPosition, State, first_verdict, read_all

SETTLE_S = 0.1
"""Seconds that ranks which fail at the same time may take to write down their findings."""
LOOKS_FOR_DEATH = 10
"""Number of looks for a process that is gone: a killed one closes its connections a moment before it counts as gone."""
STACK_LINES = 20
LEGEND = (
    "(an instruction is named stage, kind, microbatch: 2F1 is the forward of stage 2 on microbatch 1, B its backward)"
)


Describe = Callable[[int, int], str]
"""Returns the text of an instruction by its rank and row; empty for a row after the last."""


class Cause(StrEnum):
    """The kind of reason that a verdict gives."""

    RAISED = "raised"
    """The culprit's own work raised an error, which says more than anybody else can."""
    GONE = "gone"
    """The culprit's process is gone."""
    STOPPED = "stopped"
    STILL = "still"
    """The culprit does not go on."""
    CYCLE = "cycle"
    """Several ranks block each other."""


class Verdict(NamedTuple):
    """Why a step stands still."""

    culprit: int | None
    """The rank to blame; None where several block each other or nothing can be seen."""
    cause: Cause
    reason: str
    """One line about the culprit."""
    finding: str = ""
    """`PipelineError.finding` of what the culprit raised."""
    name: str = ""
    """Name of the culprit."""
    positions: str = ""
    """Table of where all ranks were, with the legend."""
    stack: str = ""
    """The innermost calls of the culprit; empty where they are not known."""

    @property
    def heading(self) -> str:
        """One line: who is to blame, and why."""
        if self.culprit is None:
            return f"no rank goes on: {self.reason}"
        return f"{self.name} is the culprit: {self.reason}"

    @property
    def details(self) -> str:
        """Every rank's position and the culprit's stack."""
        return f"{self.positions}\n\n{self.name} was here:\n{self.stack}" if self.stack else self.positions

    def packed(self) -> str:
        """Return all fields as one text; if its end is lost, so is the end of the stack."""
        return SEPARATOR.join(("" if self.culprit is None else str(self.culprit), *self[1:]))

    @classmethod
    def unpacked(cls, text: str) -> Self:
        """Return what was packed."""
        culprit, cause, *texts = text.split(SEPARATOR)
        return cls(int(culprit) if culprit else None, Cause(cause), *texts[:5])


def diagnose(board: PositionBoard, describe: Describe, *, peer: int | None = None) -> Verdict:
    """Find the culprit, write the verdict down and return it, or adopt the one that another rank found first.

    `peer` is the rank that this rank's error named, if it did.
    """
    verdict_text = first_verdict(board)
    if not verdict_text:
        finding = _find_culprit(board, describe, peer)
        board.note_verdict(_with_positions(finding, read_all(board), describe).packed())
        # Ranks that looked at the same moment have written one each: all of them adopt the first.
        time.sleep(SETTLE_S)
        verdict_text = first_verdict(board)
    return Verdict.unpacked(verdict_text)


def process_trouble(pid: int) -> str:
    """Say what is wrong with a process of this host: `gone`, `stopped` or nothing."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return ""
    except OSError:  # no /proc here, or the process ended in between; the next look will tell
        return ""
    letter = status.rpartition(")")[2].split()[0]  # the name before it may hold anything
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "")


def _find_culprit(board: PositionBoard, describe: Describe, peer: int | None) -> Verdict:
    # Several looks: an error of a lost connection may come before its cause can be seen on the board or in /proc.
    for _ in range(LOOKS_FOR_DEATH):
        positions = read_all(board)
        finding = _first_failure(positions, describe) or _first_dead_process(positions, describe)
        if finding is not None:
            return finding
        time.sleep(SETTLE_S / LOOKS_FOR_DEATH)
    return _end_of_waits(positions, board.rank, describe, peer)


def _first_failure(positions: list[RankPosition], describe: Describe) -> Verdict | None:
    failed_positions = [position for position in positions if position.state is State.FAILED and position.failure]
    if not failed_positions:
        return None
    first = min(failed_positions, key=lambda position: (position.since_s, position.rank))
    assert first.failure is not None
    place_clause = f", in {first.failure.place}," if first.failure.place else ""
    reason = f"{place_of(first, describe)}{place_clause} it raised {first.failure.summary}"
    return Verdict(first.rank, Cause.RAISED, reason, first.failure.finding)


def _first_dead_process(positions: list[RankPosition], describe: Describe) -> Verdict | None:
    visible_positions = [position for position in positions if position.state not in (State.UNKNOWN, State.DONE)]
    troubles = [process_trouble(position.pid) for position in visible_positions]
    for cause in (Cause.GONE, Cause.STOPPED):
        if cause in troubles:
            first = visible_positions[troubles.index(cause)]
            reason = f"its process {first.pid} is {cause}, {place_of(first, describe)}"
            return Verdict(first.rank, cause, reason)
    return None


def _end_of_waits(positions: list[RankPosition], rank: int, describe: Describe, peer: int | None) -> Verdict:
    """Follow who waits for whom from this rank to one that does not wait, or around a cycle."""
    position_by_rank = {position.rank: position for position in positions}
    path = [rank]
    next_rank = peer if peer is not None else position_by_rank[rank].peer
    while next_rank is not None and next_rank not in path:
        path.append(next_rank)
        next_rank = position_by_rank[next_rank].peer
    if next_rank is not None:
        return _cycle([position_by_rank[number] for number in path[path.index(next_rank) :]], describe)
    return Verdict(path[-1], Cause.STILL, _reason_of(position_by_rank[path[-1]], describe))


def _cycle(positions: list[RankPosition], describe: Describe) -> Verdict:
    waits = [f"{position.name} {place_of(position, describe)} waits for" for position in positions]
    next_names = [position.name for position in (*positions[1:], positions[0])]
    chain = ", ".join(f"{wait} {name}" for wait, name in zip(waits, next_names, strict=True))
    return Verdict(None, Cause.CYCLE, f"a message was lost or the orders do not match: {chain}")


def _reason_of(position: RankPosition, describe: Describe) -> str:
    age = f"{time.monotonic() - position.since_s:.1f} s"
    match position.state:
        case State.UNKNOWN:
            return "it is on another host, where its position cannot be seen; look at the output of that host"
        case State.IDLE:
            return f"it has not been in a step for {age}"
        case State.DONE:
            return f"it left the pipeline {age} ago"
        case _:
            return f"it has been {place_of(position, describe)} for {age}"


def place_of(position: RankPosition, describe: Describe) -> str:
    """Say where in a step a rank is, with the preposition: `in 2F1`."""
    doing = "compiling " if position.state is State.COMPILING else ""
    if position.failure is not None and position.failure.instructions:
        return f"in {position.failure.instructions}"
    if position.row >= 0:
        instruction = describe(position.rank, position.row)
        return f"{doing}in {instruction}" if instruction else f"{doing}at the end of its step"
    return "between two steps" if position.state is State.IDLE else f"{doing}at the start of its step"


def _with_positions(finding: Verdict, positions: list[RankPosition], describe: Describe) -> Verdict:
    culprit = next((position for position in positions if position.rank == finding.culprit), None)
    stack = [] if culprit is None else _stack(culprit)
    table = "\n".join([*position_table(positions, describe), LEGEND])
    name = "" if culprit is None else culprit.name
    return finding._replace(name=name, positions=table, stack="\n".join(stack))


def _stack(position: RankPosition) -> list[str]:
    """Return the innermost calls of a rank: the end of a traceback, or the beginning of a watchdog's view."""
    if position.failure is not None:
        return position.failure.calls.splitlines()[-STACK_LINES:]
    return position.stack.splitlines()[:STACK_LINES]


def position_table(positions: list[RankPosition], describe: Describe) -> list[str]:
    """Draw where every rank is, one line each under a line of headings."""
    rows: list[tuple[str, ...]] = [("rank", "step", "state", "for", "waits for", "instruction")]
    names = {position.rank: position.name.removeprefix("rank ") for position in positions}
    rows += [_row(position, names, describe) for position in positions]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(position: RankPosition, names: Mapping[int, str], describe: Describe) -> tuple[str, ...]:
    if position.state is State.UNKNOWN:
        return (names[position.rank], "", "unknown (other host)", "", "", "")
    return (
        names[position.rank],
        str(position.step + 1) if position.step >= 0 else "",  # counted from 1, as a training counts its steps
        process_trouble(position.pid) or position.state.name.lower(),
        f"{time.monotonic() - position.since_s:.1f} s",
        "" if position.peer is None else f"rank {names[position.peer]}",
        (describe(position.rank, position.row) or "end of the step") if position.row >= 0 else "",
    )
