"""What computations wait for that their rank has launched: messages and gathers."""

from penstock.ir.awaits import gather_of_row, receive_of_row
from penstock.ir.deps import NONE, predecessors
from penstock.lowering import lower
from penstock.schedules import build
from tests.simulation.drawing import sharded


def texts(program, awaited):
    """By the text of a row, that of the row that it awaits."""
    found = {row: int(other) for row, other in enumerate(awaited) if other != NONE}
    return {str(program.instruction(row)): str(program.instruction(other)) for row, other in found.items()}


def test_a_computation_awaits_the_receive_of_its_message():
    program = lower(build("1f1b", ranks=2, microbatches=2))

    assert texts(program, receive_of_row(program, predecessors(program)[:, 0])) == {
        "1F0": "1RECV_F0",
        "1F1": "1RECV_F1",
        "0B0": "0RECV_B0",
        "0B1": "0RECV_B1",
    }


def test_stages_of_one_rank_await_nothing_of_each_other():
    program = lower(build("looped-bfs", ranks=1, microbatches=1, stages_per_rank=2))

    assert texts(program, receive_of_row(program, predecessors(program)[:, 0])) == {}


def test_every_stage_awaits_its_gather_before_the_first_of_its_computations_behind_it():
    program = sharded("0UNSHARD 1UNSHARD 0F0 0UNSHARD 0UNSHARD 1F0 0B0 1UNSHARD")

    gathers = gather_of_row(program)

    found = {str(program.instruction(row)): int(gathers[row]) for row in range(8) if gathers[row] != NONE}
    assert found == {"0F0": 0, "1F0": 1, "0B0": 4}
