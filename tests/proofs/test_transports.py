"""Programs run under each transport model exactly where a plain machine of that model comes to its end."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from penstock.ir.deps import index_rows, predecessors
from penstock.lowering import lower
from penstock.lowering.assign_slots import assign_slots
from penstock.placement import Placement
from penstock.proofs import RENDEZVOUS, SINGLE_QUEUE, Buffered, check
from penstock.proofs.channels import check_order, find_messages
from penstock.proofs.collectives import check_collectives
from penstock.proofs.order import Actions, check_positions
from penstock.proofs.report import Findings, Subject
from penstock.proofs.transports import check_transport
from penstock.schedules import build
from tests.proofs.machine import Machine, shuffled
from tests.proofs.tables import (
    assert_refused,
    edited,
    feasible_cases,
    find,
    refusal,
    rewritten,
    schedule_of,
)

MODELS = [RENDEZVOUS, Buffered(1), Buffered(2), SINGLE_QUEUE]


def proofs(program):
    """What check_transport needs, or None where an earlier proof already refuses the program."""
    subject = Subject(program)
    findings = Findings(subject)
    actions = Actions.of(subject)
    before = predecessors(actions.schedule)
    if not check_positions(actions, before, findings):
        return None
    messages = check_order(subject, find_messages(subject, index_rows(program), findings), findings)
    joins = check_collectives(subject, findings)
    return None if findings.violations or joins is None else (subject, messages, joins)


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
