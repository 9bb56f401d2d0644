"""Collectives over any transport; `transport/test_contract.py` has them over processes, with deadlines and failures."""

from collections import Counter

import pytest
import torch

from penstock.execute.control.collectives import HEAD_BYTES, LENGTH, Control
from penstock.execute.transport.protocol import Tag
from penstock.pipeline import Pipeline
from tests.local_pipelines import float_task, on_ranks, step_task

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


class Noting:
    """Passes everything on to a transport, and notes of each message its peer, tag, bytes and device."""

    def __init__(self, transport):
        self._transport = transport
        self.sent, self.received = [], []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_send(self, peer, tensor, tag=Tag.DATA):
        self.sent.append((peer, tag, tensor.nbytes, tensor.device.type))
        return self._transport.post_send(peer, tensor, tag)

    def post_receive(self, peer, tensor, tag=Tag.DATA):
        self.received.append((peer, tag, tensor.nbytes, tensor.device.type))
        return self._transport.post_receive(peer, tensor, tag)


def test_each_rank_sends_its_own_to_every_other_one_and_nothing_is_relayed():
    def case(wires):
        noting = Noting(wires)
        Control(noting).all_gather_object("x" * (2 * ROOM if wires.rank == 1 else 2))
        return (
            Counter((peer, num_bytes) for peer, _, num_bytes, _ in noting.sent),
            Counter((peer, num_bytes) for peer, _, num_bytes, _ in noting.received),
        )

    long = ROOM + 2  # beside the head, with its quotes
    for rank, (sent, received) in enumerate(on_ranks(4, case)):
        others = [peer for peer in range(4) if peer != rank]
        assert sent == Counter((peer, size) for peer in others for size in (HEAD_BYTES, *[long] * (rank == 1)))
        assert received == Counter((peer, size) for peer in others for size in (HEAD_BYTES, *[long] * (peer == 1)))


def test_agreement_and_losses_stay_in_the_memory_of_the_cpu_whichever_device_is_the_default():
    task = float_task(4)

    def case(wires):
        noting = Noting(wires)
        pipeline = Pipeline(task.make_layers(), "1f1b", 2, task.loss, transport=noting)
        expected = step_task(pipeline, task).result.loss
        noting.sent.clear()
        noting.received.clear()
        with torch.device("meta"):
            found = step_task(pipeline, task).result.loss
        control = [each for each in (*noting.sent, *noting.received) if each[1] is Tag.CONTROL]
        return {device for *_, device in control}, len(control), torch.equal(found, expected)

    for devices, num_messages, is_equal in on_ranks(2, case):
        assert devices == {"cpu"}
        assert num_messages == 4  # what the ranks agree on, and the losses
        assert is_equal
