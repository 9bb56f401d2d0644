"""Programs run under each transport model exactly where a plain machine of that model comes to its end.

One that never ends says per rank where it stands, what it waits for, and what would help.
"""

import pytest
from hypothesis import given

from penstock.ir.deps import index_rows, predecessors
from penstock.ir.operations import Op
from penstock.ir.transports import find_transports
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.proofs import check
from penstock.proofs.channels import check_order, find_exchanges, find_messages
from penstock.proofs.collectives import check_collectives
from penstock.proofs.order import check_positions
from penstock.proofs.report import Subject
from penstock.proofs.transports import Machine
from penstock.schedules import build
from tests.proofs.machine import verdict
from tests.proofs.tables import (
    assert_refused,
    edited,
    feasible_cases,
    find,
    refusal,
    rewritten,
    schedule_of,
    violations_of,
)
from tests.support.mutated_programs import MODELS, REORDERINGS, cases, differences, mutated
from tests.support.strategies import ends


def traffic_of(program):
    """What goes between the ranks, or None where an earlier proof already refuses the program."""
    subject = Subject(program)
    before = predecessors(subject.schedule)
    if not check_positions(subject, before):
        return None
    messages = find_messages(subject, index_rows(program))
    joins = check_collectives(subject)
    messages = check_order(subject, messages, find_exchanges(joins or ()))
    return None if subject.violations or joins is None else (messages, joins)


@pytest.mark.slow
@given(case=feasible_cases())
def test_lanes_end_where_a_plain_machine_does(case):
    """Also those of programs that need no machine, since they keep a linear extension."""
    program = lower(case.schedule, case.chance.choice(["posted", "coalesced"]), tied_groups=[ends(case.schedule)])
    changed = [mutated(program, case.chance, REORDERINGS).program for _ in range(2)]
    for each in (program, *changed):
        traffic = traffic_of(each)
        for name in MODELS if traffic is not None else ():
            (model,) = find_transports(name)
            machine = Machine(Subject(each), *traffic, model)
            assert machine.run_to_halt().is_complete == (verdict(each, name) == "ends")


@pytest.mark.feature("C15", "X11")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_check_passes_what_a_plain_machine_of_the_model_runs_and_nothing_else(seed, is_full):
    """20,000 programs in `make test-full`, with moved, dropped, doubled and renamed rows."""
    counts, differing = differences(cases(2000 if is_full else 20, seed))

    assert not differing
    assert sum(counts.values()) == len(MODELS) * (2000 if is_full else 20)
    assert all(any(counts[model, judged] for model in MODELS) for judged in ("ends", "hangs", "wrong"))


# ---- one program for each difference between two models

HEAD_TO_HEAD = rewritten(
    schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
    """
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """,
)
TWO_HEAD_TO_HEAD = rewritten(
    schedule_of("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3"),
    """
    0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3
    1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1RECV_F2 1F2 1RECV_F3 1F3 1B2 1SEND_B2 1B3 1SEND_B3
    """,
)
APART = rewritten(
    schedule_of("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"),
    """
    0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0SEND_F2 0I0 0W0 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0W2
    1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1RECV_F2 1F2 1I2 1SEND_B2 1W2
    """,
)
"""Head to head, and with a computation between the messages of rank 1, so that they are in different groups."""
SEND_TOO_LATE = rewritten(
    schedule_of("0F0 0F1 0B1 0B0\n1F1 1F0 1B1 1B0"),
    """
    0F0 0F1 0SEND_F1 0RECV_B1 0B1 0SEND_F0 0RECV_B0 0B0
    1RECV_F1 1RECV_F0 1F1 1F0 1B1 1SEND_B1 1B0 1SEND_B0
    """,
)
LOOPED = lower(build("looped-bfs", ranks=3, microbatches=1, stages_per_rank=2))
"""Its receives are posted ahead, in one group with messages that are made much earlier."""


@pytest.mark.parametrize(
    ("program", "passing"),
    [
        (LOOPED, {"posted", "rendezvous", "pair_fifo"}),
        (HEAD_TO_HEAD, {"posted", "coalesced"}),
        (TWO_HEAD_TO_HEAD, {"posted"}),
        (APART, {"posted"}),
        (SEND_TOO_LATE, set()),
    ],
    ids=["looped", "head to head", "two head to head", "apart", "a send too late"],
)
def test_each_model_refuses_what_the_others_pass(program, passing):
    assert {model for model in MODELS if not violations_of(program, transport=model)} == passing
    assert {model for model in MODELS if verdict(program, model) == "ends"} == passing


# ---- tied stages exchange their gradients on the channels of the pipeline

TIED = schedule_of("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", placement=Placement.loop(2, 4))


def with_reductions(first, second):
    """Stages 2 and 3 are tied; put their reductions after an instruction of rank 0 and one of rank 1."""

    def move(orders):
        for rank, (text, behind) in enumerate((("2REDUCE_TIED0", first), ("3REDUCE_TIED0", second))):
            order = orders[rank]
            row = order.pop([str(row) for row in order].index(text))
            order.insert([str(row) for row in order].index(behind) + 1, row)

    return edited(lower(TIED, tied_groups=[(2, 3)]), move)


@pytest.mark.parametrize(("first", "second"), [("2B0", "3SEND_B0"), ("2SEND_B0", "1RECV_B0"), ("0B0", "1SEND_B0")])
def test_an_exchange_that_stands_alike_among_the_messages_of_both_ranks_passes(first, second):
    program = with_reductions(first, second)

    assert check(program, "all")
    assert {verdict(program, model) for model in MODELS} == {"ends"}


@pytest.mark.parametrize(("first", "second"), [("2B0", "1RECV_B0"), ("2SEND_B0", "3SEND_B0")])
def test_an_exchange_that_a_rank_would_take_for_a_message_is_refused(first, second):
    """Without its place in the channel, all would seem well: both ranks come to the reduction."""
    program = with_reductions(first, second)

    problems = " ".join(map(str, violations_of(program)))
    assert "a channel keeps its order" in problems
    assert "Move the tied reduction after all messages between rank 0 and rank 1, on both" in problems
    assert {verdict(program, model) == "ends" for model in MODELS} == {False}


HELD_UP = rewritten(
    schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
    """
    0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """,
)
TOLD = {
    "which receive a send waits for": (
        HEAD_TO_HEAD, "rendezvous", (0, 3, "0SEND_F1"),
        "waits for 1RECV_F1 (rank 1, position 4), while rank 1 is at 1SEND_B0 (rank 1, position 3)",
    ),
    "where the rank of a send stands that comes too late": (
        SEND_TOO_LATE, "posted", (1, 3, "1F0"),
        "waits for the message of 0SEND_F0 (rank 0, position 5), while rank 0 is at 0B1 (rank 0, position 4)",
    ),
    "both messages that meet in the queue of a pair": (
        APART, "pair_fifo", (0, 7, "0I0"),
        "0SEND_F1 waits for its other end, but meets 1SEND_B0 (rank 1, position 3) in the queue of the two ranks",
    ),
    "which open group a message is behind": (
        LOOPED, "coalesced", (1, 2, "1F0"),
        "waits for the message of 0SEND_F0 (rank 0, position 2), which is after the open group of 3RECV_F0",
    ),
    "which other message holds a group up": (
        HELD_UP, "coalesced", (1, 2, "1F0"),
        "1RECV_F1 waits for 0SEND_F1 (rank 0, position 5), while rank 0 is at 0B0 (rank 0, position 4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "transport", "place", "words"), TOLD.values(), ids=TOLD)
def test_a_program_that_never_ends_tells(program, transport, place, words):
    assert_refused(program, place, f"never ends under the transport {transport}", words, transport=transport)


def test_every_rank_that_never_goes_on_is_told():
    for program, transport, actions in (
        (HEAD_TO_HEAD, "rendezvous", ["0SEND_F1", "1SEND_B0"]),
        (LOOPED, "coalesced", ["3F0", "1F0", "2F0"]),
    ):
        assert [found.action for found in refusal(program, transport=transport).violations] == actions
    assert "passes under no other transport" in str(refusal(SEND_TOO_LATE, transport="posted"))


@pytest.mark.parametrize("model", ["posted", "rendezvous", "pair_fifo", "coalesced"])
def test_a_collective_says_which_member_has_not_come(model):
    schedule = schedule_of("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n4F0 4B0", placement=Placement.explicit([0, 1, 0, 1, 2]))
    program = lower(schedule, tied_groups=[(2, 4)])
    assert {Op.REDUCE_TIED} <= set(program.op.tolist())
    send, reduction = find(program, "2SEND_B0")[1], find(program, "2REDUCE_TIED0")[1]
    early = edited(program, lambda orders: orders[0].insert(send, orders[0].pop(reduction)))
    late = edited(early, lambda orders: orders[2].insert(find(early, "4SEND_B0")[1], orders[2].pop()))

    assert_refused(
        late,
        "4REDUCE_TIED0",
        f"waits for 2REDUCE_TIED0 (rank 0, position {find(late, '2REDUCE_TIED0')[1]}), while rank 0 is at 2B0",
        transport=model,
    )


def test_the_fix_names_the_lowering_and_the_transports_that_the_program_is_fit_for():
    (violation, *_) = refusal(APART, transport="pair_fifo").violations

    assert violation.fix == ("Lower its schedule with transport='pair_fifo'; as it is, the program passes under posted")


def test_every_model_that_fails_is_told():
    problems = " ".join(violation.problem for violation in refusal(APART, transport="all").violations)

    assert all(f"the transport {model}:" in problems for model in ("rendezvous", "pair_fifo", "coalesced"))
    assert "the transport posted:" not in problems
