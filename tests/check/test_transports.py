"""Programs run under each transport model exactly where a plain machine of that model comes to its end."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from penstock.check import RENDEZVOUS, SINGLE_QUEUE, Buffered, check
from penstock.check.channels import match_messages
from penstock.check.collectives import check_collectives
from penstock.check.order import Actions, check_positions
from penstock.check.report import Findings, Subject
from penstock.check.transports import check_transport
from penstock.ir.deps import predecessors
from penstock.ir.instruction import Op
from penstock.lower import lower
from penstock.lower.assign_slots import assign_slots
from penstock.placement import Placement
from penstock.schedules import build
from tests.check.tables import (
    assert_refused,
    edited,
    feasible_cases,
    find,
    refusal,
    rewritten,
    schedule_of,
)

MODELS = [RENDEZVOUS, Buffered(1), Buffered(2), SINGLE_QUEUE]


class Machine:
    """A program run row by row, by the words of the model and nothing else."""

    def __init__(self, program, model):
        self.orders = [list(program[rank]) for rank in range(len(program))]
        self.where = program.placement.rank_of_stage
        self.model = model
        self.at = [0] * len(self.orders)
        self.run = [0] * len(self.orders)
        self.sent, self.received, self.matched = {}, {}, set()
        self.queues = {}

    def message(self, row):
        maker = row.stage if row.op.is_send else row.peer
        return (row.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD), maker, row.microbatch, row.slice)

    def ends(self):
        while self.advance_all() or self.match_heads():
            pass
        return all(at == len(order) for at, order in zip(self.at, self.orders, strict=True))

    def advance_all(self):
        moved = [self.advance(rank) for rank in range(len(self.orders))]
        return any(moved)

    def advance(self, rank):
        before = self.at[rank]
        while self.at[rank] < len(self.orders[rank]) and self.step(rank, self.orders[rank][self.at[rank]]):
            self.at[rank] += 1
        return self.at[rank] != before

    def step(self, rank, row):
        if not (row.op.is_send or row.op.is_receive):
            self.run[rank] += 1
            return self.needed(rank, row) <= self.matched
        peer = self.where[row.peer]
        if self.model is SINGLE_QUEUE:
            self.queues.setdefault((rank, peer), []).append((self.run[rank], row.op.is_send, self.message(row)))
        elif row.op.is_receive:
            self.received.setdefault((peer, rank), []).append(self.message(row))
        else:
            return self.send(rank, peer, row)
        return True

    def send(self, rank, peer, row):
        sent, received = self.sent.setdefault((rank, peer), []), self.received.get((rank, peer), [])
        if len(sent) + 1 > len(received) + self.model.capacity:
            return False
        sent.append(self.message(row))
        self.matched.add(self.message(row))
        return True

    def needed(self, rank, row):
        receives = [other for other in self.orders[rank] if other.op.is_receive]
        kinds = {Op.RECEIVE_FORWARD: (Op.FORWARD,), Op.RECEIVE_BACKWARD: (Op.BACKWARD, Op.BACKWARD_INPUT)}
        names = (row.stage, row.microbatch, row.slice)
        return {
            self.message(r) for r in receives if row.op in kinds[r.op] and (r.stage, r.microbatch, r.slice) == names
        }

    def match_heads(self):
        num_matched = len(self.matched)
        for rank, peer in list(self.queues):
            mine, theirs = self.head(rank, peer), self.head(peer, rank)
            for run, is_send, message in mine:
                other = next((entry for entry in theirs if entry[1:] == (not is_send, message)), None)
                if other:
                    self.queues[rank, peer].remove((run, is_send, message))
                    self.queues[peer, rank].remove(other)
                    theirs.remove(other)
                    self.matched.add(message)
        return len(self.matched) != num_matched

    def head(self, rank, peer):
        queue = self.queues.get((rank, peer), [])
        return [entry for entry in queue if entry[0] == queue[0][0]]


def proofs(program):
    """What check_transport needs, or None where an earlier proof already refuses the program."""
    subject = Subject.of(program)
    findings = Findings(subject)
    actions = Actions.of(subject)
    before = predecessors(actions.schedule)
    if not check_positions(actions, before, findings):
        return None
    messages, joins = match_messages(subject, actions, before, findings), check_collectives(subject, findings)
    return None if messages is None or joins is None else (subject, messages, joins)


def shuffled(program, chance):
    """Move a few rows of a few ranks a little."""

    def move(orders):
        for _ in range(chance.randint(1, 6)):
            order = chance.choice(orders)
            at = chance.randrange(len(order))
            order.insert(max(0, at + chance.randint(-3, 3)), order.pop(at))

    return edited(program, move)


@pytest.mark.parametrize("model", MODELS, ids=str)
@given(case=feasible_cases())
def test_the_verdict_is_that_of_a_plain_machine(model, case):
    program = lower(case.schedule)
    for each in (program, *(shuffled(program, case.chance) for _ in range(6))):
        proved = proofs(each)
        if proved is None:
            continue
        subject, messages, joins = proved
        findings = Findings(subject)

        passed = check_transport(subject, messages, joins, model, findings)

        assert passed == Machine(each, model).ends()
        assert passed == (not findings.violations)


def head_to_head():
    """Both ranks send before they post the receive that the other waits for."""
    return rewritten(
        schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
        """,
    )


def head_to_head_apart():
    """The same, with a computation between the messages of each rank, so that they cannot be coalesced."""
    return rewritten(
        schedule_of("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0SEND_F2 0I0 0W0 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0W2
        1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1RECV_F2 1F2 1I2 1SEND_B2 1W2
        """,
    )


def test_sends_head_to_head_are_refused_under_rendezvous_with_what_each_rank_waits_for():
    error = assert_refused(
        head_to_head(),
        (0, 3, "0SEND_F1"),
        "under the rendezvous transport",
        "waits for 1RECV_F1 (rank 1, position 4)",
        "while rank 1 stands at 1SEND_B0",
        transport=RENDEZVOUS,
    )
    assert [(v.rank, v.action) for v in error.violations] == [(0, "0SEND_F1"), (1, "1SEND_B0")]


def test_sends_head_to_head_pass_with_one_message_of_buffer():
    assert check(head_to_head(), transport=Buffered(1)).transports == (Buffered(1),)


def test_messages_that_cross_in_a_single_queue_are_refused():
    error = assert_refused(
        head_to_head_apart(),
        (0, 7, "0I0"),
        "under the single queue transport",
        "waits for the message of 1SEND_B0 (rank 1, position 3), which other messages of the two ranks hold up",
        transport=SINGLE_QUEUE,
    )
    assert [(v.rank, v.action) for v in error.violations] == [(0, "0I0"), (1, "1F1")]


def test_a_pair_that_never_starts_tells_what_its_second_member_waits_for():
    program = rewritten(
        schedule_of("0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0I3 0W2 0W3\n1F0 1I0 1W0 1F1 1I1 1W1 1F2 1F3 1I2 1I3 1W2 1W3"),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0SEND_F2 0F3 0I0 0SEND_F3 0W0 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0RECV_B3 0I3 0W2 0W3
        1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1RECV_F2 1F2 1RECV_F3 1F3 1I2 1SEND_B2 1I3 1SEND_B3 1W2 1W3
        """,  # noqa: E501
    )
    joined = np.zeros_like(program.joined)
    joined[find(program, "0F3")[1]] = True
    slots = assign_slots(replace(program, joined=joined))

    assert_refused(slots, (0, 7, "0F3"), "waits for the message of 1SEND_B0", transport=SINGLE_QUEUE)


def test_messages_that_cross_in_one_coalesced_group_pass_in_a_single_queue():
    assert check(head_to_head(), transport=SINGLE_QUEUE).transports == (SINGLE_QUEUE,)


def test_by_default_every_model_is_proved():
    problems = " ".join(violation.problem for violation in refusal(head_to_head_apart()).violations)

    assert "rendezvous" in problems
    assert "single queue" in problems
    assert check(lower(build("1f1b", ranks=2, microbatches=2))).transports == (RENDEZVOUS, SINGLE_QUEUE)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_collective_in_front_of_a_message_that_its_member_needs_is_refused(model):
    schedule = schedule_of("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", placement=Placement.loop(2, 4))
    program = lower(schedule, tied_groups=[(1, 2)])
    send, reduction = find(program, "2SEND_B0")[1], find(program, "2REDUCE_TIED0")[1]

    broken = edited(program, lambda orders: orders[0].insert(send, orders[0].pop(reduction)))

    assert_refused(
        broken, (0, send, "2REDUCE_TIED0"), "waits for 1REDUCE_TIED0 (rank 1", "stands at 1B0", transport=model
    )
