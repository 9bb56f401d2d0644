"""The simulator: published formulas, and the same times as a simulation from event to event."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.ir import hot
from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.simulation.drawing import drawn, starts
from tests.simulation.events import Events, programs, uneven_costs
from tests.support.strategies import feasible_schedules, schedules

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


# Costs of an instruction and a message


def test_a_predicted_bubble_counts_launches_as_a_measured_one_does():
    """A recorder sees computations alone: host time before them is idle."""
    program = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2)

    timeline = simulate(program, Costs.uniform(launch_s=0.5))

    assert starts(timeline) == {"0F0": 0.5, "0F1": 2.5, "0B0": 2.5, "0B1": 6, "0REDUCE_GRAD": 8.5}
    assert timeline.work_s.tolist() == [1 + 3 + 2]
    assert timeline.makespan_s == 8 - 0.5  # from the first start; the host has worked before


# Refusals


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


def test_costs_that_add_up_to_more_than_a_number_can_hold_are_refused():
    huge = Costs.uniform(forward=1e307, backward_input=1e307, backward_weight=1e307)

    with pytest.raises(ConfigError, match="costs: they add up to more seconds than a number can hold; give smaller"):
        simulate(program_of("gpipe", 2, 16), huge)


# Schedules that are not lowered


def computations(timeline):
    rows = timeline.program.is_compute
    return timeline.start_s[rows].tolist(), timeline.end_s[rows].tolist()


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


def assert_same_times(one, other):
    assert one.start_s.tobytes() == other.start_s.tobytes()
    assert one.end_s.tobytes() == other.end_s.tobytes()


# Properties of every program


@given(programs(), st.integers(0, 2**32), st.booleans())
def test_the_times_are_those_of_a_simulation_from_event_to_event(program, seed, awaits_receives):
    costs = replace(uneven_costs(program, seed), awaits_receives=awaits_receives)

    timeline = simulate(program, costs)

    assert (timeline.start_s.tolist(), timeline.end_s.tolist()) == Events(program, costs).times()


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
