"""Blocks: what ran without a break, who made the messages it waited for, and which gather."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.instruction import Op
from penstock.simulate import Costs, simulate
from penstock.simulate.blocks import Gather, Message, blocks_of
from tests.simulate.drawing import drawn, sharded
from tests.simulate.events import programs, uneven_costs


def named(timeline):
    """Blocks by the text of their first instruction."""
    return {str(timeline.program.instruction(block.row)): block for block in blocks_of(timeline)}


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_every_computation_is_in_one_block_of_its_rank(program, seed):
    timeline = simulate(program, uneven_costs(program, seed))

    blocks = blocks_of(timeline)

    rows = [row for block in blocks for row in block.rows]
    assert rows == np.flatnonzero(program.is_compute).tolist()
    assert [block.rank for block in blocks for _ in block.rows] == program.rank_of_row[rows].tolist()
    assert all(program.joined[block.row] == (block.num_rows == 2) for block in blocks)


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_a_message_was_made_by_the_neighbours_computation_of_the_same_microbatch(program, seed):
    timeline = simulate(program, uneven_costs(program, seed))

    blocks = blocks_of(timeline)

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


def test_a_block_names_the_message_that_it_waited_for():
    timeline = simulate(drawn("0F0 0B0", "1F0 1B0"), Costs.uniform(transfer=0.5))

    blocks = named(timeline)

    assert blocks["0F0"].messages == blocks["1B0"].messages == ()
    assert blocks["1F0"].messages == (Message(0, 1.5),)
    assert blocks["0B0"].messages == (Message(3, 5.0),)
    assert blocks["0F0"].last_message is None


def test_the_two_of_a_pair_are_one_block_with_the_messages_of_both():
    program = drawn("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", num_microbatches=2)

    pair = named(simulate(program, Costs.uniform(transfer=0.5)))["1F1"]

    assert (pair.num_rows, pair.start_s, pair.end_s) == (2, 2.5, 5.5)
    assert pair.last_message == Message(1, 2.5)


def test_the_last_of_two_messages_is_the_one_that_arrives_last():
    program = drawn("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1", num_microbatches=2)

    pair = named(simulate(program, Costs.uniform()))["1F1"]

    assert pair.messages == (Message(1, 2.0), Message(8, 5.0))
    assert pair.last_message == Message(8, 5.0)


def test_a_block_names_the_gather_in_front_of_it():
    timeline = simulate(sharded("0UNSHARD 0F0 0F1"), Costs.uniform(unshard_s=(2.0,), launch_s=0.5))

    first, second = blocks_of(timeline)

    assert first.gather == Gather(row=0, start_s=0.0, end_s=2.5)
    assert second.gather is None
