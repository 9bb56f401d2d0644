"""The simulator: published formulas, and the same times as a simulation from event to event."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.ir import hot
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.durations import IS_BUSY
from tests.actions import parse_action
from tests.simulation.drawing import drawn, ends, starts
from tests.simulation.events import KINDS, RECEIVES, Events, programs, uneven_costs
from tests.strategies import feasible_schedules, schedules

RANKS, MICROBATCHES = range(1, 7), range(1, 13)


def program_of(name, num_ranks, num_microbatches, **options):
    return lower(build(name, ranks=num_ranks, microbatches=num_microbatches, **options))


# Published formulas


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "sequential"])
def test_makespan_and_bubble_without_transfers_are_those_of_the_formula(name, num_ranks):
    for num_microbatches in MICROBATCHES:
        timeline = simulate(program_of(name, num_ranks, num_microbatches), Costs.uniform())

        slots = num_ranks * num_microbatches if name == "sequential" else num_microbatches + num_ranks - 1
        bubble = pytest.approx(1 - num_microbatches / slots, abs=1e-12)
        assert timeline.makespan_s == 3 * slots
        assert timeline.bubble_fraction == bubble
        if name != "sequential":
            assert (timeline.span_s, timeline.bubble_rate) == (3 * slots, bubble)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpipe_waits_for_transfers_only_while_it_fills_and_drains(num_ranks):
    costs = Costs.uniform(forward=2.0, backward_input=1.5, backward_weight=0.5, transfer=0.75)

    for num_microbatches in (1, 4, 9):
        timeline = simulate(program_of("gpipe", num_ranks, num_microbatches), costs)

        assert timeline.makespan_s == 4 * (num_microbatches + num_ranks - 1) + 2 * (num_ranks - 1) * 0.75


@pytest.mark.parametrize("transfer_s", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_1f1b_loses_a_round_trip_of_transfers_for_every_turn_around_the_ranks(num_ranks, transfer_s):
    costs = Costs.uniform(forward=1.0, backward_input=1.5, backward_weight=0.5, transfer=transfer_s)

    for num_microbatches in (1, num_ranks, num_ranks + 1, 2 * num_ranks, 3 * num_ranks + 1):
        timeline = simulate(program_of("1f1b", num_ranks, num_microbatches), costs)

        # A path from rank 0 back to rank 0 has an even number of transfers, hence whole round transfers. The printed
        # 2(p-1) + floor(2(p-1)(m-1)/p) is the same number wherever it is even, as in every row of the tables.
        round_trips = (num_ranks - 1) + (num_ranks - 1) * (num_microbatches - 1) // num_ranks
        assert timeline.span_s == 3 * (num_microbatches + num_ranks - 1) + 2 * round_trips * transfer_s


# Costs of an instruction and a message


@pytest.mark.parametrize(
    ("is_exclusive", "left_s", "arrivals_s"), [(False, [1, 2, 3], [3.5, 4.5, 5.5]), (True, [3, 5, 7], [3.5, 5.5, 7.5])]
)
def test_on_a_serialized_link_messages_queue_for_the_wire_but_not_for_the_latency(is_exclusive, left_s, arrivals_s):
    """A contention-free link delays every message alike."""
    costs = Costs.uniform(message_bytes=(4,), bandwidth_bytes_per_s=2.0, transfer=0.5, is_exclusive=is_exclusive)

    timeline = simulate(drawn("0F0 0F1 0F2", "1F0 1F1 1F2", num_microbatches=3), costs)

    assert [starts(timeline)[f"0F{m}"] for m in range(3)] == [0, 1, 2]
    assert [ends(timeline)[f"0SEND_F{m}"] for m in range(3)] == left_s
    assert [ends(timeline)[f"1RECV_F{m}"] for m in range(3)] == arrivals_s
    assert [starts(timeline)[f"1F{m}"] for m in range(3)] == arrivals_s


@pytest.mark.parametrize(("is_exclusive", "last_start_s"), [(False, 12), (True, 13)])
def test_all_stages_of_two_ranks_share_a_link(is_exclusive, last_start_s):
    program = drawn("0F0 0F1 0F2 2F0", "1F0 1F1 1F2 3F0", placement=Placement.loop(2, 4), num_microbatches=3)
    costs = Costs.uniform(message_bytes=(3,), bandwidth_bytes_per_s=1.0, is_exclusive=is_exclusive)

    assert starts(simulate(program, costs))["3F0"] == last_start_s


def test_each_direction_and_each_receiver_has_its_own_link():
    lines = "0F0 0F1 0F2 0F3 0F4 0B0", "1F0 1B0 1F1 1F2 1F3 1F4", "2F0 2B0 2F1 2F2 2F3 2F4"
    costs = Costs.uniform(backward=1.0, message_bytes=(4,), bandwidth_bytes_per_s=1.0, is_exclusive=True)

    end_s = ends(simulate(drawn(*lines, num_microbatches=5), costs))

    assert [end_s[f"0SEND_F{m}"] for m in range(5)] == [5, 9, 13, 17, 21]
    assert (end_s["1B0"], end_s["1SEND_B0"]) == (17, 21)
    assert (end_s["1F1"], end_s["1SEND_F1"]) == (18, 22)


def test_a_gradient_has_the_size_of_the_output_it_belongs_to():
    program = drawn("0F0 0B0", "1F0 1B0", "2F0 2B0")
    costs = Costs.uniform(message_bytes=(5, 20, 1000), bandwidth_bytes_per_s=10.0)

    timeline = simulate(program, costs)

    assert [starts(timeline)[action] for action in ("1F0", "2F0")] == [1.5, 4.5]
    assert [starts(timeline)[action] for action in ("1B0", "0B0")] == [5.5 + 2 + 2, 9.5 + 2 + 0.5]


def test_stages_on_one_rank_pass_results_on_without_a_transfer():
    timeline = simulate(drawn("0F0 3F0", "1F0 2F0", placement=Placement.vee(2)), Costs.uniform(transfer=10.0))

    assert [starts(timeline)[f"{stage}F0"] for stage in range(4)] == [0, 11, 12, 23]


def test_every_instruction_costs_a_launch():
    timeline = simulate(drawn("0F0 0F1", "1F0 1F1", num_microbatches=2), Costs.uniform(launch_s=0.25))

    assert timeline.program.to_csv().split() == ["0F0,0SEND_F0,0F1,0SEND_F1", "1RECV_F0,1RECV_F1,1F0,1F1"]
    assert timeline.start_s.tolist() == [0.25, 1.25, 1.75, 2.75, 0, 0.25, 1.75, 3.25]
    assert timeline.end_s.tolist() == [1.25, 1.5, 2.75, 3, 1.5, 3, 2.75, 4.25]


def test_a_predicted_bubble_counts_launches_as_a_measured_one_does():
    """A recorder sees computations alone: host time before them is idle."""
    program = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2)

    timeline = simulate(program, Costs.uniform(launch_s=0.5))

    assert starts(timeline) == {"0F0": 0.5, "0F1": 2.5, "0B0": 2.5, "0B1": 6, "0REDUCE_GRAD": 8.5}
    assert timeline.work_s.tolist() == [1 + 3 + 2]
    assert timeline.makespan_s == 8 - 0.5  # from the first start; the host has worked before


def test_instructions_that_neither_compute_nor_send_cost_only_their_launch():
    program = lower(build("1f1b", ranks=1, microbatches=2), optimizer_step=True)

    timeline = simulate(program, Costs.uniform(launch_s=0.5))

    assert set(program.op[~program.is_compute]) == {Op.REDUCE_GRADIENT, Op.OPTIMIZER_STEP}
    assert (timeline.end_s - timeline.start_s)[~program.is_compute].tolist() == [0.0, 0.0]  # it comes before them
    assert timeline.end_s.max() == 2 * 3 + 0.5 * program.num_instructions
    assert timeline.work_s.tolist() == [2 * 3]


def test_each_kind_takes_the_time_of_its_stage():
    costs = Costs(**dict(zip(KINDS, [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0)], strict=True)))

    timeline = simulate(drawn("0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1B0 1I1 1W1", num_microbatches=2), costs)

    lasts_s = {text: ends(timeline)[text] - start_s for text, start_s in starts(timeline).items()}
    assert [lasts_s[f"{stage}{action}"] for action in ("F0", "B0", "I1", "W1") for stage in range(2)] == [*range(1, 9)]


def test_an_overlapped_pair_starts_together_takes_the_sum_and_sends_at_its_end():
    program = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2)

    timeline = simulate(program, Costs.uniform(transfer=0.5))

    assert (starts(timeline)["0F1"], starts(timeline)["0B0"]) == (5, 5)
    assert (ends(timeline)["0F1"], ends(timeline)["0B0"]) == (8, 8)
    assert starts(timeline)["1F1"] == 8.5
    assert timeline.work_s.tolist() == [6, 6]


# Refusals


@pytest.mark.parametrize("name", [*KINDS, "message_bytes", "activation_bytes", "weight_context_bytes"])
def test_costs_for_another_number_of_stages_are_refused(name):
    costs = replace(Costs.uniform(), **{name: (1, 1, 1)})

    with pytest.raises(ConfigError, match=rf"{name}: 3 entries for 2 stages"):
        simulate(program_of("1f1b", 2, 2), costs)


ENDLESS, UNSENT = (
    "the program cannot run to its end; check it before",
    "a receive has no send; check the program before",
)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["0B0,0F0"], ENDLESS),
        (["0W0,0F0,0I0"], ENDLESS),
        (["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1B0,1SEND_B0,1F0"], ENDLESS),
        (
            [
                "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1",
                "1RECV_F0,1RECV_F1,1F1,1B1,1SEND_B1,1F0,1B0,1SEND_B0",
            ],
            ENDLESS,
        ),
        (["0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"], UNSENT),
        (["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0"], UNSENT),
    ],
    ids=[
        "backward first", "weight gradient first", "backward first after a message", "ranks wait for each other",
        "no forward message", "no backward message",
    ],
)  # fmt: skip
def test_a_program_that_cannot_run_is_refused(lines, told):
    program = Program.from_csv("\n".join(lines), name="stuck")

    with pytest.raises(ScheduleError, match=f"^stuck: {told}"):
        simulate(program, Costs.uniform())


# Schedules that are not lowered


def computations(timeline):
    rows = timeline.program.is_compute
    return timeline.start_s[rows].tolist(), timeline.end_s[rows].tolist()


@pytest.mark.slow
@given(feasible_schedules() | schedules(max_ranks=6, max_microbatches=12), st.integers(0, 2**32), st.booleans())
def test_a_schedule_takes_the_times_of_its_program(schedule, seed, is_exact):
    program = lower(schedule)
    costs = replace(uneven_costs(program, seed), launch_s=0.0, reduce_s=(0.0,))
    if not is_exact:  # sums that depend on their order
        costs = replace(costs, latency_s=0.1, bandwidth_bytes_per_s=0.7, overlap_factor=0.9)

    bare = simulate(schedule, costs)

    assert computations(bare) == computations(simulate(program, costs))
    assert bare.program == Program.from_schedule(schedule)
    assert bare.peak_activations == simulate(program, costs).peak_activations


def test_an_edge_between_ranks_has_a_lag_and_one_within_a_rank_none():
    orders = [["0F0", "3F0"], ["1F0", "2F0"]]
    actions = [[parse_action(text) for text in order] for order in orders]
    schedule = Schedule.from_actions("vee", Placement.vee(2), actions, num_microbatches=1)
    costs = Costs.uniform(
        transfer=0.5, message_bytes=(4,), bandwidth_bytes_per_s=8.0, microbatch_bytes_factor=(3.0,), launch_s=0.25
    )

    timeline = simulate(schedule, costs)

    # 0F0, then 3F0; 1F0, 2F0: a message takes 0.5 + 3 * 4 / 8, a launch a quarter.
    assert timeline.end_s.tolist() == [1.25, 9.0, 4.5, 5.75]


def assert_same_times(one, other):
    assert one.start_s.tobytes() == other.start_s.tobytes()
    assert one.end_s.tobytes() == other.end_s.tobytes()


@pytest.mark.slow
def test_compiled_loops_give_a_small_schedule_the_same_times(monkeypatch):
    schedule = build("zbv", ranks=4, microbatches=8)
    cases = (Costs.uniform(transfer=0.1), Costs.uniform(message_bytes=(3,), bandwidth_bytes_per_s=7.0))
    all_interpreted = [simulate(schedule, costs) for costs in cases]
    monkeypatch.setattr(hot.Hot, "interpreted", None)  # calling it fails
    for costs, interpreted in zip(cases, all_interpreted, strict=True):
        assert_same_times(interpreted, simulate(schedule, costs, compiled=True))


# Properties of every program


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32), st.booleans())
def test_the_times_are_those_of_a_simulation_from_event_to_event(program, seed, awaits_receives):
    costs = replace(uneven_costs(program, seed), awaits_receives=awaits_receives)

    timeline = simulate(program, costs)

    assert (timeline.start_s.tolist(), timeline.end_s.tolist()) == Events(program, costs).times()


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_spans_lie_in_the_order_of_their_rank_and_messages_between_their_ends(program, seed):
    costs = uneven_costs(program, seed)

    timeline = simulate(program, costs)

    assert (timeline.start_s >= 0).all()
    lasts_s, is_busy = timeline.end_s - timeline.start_s, IS_BUSY[program.op]
    assert (lasts_s >= 0).all()
    is_launched = is_busy | (program.op == Op.REDUCE_GRADIENT)  # these start when they are launched
    assert (lasts_s[~is_launched] >= costs.launch_s).all()
    for rank in range(program.num_ranks):
        computes = timeline.compute_rows(rank)
        is_apart = ~program.joined[computes[:-1]]
        assert (np.diff(timeline.start_s[program.offsets[rank] : program.offsets[rank + 1]]) >= 0).all()
        assert (timeline.end_s[computes][:-1] <= timeline.start_s[computes][1:])[is_apart].all()
    rows, columns = np.nonzero(predecessors(program) != NONE)
    before, is_receive = predecessors(program)[rows, columns], np.isin(program.op[rows], RECEIVES)
    sends, receives = before[is_receive], rows[is_receive]
    latency_s = min([costs.latency_s, *(channel.latency_s for channel in costs.channels)])
    assert (timeline.end_s[before] <= timeline.start_s[rows])[~is_receive].all()
    assert (timeline.end_s[receives] >= timeline.end_s[sends] + latency_s).all()


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_the_same_program_and_costs_give_the_same_times(is_exclusive):
    program = program_of("1f1b", 4, 8)
    costs = replace(uneven_costs(program, 7), is_exclusive=is_exclusive)

    one, other = (simulate(program, costs) for _ in range(2))

    assert one.source == other.source == "predicted"
    assert_same_times(one, other)


@pytest.mark.slow
def test_a_large_program_is_timed_by_compiled_code_with_the_same_result(monkeypatch):
    pairs = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2)
    programs = [program_of("1f1b", 4, 9), program_of("gpipe", 3, 5), pairs]
    cases = [(each, uneven_costs(each, 3)) for each in programs]
    interpreted = [simulate(*case) for case in cases]

    monkeypatch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)
    monkeypatch.setattr(hot.Hot, "interpreted", None)  # calling it fails
    compiled = [simulate(*case) for case in cases]

    for one, other in zip(interpreted, compiled, strict=True):
        assert_same_times(one, other)
    with pytest.raises(ScheduleError, match="cannot run to its end"):
        simulate(Program.from_csv("0B0,0F0"), Costs.uniform())


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32), st.integers(1, 9))
def test_cutting_rows_into_blocks_changes_nothing(program, seed, num_rows):
    costs = uneven_costs(program, seed)
    whole = simulate(program, costs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "BLOCK_ROWS", num_rows)
        assert_same_times(whole, simulate(program, costs))
