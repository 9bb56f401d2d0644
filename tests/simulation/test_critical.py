"""The critical path: its pieces add up to the makespan, follow one another, and name what took the time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.timeline import DataWait
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.blocks import blocks_of
from penstock.simulation.critical import critical_path
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.drawing import drawn, late_ranks, row_of, sharded
from tests.simulation.events import programs, uneven_costs
from tests.simulation.slow_data import slow_rows, with_slow_data


def told(timeline):
    """The pieces as text, such as `compute 0F0 1`."""
    return [
        f"{piece.doing} {timeline.program.instruction(piece.row)} {piece.duration_s:g}"
        for piece in critical_path(timeline)
    ]


def simulated(*lines, costs=None, **options):
    return simulate(drawn(*lines, **options), costs or Costs.uniform())


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_the_pieces_add_up_to_the_makespan(program, seed):
    timeline = with_slow_data(program, uneven_costs(program, seed), slow_rows(program, seed))

    path = critical_path(timeline)

    assert sum(piece.duration_s for piece in path) == pytest.approx(timeline.makespan_s, abs=1e-9)
    assert all(piece.duration_s >= 0 for piece in path)


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_every_computation_on_the_path_ran_when_the_path_is_there(program, seed):
    timeline = with_slow_data(program, uneven_costs(program, seed), slow_rows(program, seed))
    block_of_row = {block.row: block for block in blocks_of(timeline)}

    moment_s = min(block.start_s for block in block_of_row.values())
    for piece in critical_path(timeline):
        if piece.doing == "compute":
            block = block_of_row[piece.row]
            assert (block.start_s, block.end_s) == pytest.approx((moment_s, moment_s + piece.duration_s), abs=1e-9)
        moment_s += piece.duration_s


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_without_launches_and_collectives_nothing_pauses(program, seed):
    costs = uneven_costs(program, seed)
    plain = Costs(**{name: getattr(costs, name) for name in ("forward_s", "backward_s", "backward_input_s",
        "backward_weight_s", "message_bytes", "latency_s", "bandwidth_bytes_per_s", "channels")})  # fmt: skip

    assert {piece.doing for piece in critical_path(simulate(program, plain))} <= {"compute", "transfer"}
    slow = with_slow_data(program, plain, slow_rows(program, seed))
    assert {piece.doing for piece in critical_path(slow)} <= {"compute", "transfer", "data"}


def test_data_that_come_later_than_the_message_lead_the_path_back_on_their_own_rank():
    program, costs = drawn("0F0 0F1", "1F0 1F1", num_microbatches=2), replace(Costs.uniform(), forward_s=(4.0, 1.0))

    covered, later = (with_slow_data(program, costs, {row_of(program, "1F1"): data_s}) for data_s in (2.0, 3.5))

    assert told(covered) == ["compute 0F0 4", "compute 0F1 4", "compute 1F1 1"]
    assert told(later) == ["compute 0F0 4", "compute 1F0 1", "data 1F1 3.5", "compute 1F1 1"]


def test_what_a_rank_pauses_beside_its_wait_for_data_is_a_pause():
    timeline = simulated("0F0 0F1", num_microbatches=2)
    later_s = [0.0, 2.0]
    wait = DataWait(0, 1, 1.25, 2.5)
    timeline = replace(timeline, start_s=timeline.start_s + later_s, end_s=timeline.end_s + later_s, data_waits=(wait,))

    assert told(timeline) == ["compute 0F0 1", "pause 0F1 0.25", "data 0F1 1.25", "pause 0F1 0.5", "compute 0F1 1"]


def test_it_goes_down_the_ranks_and_up_again():
    timeline = simulated("0F0 0B0", "1F0 1B0", costs=Costs.uniform(backward=2.0, transfer=0.5))

    assert told(timeline) == [
        "compute 0F0 1", "transfer 1F0 0.5", "compute 1F0 1", "compute 1B0 2", "transfer 0B0 0.5", "compute 0B0 2",
    ]  # fmt: skip


def test_it_follows_the_slow_rank():
    costs = Costs(forward_s=(1.0, 3.0))

    timeline = simulated("0F0 0F1 0F2", "1F0 1F1 1F2", costs=costs, num_microbatches=3)

    assert told(timeline) == ["compute 0F0 1", "compute 1F0 3", "compute 1F1 3", "compute 1F2 3"]


def test_a_message_that_waits_for_the_wire_is_a_transfer_as_long_as_that_takes():
    costs = Costs.uniform(message_bytes=(4,), bandwidth_bytes_per_s=1.0, is_exclusive=True)

    timeline = simulated("0F0 0F1", "1F0 1F1", costs=costs, num_microbatches=2)

    assert told(timeline) == ["compute 0F0 1", "compute 0F1 1", "transfer 1F1 7", "compute 1F1 1"]


def test_a_rank_that_begins_late_pauses():
    timeline = late_ranks(simulated("0F0", "1F0"), 0.5, first=1)

    assert told(timeline) == ["compute 0F0 1", "pause 1F0 0.5", "compute 1F0 1"]


def test_a_gather_that_is_waited_for_is_on_the_path_from_its_launch():
    timeline = simulate(sharded("0F0 1UNSHARD 0F1 1F0"), Costs.uniform(unshard_s=(4.0,)))

    assert told(timeline) == ["compute 0F0 1", "collective 1F0 4", "compute 1F0 1"]


def test_a_reload_that_is_waited_for_is_on_the_path_from_its_launch():
    program = sharded("0F0 0OFFLOAD0 0F1 0RELOAD0 0F2 0B0 0B1 0B2")

    timeline = simulate(program, Costs.uniform(reload_s=(4.0,)))

    assert told(timeline)[:4] == ["compute 0F0 1", "compute 0F1 1", "collective 0B0 4", "compute 0B0 2"]


def test_a_reduction_that_blocks_between_computations_is_on_the_path():
    timeline = with_blocking_reductions(sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0"), Costs.uniform(reduce_s=(4.0,)))

    assert told(timeline) == ["compute 0F0 1", "compute 1F0 1", "compute 1B0 2", "collective 0B0 4", "compute 0B0 2"]


def test_an_overlapped_pair_is_one_computation():
    timeline = simulated("0F0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2)

    assert told(timeline) == ["compute 0F0 1", "compute 0F1 3", "compute 0B1 2"]


def test_of_ranks_that_end_together_the_first_counts():
    placement = Placement.bidirectional(2)
    routes = [0, 1]

    timeline = simulated("0F0 3F1", "2F1 1F0", placement=placement, num_microbatches=2, route_of_microbatch=routes)

    assert told(timeline) == ["compute 0F0 1", "compute 3F1 1"]


def test_in_1f1b_it_has_the_transfers_of_the_published_identity():
    num_ranks, num_microbatches = 4, 12
    program = lower(build("1f1b", ranks=num_ranks, microbatches=num_microbatches))

    path = critical_path(simulate(program, Costs.uniform(transfer=8.0)))

    transfers = [piece for piece in path if piece.doing == "transfer"]
    assert len(transfers) == 2 * (num_ranks - 1) + 2 * (num_ranks - 1) * (num_microbatches - 1) // num_ranks
