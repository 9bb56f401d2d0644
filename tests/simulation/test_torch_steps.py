"""The walk that times programs counts the steps of torch's schedules as torch's own dry run does.

There every computation, send and receive takes one step of its rank. A receive takes the step in which its send runs,
and holds its rank up until then; in our programs it does not. Messages stand where torch puts them: a send and its
receive directly after what makes the message, at the place that each rank has reached.
"""

import json
from pathlib import Path

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.deps import predecessors
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.walk import walk
from penstock.schedules import build
from tests.support.strategies import needs

ROWS = json.loads((Path(__file__).parents[1] / "data" / "torch_steps.json").read_text(encoding="utf-8"))


def options_of(row):
    """The options with which a family orders as torch does."""
    if row["schedule"] == "interleaved-1f1b":
        return {"group_size": -(-row["microbatches"] // max(1, row["microbatches"] // row["ranks"]))}
    return {"backward_order": "descending"} if row["schedule"] == "looped-bfs" else {}


def with_messages(schedule):
    """Rows of CSV with sends and receives: sweeps over the ranks, one action of each at a time, as soon as it can."""
    waiting = [list(order) for order in schedule]
    cells, there = [[] for _ in waiting], [set() for _ in waiting]
    ranks, placement = schedule.placement.rank_of_stage, schedule.placement
    while any(waiting):
        for rank, order in enumerate(waiting):
            if not order or not needs(order[0], schedule) <= there[rank]:
                continue
            action = order.pop(0)
            cells[rank].append(str(action))
            there[rank].add(action)
            if action.kind is Kind.BACKWARD_WEIGHT:
                continue
            letter = "F" if action.kind is Kind.FORWARD else "B"
            peer = (placement.next_stage if letter == "F" else placement.previous_stage)[action.stage]
            if peer >= 0 and ranks[peer] != rank:
                cells[rank].append(f"{action.stage}SEND_{letter}{action.microbatch}")
                cells[ranks[peer]].append(f"{peer}RECV_{letter}{action.microbatch}")
                there[ranks[peer]].add(action)
    return "\n".join(",".join(row) for row in cells)


def num_steps(program):
    is_send = (program.op == Op.SEND_FORWARD) | (program.op == Op.SEND_BACKWARD)
    one = np.ones(program.num_instructions)
    before = predecessors(program)
    lag = np.where(is_send[before], -1.0, 0.0)  # a receive ends in the step in which its send runs
    times = walk(program.offsets, before, program.joined, one, lag=lag)
    assert times.is_complete
    return times.end.max()


def test_the_steps_are_as_many_as_torch_counts():
    wrong = []
    for row in ROWS:
        shape = {key: row[key] for key in ("ranks", "stages_per_rank", "microbatches")}
        schedule = build(row["schedule"], **shape, **options_of(row))
        found = num_steps(Program.from_csv(with_messages(schedule), name=row["schedule"]))
        if found != row["steps"]:
            wrong.append(f"{row}: {found}")

    print(f"steps of torch's dry run: {len(ROWS) - len(wrong)} of {len(ROWS)} cells")
    assert not wrong, "\n" + "\n".join(wrong)
