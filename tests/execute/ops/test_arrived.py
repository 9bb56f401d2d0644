"""Which sends have surely arrived when a message comes back."""

import threading
import weakref

import pytest
import torch

from penstock.execute.ops.rows import arrived_before, used_after
from penstock.execute.transport.protocol import Tag
from penstock.ir.deps import predecessors
from penstock.ir.live import peak_activations
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.local_pipelines import MAX_WAIT_S, WIDTH, block, on_ranks, square_loss, values
from tests.support.using import Using


def found_by(find, name, rank, num_microbatches):
    """Return the program of two ranks, and what is found of one of them."""
    program = lower(build(name, ranks=2, microbatches=num_microbatches))
    return program, find(program, predecessors(program)[:, 0], rank)


@pytest.mark.parametrize(
    ("name", "rank", "counts"),
    [
        ("1f1b", 0, {"0RECV_B0": 1, "0RECV_B1": 2, "0RECV_B2": 3, "0RECV_B3": 4}),
        ("1f1b", 1, {"1RECV_F0": 0, "1RECV_F1": 0, "1RECV_F2": 1, "1RECV_F3": 2}),
        ("gpipe", 0, dict.fromkeys(("0RECV_B0", "0RECV_B1", "0RECV_B2", "0RECV_B3"), 4)),
        ("gpipe", 1, dict.fromkeys(("1RECV_F0", "1RECV_F1", "1RECV_F2", "1RECV_F3"), 0)),
    ],
)
def test_a_receive_proves_that_what_its_sender_used_before_has_arrived(name, rank, counts):
    program, found = found_by(arrived_before, name, rank, 4)

    assert {str(program.instruction(row)): count for row, (_, count) in found.items()} == counts


@pytest.mark.parametrize(("rank", "texts"), [(0, ["1F0", "1F1", "1F2"]), (1, ["0B0", "0B1", "0B2"])])
def test_a_message_is_used_by_the_computation_that_takes_it(rank, texts):
    program, found = found_by(used_after, "gpipe", rank, 3)

    assert [str(program[1 - rank][row]) for row in found.pop(1 - rank)] == texts
    assert found == {}


def test_a_message_counts_as_used_once_those_before_it_are_too():
    _, found = found_by(used_after, "zbv", 0, 8)

    assert found[1] == sorted(found[1])
    assert len(set(found[1])) < len(found[1])  # some are used before one that was sent earlier


class Watched:
    """Passes everything on to a transport; keeps which messages are open, and the most memory of receives."""

    def __init__(self, transport):
        self._transport = transport
        self.open, self.rooms = set(), weakref.WeakSet()
        self.most_rooms = self.num_waits = 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_send(self, peer, tensor, tag=Tag.DATA):
        return self._noted(self._transport.post_send(peer, tensor, tag), tag)

    def post_receive(self, peer, tensor, tag=Tag.DATA):
        if tag is Tag.DATA:
            self.rooms.add(tensor)
            self.most_rooms = max(self.most_rooms, len(self.rooms))
        return self._noted(self._transport.post_receive(peer, tensor, tag), tag)

    def _noted(self, ticket, tag):
        if tag is Tag.DATA:
            self.open.add(ticket)
        return ticket

    def wait(self, ticket, limit_s=None):
        self._transport.wait(ticket, limit_s)
        self.num_waits += ticket in self.open
        self.open.discard(ticket)


def two_steps(transport, schedule, layers=None):
    """Run two steps, of which the second one knows all shapes; let the caller look behind each."""
    layers = layers or [block(stage) for stage in range(schedule.num_stages)]
    pipeline = Pipeline(layers, schedule, loss=square_loss, transport=transport)
    batch = values(1, 2 * schedule.num_microbatches, WIDTH)
    try:
        for _ in range(2):
            pipeline.step(batch, target=batch)
            yield
    finally:
        pipeline.close()


@pytest.mark.feature("0.6", "C5")
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv"])
def test_every_send_and_every_receive_is_waited_for_when_a_step_ends(name):
    def left_open(wires):
        transport = Watched(wires)
        steps = two_steps(transport, build(name, ranks=2, microbatches=4))
        return [len(transport.open) for _ in steps], transport.num_waits

    for found, num_waits in on_ranks(2, left_open):
        assert found == [0, 0]
        assert num_waits > 16


def doubling(self, x):
    """Double the input, and note how many of the results live."""
    result = x * 2
    self.memory.append(weakref.ref(result.untyped_storage()))
    self.most = max(self.most, sum(each() is not None for each in self.memory))
    return result


@pytest.mark.feature("C5", "D2", "X16")
@pytest.mark.parametrize(("name", "limit"), [("gpipe", 4), ("1f1b", 3), ("zbv", 5)])
def test_an_output_is_let_go_of_once_the_peer_has_used_it(name, limit):
    schedule = build(name, ranks=2, microbatches=16)
    num_stages, ranks = schedule.num_stages, schedule.placement.rank_of_stage
    may_begin = threading.Semaphore(2)

    def wait(*_):
        assert may_begin.acquire(timeout=MAX_WAIT_S)

    def case(transport):
        counting = [Using(doubling, memory=[], most=0) for _ in range(num_stages)]
        layers = [torch.nn.Sequential(block(stage), counting[stage]) for stage in range(num_stages)]
        if name == "gpipe":
            # How far the first thread runs ahead would be a matter of chance: here it is two microbatches at most.
            layers[0].register_forward_pre_hook(wait)
            layers[1].register_forward_pre_hook(lambda *_: may_begin.release())
        steps = two_steps(transport, schedule, layers)
        next(steps)
        for each in counting:
            each.most = 0
        next(steps)
        return [counting[stage].most for stage, rank in enumerate(ranks[:-1]) if rank != ranks[stage + 1]]

    assert all(0 < max(of_stage) <= limit for of_stage in zip(*on_ranks(2, case), strict=True))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_memory_to_receive_into_lives_while_a_message_is_under_way_or_its_activation_is_kept(name):
    schedule = build(name, ranks=2, microbatches=16)

    def most_rooms(wires):
        transport = Watched(wires)
        steps = two_steps(transport, schedule)
        next(steps)
        transport.most_rooms = 0
        next(steps)
        return transport.most_rooms

    found, kept = on_ranks(2, most_rooms), peak_activations(schedule)
    if name != "zbv":
        kept[0] = 0  # it receives gradients only
    assert all(most <= num_kept + 2 for most, num_kept in zip(found, kept, strict=True)), found
