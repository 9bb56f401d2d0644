"""Collectives over any transport; `transport/test_contract.py` has them over processes, with deadlines and failures."""

import pytest

from penstock.execute.control.collectives import HEAD_BYTES, LENGTH, Control
from tests.local_pipelines import on_ranks

ROOM = HEAD_BYTES - LENGTH.size


@pytest.mark.parametrize("num_bytes", [2, ROOM - 1, ROOM, ROOM + 1, 5 * ROOM])
def test_objects_of_every_length_arrive_whole(num_bytes):
    def case(wires):
        return Control(wires).all_gather_object("x" * (num_bytes - 2) if wires.rank else "short")  # with its quotes

    assert on_ranks(3, case) == [["short", "x" * (num_bytes - 2), "x" * (num_bytes - 2)]] * 3


@pytest.mark.parametrize("seed", range(5))
def test_collectives_keep_their_order_in_whichever_order_messages_arrive(seed):
    def case(wires):
        control, found = Control(wires), []
        for number in range(3):
            total = sum(control.all_gather_object(wires.rank + number))
            found.append((total, control.all_gather_object(["y" * 2000, wires.rank, number])[2][1:]))
        return found

    assert on_ranks(3, case, order_seed=seed) == [[(3, [2, 0]), (6, [2, 1]), (9, [2, 2])]] * 3
