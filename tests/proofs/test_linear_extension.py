"""What keeps the linear extension runs under every model; each rule of it is needed and looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.deps import index_rows, predecessors
from penstock.ir.program import Program
from penstock.lowering import add_messages, assign_slots, lower
from penstock.placement import Placement
from penstock.proofs.channels import find_messages
from penstock.proofs.collectives import check_collectives
from penstock.proofs.cycle import check_feasible
from penstock.proofs.linear_extension import proved_by_order
from penstock.proofs.order import check_positions
from penstock.proofs.report import Subject
from tests.proofs.machine import verdict
from tests.proofs.tables import edited, feasible_cases, find, schedule_of
from tests.support.mutated_programs import MODELS, REORDERINGS, mutated
from tests.support.strategies import ends, feasible_schedules

BUT_COALESCED = tuple(name for name in MODELS if name != "coalesced")
GPIPE = schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")


def order_of(program):
    """The names of the models that its order proves; none where an earlier proof already refuses the program."""
    subject = Subject(program)
    before = predecessors(subject.schedule)
    start = check_feasible(subject, before) if check_positions(subject, before) else None
    messages = find_messages(subject, index_rows(program))
    check_collectives(subject)
    proved = () if subject.violations else proved_by_order(subject, messages, start)
    return tuple(model.name for model in proved)


def keeps(program):
    return bool(order_of(program))


def moved(program, text, *, after):
    """Put an instruction after another one of its rank."""
    (rank, start), (_, end) = find(program, text), find(program, after)

    def move(orders):
        row = orders[rank].pop(start)
        orders[rank].insert(end + (end < start), row)

    return edited(program, move)


@given(feasible_schedules(), st.booleans(), st.booleans())
def test_the_lowering_keeps_the_linear_extension(schedule, ties_stages, optimizer_step):
    groups = [ends(schedule)] if ties_stages else []
    options = {"tied_groups": groups, "optimizer_step": optimizer_step}

    assert keeps(lower(schedule, **options))
    assert order_of(lower(schedule, transport="coalesced", **options)) == MODELS


@pytest.mark.slow
@given(case=feasible_cases())
def test_what_keeps_the_linear_extension_ends_on_a_plain_machine_of_every_model(case):
    program = lower(case.schedule, case.chance.choice(["posted", "coalesced"]), tied_groups=[ends(case.schedule)])
    for each in (mutated(program, case.chance, REORDERINGS).program for _ in range(4)):
        for name in order_of(each):
            assert verdict(each, name) == "ends"


def test_a_receive_after_an_action_that_is_later_than_its_message_is_out_of_order():
    program = lower(schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))

    assert keeps(program)
    assert keeps(moved(program, "1RECV_F1", after="1F0"))  # where 0F1 ends
    assert not keeps(moved(program, "1RECV_F1", after="1B0"))


def test_receives_follow_the_makers_of_their_messages_or_where_these_end_or_are_posted_ahead():
    schedule = schedule_of("0F0 0F1 0F2\n1F0 1F1 1F2")
    after_makers = assign_slots(add_messages(Program.from_schedule(schedule)))

    assert order_of(after_makers) == order_of(lower(schedule, "coalesced")) == MODELS
    assert after_makers != lower(schedule, "coalesced")
    assert order_of(moved(after_makers, "1RECV_F1", after="1RECV_F0")) == MODELS
    assert order_of(moved(after_makers, "1RECV_F2", after="1RECV_F1")) == BUT_COALESCED


FORWARDS = lower(schedule_of("0F0 0F1 0F2\n1F0 1F1 1F2"))
TIED = lower(schedule_of("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", placement=Placement.loop(2, 4)), tied_groups=[(1, 2)])


@pytest.mark.parametrize(
    ("program", "text", "after"),
    [
        (lower(GPIPE), "0SEND_F0", "0F1"),  # a later action
        (FORWARDS, "1RECV_F0", "1RECV_F1"),  # whose message is sent later
        (lower(GPIPE), "0RECV_B0", "0F0"),  # and before an earlier send of the same pair of ranks
        (TIED, "2REDUCE_TIED0", "2SEND_B0"),  # and before an action and a message
    ],
)
def test_a_message_or_collective_that_is_moved_is_out_of_order(program, text, after):
    assert keeps(program)
    assert not keeps(moved(program, text, after=after))
