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
from tests.simulation.drawing import drawn, late_ranks, later, row_of, sharded
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


TWO = drawn("0F0 0F1", "1F0 1F1", num_microbatches=2)
SLOW_FIRST = replace(Costs.uniform(), forward_s=(4.0, 1.0))
SERIALIZED = Costs.uniform(message_bytes=(4,), bandwidth_bytes_per_s=1.0, is_exclusive=True)
BOTH_WAYS = drawn(
    "0F0 3F1", "2F1 1F0", placement=Placement.bidirectional(2), num_microbatches=2, route_of_microbatch=[0, 1]
)


def with_pause(timeline):
    """The second computation begins 2 s later, and from 1.25 to 2.5 its rank waits for data."""
    return later(timeline, [0.0, 2.0], data_waits=(DataWait(0, 1, 1.25, 2.5),))


PATHS = {
    "data that a message covers are not on it": (
        with_slow_data(TWO, SLOW_FIRST, {row_of(TWO, "1F1"): 2.0}), ["compute 0F0 4", "compute 0F1 4", "compute 1F1 1"],
    ),
    "data that come later than the message lead it back on their own rank": (
        with_slow_data(TWO, SLOW_FIRST, {row_of(TWO, "1F1"): 3.5}),
        ["compute 0F0 4", "compute 1F0 1", "data 1F1 3.5", "compute 1F1 1"],
    ),
    "a pause beside a wait for data is a pause": (
        with_pause(simulated("0F0 0F1", num_microbatches=2)),
        ["compute 0F0 1", "pause 0F1 0.25", "data 0F1 1.25", "pause 0F1 0.5", "compute 0F1 1"],
    ),
    "a message that waits for the wire is a transfer as long as that takes": (
        simulate(TWO, SERIALIZED), ["compute 0F0 1", "compute 0F1 1", "transfer 1F1 7", "compute 1F1 1"],
    ),
    "a rank that begins late pauses": (
        late_ranks(simulated("0F0", "1F0"), 0.5, first=1), ["compute 0F0 1", "pause 1F0 0.5", "compute 1F0 1"],
    ),
    "a gather that is waited for is on it from its launch": (
        simulate(sharded("0F0 1UNSHARD 0F1 1F0"), Costs.uniform(unshard_s=(4.0,))),
        ["compute 0F0 1", "collective 1F0 4", "compute 1F0 1"],
    ),
    "a reduction that blocks between computations is on it": (
        with_blocking_reductions(sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0"), Costs.uniform(reduce_s=(4.0,))),
        ["compute 0F0 1", "compute 1F0 1", "compute 1B0 2", "collective 0B0 4", "compute 0B0 2"],
    ),
    "before a barrier is what the last rank did that came to it": (
        simulate(lower(build("1f1b", ranks=2, microbatches=2), barriers=True), SLOW_FIRST),
        ["compute 0F0 4", "compute 0F1 4", "compute 1B0 2", "compute 0B0 2", "compute 1B1 2", "compute 0B1 2"],
    ),
    "of ranks that end together the first counts": (
        simulate(BOTH_WAYS, Costs.uniform()), ["compute 0F0 1", "compute 3F1 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("timeline", "path"), PATHS.values(), ids=PATHS)
def test_the_path_of_a_drawn_step_is_known(timeline, path):
    assert told(timeline) == path
