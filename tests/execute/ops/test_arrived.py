"""Which sends have surely arrived when a message comes back."""

import threading
import weakref

import pytest
import torch

from penstock.execute.control.collectives import Control
from penstock.execute.ops.rows import arrived_before, used_after
from penstock.execute.transport.protocol import Tag
from penstock.ir.deps import predecessors
from penstock.ir.live import peak_activations
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.local_pipelines import MAX_WAIT_S, WIDTH, block, on_ranks, square_loss, values


def arrivals(program, rank):
    """Per receive of a rank, by its text: how many sends to the peer have arrived."""
    found = arrived_before(program, predecessors(program)[:, 0], rank)
    return {str(program.instruction(row)): count for row, (_, count) in found.items()}


def test_a_gradient_proves_that_its_own_activation_has_arrived():
    program = lower(build("1f1b", ranks=2, microbatches=4))

    assert arrivals(program, 0) == {"0RECV_B0": 1, "0RECV_B1": 2, "0RECV_B2": 3, "0RECV_B3": 4}


def test_an_activation_proves_that_the_gradients_used_before_it_have_arrived():
    program = lower(build("1f1b", ranks=2, microbatches=4))

    assert arrivals(program, 1) == {"1RECV_F0": 0, "1RECV_F1": 0, "1RECV_F2": 1, "1RECV_F3": 2}


def test_under_gpipe_activations_prove_nothing():
    program = lower(build("gpipe", ranks=2, microbatches=3))

    assert arrivals(program, 0) == {"0RECV_B0": 3, "0RECV_B1": 3, "0RECV_B2": 3}
    assert set(arrivals(program, 1).values()) == {0}


def uses(program, rank):
    """Per peer of a rank: the texts of the computations that use its messages, in the order of sending."""
    found = used_after(program, predecessors(program)[:, 0], rank)
    return {peer: [str(program[peer][row]) for row in rows] for peer, rows in found.items()}


def test_a_message_is_used_by_the_computation_that_takes_it():
    program = lower(build("gpipe", ranks=2, microbatches=3))

    assert uses(program, 0) == {1: ["1F0", "1F1", "1F2"]}
    assert uses(program, 1) == {0: ["0B0", "0B1", "0B2"]}


def test_a_message_counts_as_used_once_those_before_it_are_too():
    program = lower(build("zbv", ranks=2, microbatches=8))
    rows = used_after(program, predecessors(program)[:, 0], 0)[1]

    assert rows == sorted(rows)
    assert len(set(rows)) < len(rows)  # some are used before one that was sent earlier


class Watched:
    """Passes everything on to a transport; keeps which messages are open, and the most sends and memory of receives."""

    def __init__(self, transport):
        self._transport = transport
        self.sends, self.receives, self.rooms = set(), set(), weakref.WeakSet()
        self.most_sends = self.most_rooms = self.num_waits = 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_send(self, peer, tensor, tag=Tag.DATA):
        ticket = self._transport.post_send(peer, tensor, tag)
        if tag is Tag.DATA:
            self.sends.add(ticket)
            self.most_sends = max(self.most_sends, len(self.sends))
        return ticket

    def post_receive(self, peer, tensor, tag=Tag.DATA):
        if tag is Tag.DATA:
            self.rooms.add(tensor)
            self.most_rooms = max(self.most_rooms, len(self.rooms))
        ticket = self._transport.post_receive(peer, tensor, tag)
        if tag is Tag.DATA:
            self.receives.add(ticket)
        return ticket

    def wait(self, ticket, limit_s=None):
        self._transport.wait(ticket, limit_s)
        self.num_waits += ticket in self.sends or ticket in self.receives
        self.sends.discard(ticket)
        self.receives.discard(ticket)


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


def second_step(wires, schedule):
    """Return the transport behind a second step, which alone has counted."""
    transport = Watched(wires)
    steps = two_steps(transport, schedule)
    next(steps)
    transport.most_sends = transport.most_rooms = 0
    next(steps)
    return transport


@pytest.mark.feature("0.6", "C5")
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv"])
def test_every_send_and_every_receive_is_waited_for_when_a_step_ends(name):
    def left_open(wires):
        transport = Watched(wires)
        steps = two_steps(transport, build(name, ranks=2, microbatches=4))
        return [(len(transport.sends), len(transport.receives)) for _ in steps], transport.num_waits

    for found, num_waits in on_ranks(2, left_open):
        assert found == [(0, 0)] * 2
        assert num_waits > 16


# ---- tensors that live


class InOwnMemory(torch.autograd.Function):
    """Doubles, into memory that tells when nothing refers to it any more."""

    @staticmethod
    def forward(ctx, x, layer):
        array = (2 * x.detach()).numpy()
        layer.num_alive += 1
        weakref.finalize(array, layer.drop)
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


class Doubling(torch.nn.Module):
    """Doubles its input, and notes how many of its outputs live each time."""

    def __init__(self):
        super().__init__()
        self.num_alive = self.most = 0

    def forward(self, x):
        result = InOwnMemory.apply(x, self)
        self.most = max(self.most, self.num_alive)
        return result

    def drop(self):
        self.num_alive -= 1


class Pacing(torch.nn.Module):
    """Lets the stage before it be two microbatches ahead of its own at most: the first half of it waits for the other.

    Without it, how far a thread runs ahead would be a matter of chance.
    """

    def __init__(self, num_microbatches):
        super().__init__()
        self.has_begun = [threading.Event() for _ in range(num_microbatches)]
        self.num_waits = self.num_begun = 0

    def wait(self, x):
        if self.num_waits >= 2:
            assert self.has_begun[self.num_waits - 2].wait(MAX_WAIT_S)
        self.num_waits += 1
        return x

    def forward(self, x):
        self.has_begun[self.num_begun].set()
        self.num_begun += 1
        return x * 1.0

    def reset(self):
        for event in self.has_begun:
            event.clear()
        self.num_waits = self.num_begun = 0


class Waiting(torch.nn.Module):
    """The half of a `Pacing` that waits."""

    def __init__(self, pacing):
        super().__init__()
        self.wait = pacing.wait

    def forward(self, x):
        return self.wait(x)


@pytest.mark.feature("C5", "D2", "X16")
@pytest.mark.parametrize(("name", "limit"), [("gpipe", 4), ("1f1b", 3), ("zbv", 5)])
def test_an_output_is_let_go_of_once_the_peer_has_used_it(name, limit):
    schedule = build(name, ranks=2, microbatches=16)
    num_stages, ranks = schedule.num_stages, schedule.placement.rank_of_stage
    pacing = Pacing(16)

    def case(transport):
        doubling = [Doubling() for _ in range(num_stages)]
        layers = [torch.nn.Sequential(block(stage), doubling[stage]) for stage in range(num_stages)]
        if name == "gpipe":
            layers = [torch.nn.Sequential(Waiting(pacing), layers[0]), torch.nn.Sequential(pacing, layers[1])]
        steps = two_steps(transport, schedule, layers)
        next(steps)
        Control(transport).all_gather_object("first step")
        pacing.reset()
        for each in doubling:
            each.most = 0
        Control(transport).all_gather_object("reset")
        next(steps)
        return [doubling[stage].most for stage, rank in enumerate(ranks[:-1]) if rank != ranks[stage + 1]]

    assert all(0 < max(of_stage) <= limit for of_stage in zip(*on_ranks(2, case), strict=True))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_memory_to_receive_into_lives_while_a_message_is_under_way_or_its_activation_is_kept(name):
    schedule = build(name, ranks=2, microbatches=16)

    found = [each.most_rooms for each in on_ranks(2, second_step, schedule)]

    kept = peak_activations(schedule)
    if name != "zbv":
        kept[0] = 0  # it receives gradients only
    assert all(most <= num_kept + 2 for most, num_kept in zip(found, kept, strict=True)), found
