"""The CSV of torch.distributed.pipelining: row r holds the actions, or the instructions, of rank r in order.

    0F0,0F1,,0B0,,0B1         actions alone; an empty cell is an idle slot and means nothing here
    ,1F0,1B0,1F1,1B1

The text has no header and no metadata: which rank holds which stage, and the numbers of microbatches and slices, are
read off the cells (see `cells.infer_layout`). Some instructions torch does not have; `0REDUCE_TIED1` names its group.
"""

from typing import Any

import numpy as np

from penstock.errors import FormatError
from penstock.ir.deps import peers_of_messages
from penstock.ir.formats.cells import MAX_CELLS, Cells, Fail, cells_of, infer_layout, parse_cells, require_text
from penstock.ir.operations import IS_BACKWARD, IS_MESSAGE, NEEDS_BACKWARD, OPERATIONS, At, Op, peer_at
from penstock.ir.table import Table
from penstock.placement import Placement

_BLANK = " \t"


def table_to_csv(table: Table) -> str:
    """Write the actions or instructions of each rank, without idle slots; lines end in CR LF.

    Slots are not written, and tied groups only as far as they are reduced.
    """
    return "".join(",".join(cells) + "\r\n" for cells in cells_of(table))


def schedule_from_csv(text: str, file: str) -> dict[str, Any]:
    """Read actions; return the fields of a `Schedule`, but for its name.

    Raises:
        FormatError: with line and column, for whatever is not exactly such a text.
    """
    cells, layout, fail = _read(text, file)
    problem = "the text has communication; expected actions alone. Read it as a program"
    return layout | cells.actions(fail, problem)


def program_from_csv(text: str, file: str) -> dict[str, Any]:
    """Read instructions; return the fields of a `Program`, but for its name. All slots are 0.

    A training program without a single reduction or optimizer step is read as one that omits its reductions: earlier
    versions of torch, which had no REDUCE_GRAD, wrote such texts. Raises: FormatError, as `schedule_from_csv`.
    """
    cells, layout, fail = _read(text, file)
    for index, line in enumerate(_lines(text, file)):
        for begin, content in _content(line):
            if not content:
                problem = "an empty cell among communication; expected an instruction, idle slots are for actions alone"
                raise FormatError(problem, file=file, line=index + 1, column=begin + 1)
    is_training, has_updates = bool(IS_BACKWARD[cells.op].any()), bool(NEEDS_BACKWARD[cells.op].any())
    return {
        **layout,
        **cells.columns(),
        "tied_groups": _tied_groups(cells, fail),
        "peer": _peers(cells, layout["placement"], fail),
        "slot": np.zeros(len(cells.op), np.int32),
        "omits_reductions": is_training and not has_updates,
    }


def _read(text: str, file: str) -> tuple[Cells, dict[str, Any], Fail]:
    lines = _lines(text, file)

    def fail(problem: str, rank: int, cell: int, offset: int) -> FormatError:
        starts = [begin for begin, content in _content(lines[rank]) if content]
        column = starts[cell] + offset + 1 if cell < len(starts) else 1
        return FormatError(problem, file=file, line=rank + 1, column=column)

    cells = parse_cells(([content for _, content in _content(line) if content] for line in lines), fail)
    return cells, infer_layout(cells, fail), fail


def _lines(text: str, file: str) -> list[str]:
    """One line per rank, without line ends; empty lines at the end do not count."""
    require_text(text)
    if text.count(",") + text.count("\n") > MAX_CELLS:
        raise FormatError(f"the text has more than {MAX_CELLS} cells; expected at most as many", file=file)
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    while lines and not lines[-1].strip(_BLANK):
        lines.pop()
    if not lines:
        problem = "the text is empty; expected one line of actions per rank, such as 0F0,0B0"
        raise FormatError(problem, file=file)
    for index, line in enumerate(lines):
        if line.count('"') % 2:
            place = {"line": index + 1, "column": line.rindex('"') + 1}
            raise FormatError("a quotation mark is not closed; expected none", file=file, **place)
    return lines


def _content(line: str) -> list[tuple[int, str]]:
    """The cells of a line, without blanks and quotation marks around them, each with where it begins."""
    cells = []
    begin = 0
    for cell in line.split(","):
        content = cell.strip(_BLANK)
        lead = len(cell) - len(cell.lstrip(_BLANK))
        if len(content) > 1 and content[0] == content[-1] == '"':
            content, lead = content[1:-1], lead + 1
        cells.append((begin + lead, content))
        begin += len(cell) + 1
    return cells


def _peers(cells: Cells, placement: Placement, fail: Fail) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[num_rows] the other end of each message, the tied group of each tied reduction, else the own stage."""
    is_tied = cells.op == Op.REDUCE_TIED
    of_messages = peers_of_messages(placement)[cells.op, cells.stage]
    peer = np.where(IS_MESSAGE[cells.op], of_messages, np.where(is_tied, cells.number, cells.stage))
    lost = np.flatnonzero(peer < 0)
    if len(lost):
        row = int(lost[0])
        op = Op(int(cells.op[row]))
        side = "after" if peer_at(op) is At.DOWNSTREAM else "before"
        problem = f"{cells.stage[row]}{OPERATIONS[op].text}: there is no stage {side} stage {cells.stage[row]}"
        raise fail(f"{problem}; expected no such message", *cells.place(row))
    return peer.astype(np.int32)


def _tied_groups(cells: Cells, fail: Fail) -> tuple[tuple[int, ...], ...]:
    rows = np.flatnonzero(cells.op == Op.REDUCE_TIED)
    groups = np.unique(cells.number[rows])
    if len(groups) and int(groups[-1]) != len(groups) - 1:
        last = int(rows[np.argmax(cells.number[rows])])
        problem = (
            f"tied group {groups[-1]} is here, but there are {len(groups)} groups; expected 0, 1, ... without gaps"
        )
        raise fail(problem, *cells.place(last))
    members = [np.unique(cells.stage[rows][cells.number[rows] == group]) for group in groups]
    return tuple(tuple(stages.tolist()) for stages in members)
