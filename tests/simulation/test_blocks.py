"""Blocks: what ran without a break, who made the messages it waited for, and which gather."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.instruction import Op
from penstock.ir.timeline import DataWait
from penstock.simulation import Costs, simulate
from penstock.simulation.blocks import Collective, blocks_of, data_ready_s, waits_of_ranks
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.drawing import drawn, row_of, sharded
from tests.simulation.events import programs, uneven_costs
from tests.simulation.slow_data import with_slow_data


def named(timeline):
    """Blocks by the text of their first instruction."""
    return {str(timeline.program.instruction(block.row)): block for block in blocks_of(timeline)}


@given(programs(), st.integers(0, 2**32))
def test_every_computation_is_in_one_block_of_its_rank_and_messages_were_made_by_neighbours_of_their_microbatch(
    program, seed
):
    timeline = simulate(program, uneven_costs(program, seed))

    blocks = blocks_of(timeline)

    rows = [row for block in blocks for row in block.rows]
    assert rows == np.flatnonzero(program.is_compute).tolist()
    assert [block.rank for block in blocks for _ in block.rows] == program.rank_of_row[rows].tolist()
    assert all(program.joined[block.row] == (block.num_rows == 2) for block in blocks)
    num_messages = 0
    for block in blocks:
        for message in block.messages:
            made = [(program.stage[row], program.microbatch[row]) for row in blocks[message.producer].rows]
            wanted = [
                (neighbour[program.stage[row]], program.microbatch[row])
                for row in block.rows
                for neighbour in (program.placement.previous_stage, program.placement.next_stage)
            ]
            assert set(made) & set(wanted)
            assert blocks[message.producer].end_s <= message.arrival_s <= block.start_s
            num_messages += 1
    assert num_messages == np.isin(program.op, (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)).sum()


def test_a_block_has_the_reductions_since_the_block_before_it_that_held_its_rank_up():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD")
    costs = Costs.uniform(reduce_s=(0.5,), launch_s=0.25)
    launched, blocking = simulate(program, costs), with_blocking_reductions(program, costs)

    def found(timeline):
        return {name: block.reductions for name, block in named(timeline).items() if block.reductions}

    assert found(launched) == found(replace(launched, source="measured")) == {}
    assert found(blocking) == {"0B0": (Collective(3, 5.0, 5.5),)}


def test_only_a_measured_reduction_that_is_over_before_the_next_instruction_has_held_its_rank_up():
    """It runs from 5 to 5.5, and 1F1 waits for its input until 8."""
    program = sharded("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1REDUCE_GRAD 1F1")
    predicted = simulate(program, Costs(forward_s=(4.0, 1.0), reduce_s=(0.5,)))

    found = [named(replace(predicted, source=source))["1F1"].reductions for source in ("predicted", "measured")]

    assert found == [(), (Collective(row_of(program, "1REDUCE_GRAD"), 5.0, 5.5),)]


def test_a_block_has_the_waits_for_data_since_the_block_before_it_on_its_rank():
    program = drawn("0F0 0F1 0F2", "1F0 1F1 1F2", num_microbatches=3)
    timeline = with_slow_data(program, Costs.uniform(), {row_of(program, text): 0.5 for text in ("0F1", "0F2", "1F2")})

    found = {name: [wait.microbatch for wait in block.data_waits] for name, block in named(timeline).items()}

    assert found == {"0F0": [], "0F1": [1], "0F2": [2], "1F0": [], "1F1": [], "1F2": [2]}


def test_a_wait_that_lasts_longer_than_a_computation_of_the_device_is_one_of_the_block_behind_it_too():
    timeline = simulate(drawn("0F0 0F1 0F2", num_microbatches=3), Costs.uniform())
    waits = (DataWait(0, 1, 0.25, 0.75), DataWait(0, 2, 0.75, 2.5))

    found = {name: block.data_waits for name, block in named(replace(timeline, data_waits=waits)).items()}

    assert found == {"0F0": (), "0F1": waits, "0F2": waits[1:]}


PROGRAM = drawn("0F0 0F1 0F2", "1F0 1F1 1F2", num_microbatches=3)
SLOW = {row_of(PROGRAM, "0F1"): 0.5, row_of(PROGRAM, "0F2"): 0.25}


def test_each_rank_has_its_own_waits_in_their_order_and_a_computation_is_fed_when_the_last_before_it_was_over():
    timeline = with_slow_data(PROGRAM, Costs.uniform(), SLOW)

    rows = np.array([row_of(PROGRAM, text) for text in ("0F0", "0F1", "0F2", "1F2")])

    assert waits_of_ranks(timeline) == [[DataWait(0, 1, 1.0, 1.5), DataWait(0, 2, 2.5, 2.75)], []]
    assert data_ready_s(timeline, rows).tolist() == [-np.inf, 1.5, 2.75, -np.inf]
