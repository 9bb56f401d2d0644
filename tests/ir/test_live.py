"""What is alive while each row runs, per rank, in counts and bytes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.instruction import Op
from penstock.ir.live import (
    WORKSPACES,
    StageBytes,
    left_bytes,
    live_bytes,
    peak_activations,
    peak_alive,
    peak_bytes,
    peak_host_bytes,
)
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.simulation.drawing import sharded
from tests.support.strategies import feasible_schedules


def row_by_row(table, sizes):
    """The bytes alive while each row runs, by keeping a dictionary of what is there: the rules of the docs in words."""
    return np.concatenate([_rank_by_row(table, sizes, *ends) for ends in pairwise(table.offsets.tolist())])


def _rank_by_row(table, sizes, first, end):
    there, live, row = {}, [], first
    while row < end:
        together = range(row, row + 1 + int(table.joined[row]))
        for each in together:
            _begin(table, sizes, each, there)
        live += [sum(there.values())] * len(together)
        for each in together:
            _end(table, sizes, each, there)
        row = together.stop
    left = {key for key in there if key[0] not in OF_UNITS}
    assert left == set()
    return np.array(live, np.float64)


OF_UNITS = ("weights", "gradient", "reducing", "gathering")
"""What may stay to the end of a rank."""


def _begin_of_unit(table, sizes, row, there):
    """What is whole of the units that the program gathers; a computation ends the reductions before its gather."""
    op, stage = Op(int(table.op[row])), int(table.stage[row])
    unit = int(table.unit_of_stage[stage])
    members = [other for other in range(table.num_stages) if table.unit_of_stage[other] == unit]
    copies = {(table.placement.rank_of_stage[other], _place_on_route(table, other)): other for other in members}
    of_unit = {name: float(sum(getattr(sizes, name)[list(copies.values())])) for name in ("weights", "gradient")}
    gathered = set(table.unit_of_stage[table.stage[table.op == Op.UNSHARD]].tolist())
    launched = [key for key in there if key[0] == "reducing"]
    if op is Op.UNSHARD:
        there["weights", unit] = of_unit["weights"]
        there["gathering", unit] = 0.0
        there["gathering", unit, row] = 0.0
    if op.is_compute and ("gathering", unit) in there:
        del there["gathering", unit]
        gather = max(key[2] for key in there if key[:2] == ("gathering", unit) and len(key) == 3)
        for key in launched:
            if key[2] < gather:
                del there[key]
    if op in (Op.REDUCE_TIED, Op.OPTIMIZER_STEP):
        for key in launched:
            del there[key]
    if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) and unit in gathered:
        there["gradient", unit] = of_unit["gradient"]
    if op is Op.REDUCE_GRADIENT and ("gradient", unit) in there:
        there["reducing", unit, row] = there.pop(("gradient", unit))


def _place_on_route(table, stage):
    return next(route.index(stage) for route in table.placement.routes if stage in route)


def _place(table, row):
    op = Op(int(table.op[row]))
    stage, microbatch, index = (int(getattr(table, name)[row]) for name in ("stage", "microbatch", "slice"))
    previous, following = table.placement.previous_stage[stage], table.placement.next_stage[stage]
    return op, stage, previous, following, (microbatch, index)


def _recomputed(table):
    rows = np.flatnonzero(table.op == Op.RECOMPUTE)
    return set(zip(*(getattr(table, name)[rows].tolist() for name in ("stage", "microbatch", "slice")), strict=True))


def _kept(table, stage, place):
    return "checkpoint" if (stage, *place) in _recomputed(table) else "activation"


def with_some_recomputed(schedule, seed):
    """Put an R before some backwards, or of the pairs that these are in."""
    chance = np.random.default_rng(seed)
    rows = np.flatnonzero(np.isin(schedule.op, (Op.BACKWARD, Op.BACKWARD_INPUT)))
    rows = rows[chance.random(len(rows)) < 0.5]
    places = rows - np.append(False, schedule.joined)[rows]
    old = {name: getattr(schedule, name) for name in schedule.COLUMNS}
    columns = {name: np.insert(column, places, column[rows]) for name, column in old.items()}
    new = places + np.arange(len(places))
    columns["op"][new], columns["joined"][new] = Op.RECOMPUTE, False
    offsets = schedule.offsets + np.searchsorted(np.sort(places), schedule.offsets)
    return replace(schedule, **columns, offsets=offsets)


def _size(table, sizes, name, stage, place):
    """A schedule has no messages."""
    if name == "message" and isinstance(table, Schedule):
        return 0
    factor = 1.0 if sizes.microbatch_factor is None else sizes.microbatch_factor[place[0]]
    return float(getattr(sizes, name)[stage]) * factor


def _workspace_of(op):
    return "forward_workspace" if op in (Op.FORWARD, Op.RECOMPUTE) else "backward_workspace"


def _begin(table, sizes, row, there):
    op, stage, previous, following, place = _place(table, row)
    if isinstance(table, Program):
        _begin_of_unit(table, sizes, row, there)
    if op is Op.RECEIVE_FORWARD:
        there["output", previous, place] = _size(table, sizes, "message", previous, place)
    if op is Op.RECEIVE_BACKWARD:
        there["gradient of output", stage, place] = _size(table, sizes, "message", stage, place)
    if op is Op.FORWARD:
        if previous >= 0:
            there.pop(("output", previous, place), None)
        kept = _kept(table, stage, place)
        there[kept, stage, place] = _size(table, sizes, kept, stage, place)
        if following >= 0:
            there["output", stage, place] = _size(table, sizes, "message", stage, place)
    if op is Op.RELOAD:
        kept = _kept(table, stage, place)
        there[kept, stage, place] = _size(table, sizes, kept, stage, place)
    if op.is_compute:
        there["workspace", row] = _size(table, sizes, _workspace_of(op), stage, place)
    if op is Op.RECOMPUTE:
        del there["checkpoint", stage, place]
        there["activation", stage, place] = _size(table, sizes, "activation", stage, place)
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT) and previous >= 0:
        there["gradient of output", previous, place] = _size(table, sizes, "message", previous, place)


def _end(table, sizes, row, there):
    op, stage, previous, following, place = _place(table, row)
    schedule_sends_at_once = isinstance(table, Schedule)
    there.pop(("workspace", row), None)
    if op is Op.RESHARD:
        del there["weights", int(table.unit_of_stage[stage])]
    if op is Op.SEND_FORWARD or (op is Op.FORWARD and schedule_sends_at_once and following >= 0):
        there.pop(("output", stage, place))
    if op is Op.SEND_BACKWARD or (op in (Op.BACKWARD, Op.BACKWARD_INPUT) and schedule_sends_at_once and previous >= 0):
        there.pop(("gradient of output", previous, place))
    if op is Op.FORWARD and table.is_forward_only:
        del there["activation", stage, place]
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        del there["activation", stage, place]
        if following >= 0 and not schedule_sends_at_once:
            del there["gradient of output", stage, place]
    if op is Op.BACKWARD_INPUT:
        there["context", stage, place] = _size(table, sizes, "weight_context", stage, place)
    if op is Op.BACKWARD_WEIGHT:
        del there["context", stage, place]
    if op is Op.OFFLOAD:
        del there[_kept(table, stage, place), stage, place]


def uneven_sizes(table, seed):
    chance = np.random.default_rng(seed)
    names = ("activation", "weight_context", "checkpoint", "message", "static", "weights", "gradient", *WORKSPACES)
    named = {name: chance.integers(0, 1000, table.num_stages) for name in names}
    factor = chance.choice([0.25, 1.0, 2.5], table.num_microbatches) if seed % 2 else None
    return StageBytes(**named, microbatch_factor=factor)


def test_a_workspace_is_there_while_its_row_runs_and_a_pair_has_those_of_both():
    schedule = build("zb-h1", ranks=1, microbatches=2)
    sizes = StageBytes.of(1, activation=10, weight_context=4, forward_workspace=3, backward_workspace=5)

    assert " ".join(str(schedule.row(row)) for row in range(6)) == "0F0 0I0 0W0 0F1 0I1 0W1"
    assert live_bytes(schedule, sizes).tolist() == [13, 15, 9, 13, 15, 9]
    assert left_bytes(schedule, sizes).tolist() == [10, 4, 0, 10, 4, 0]
    together = replace(schedule, joined=np.array([False, False, True, False, False, False]))
    assert live_bytes(together, sizes)[2:4].tolist() == [4 + 5 + 10 + 3] * 2


def peaks(table, live):
    return [int(live[rows].max(initial=0)) for rows in table.ranks]


def assert_as_row_by_row(table, seed):
    sizes = uneven_sizes(table, seed)

    live = live_bytes(table, sizes)

    expected = np.rint(row_by_row(table, sizes)).astype(np.int64)
    assert live.tolist() == expected.tolist()
    assert peak_bytes(table, sizes) == peaks(table, expected)


@given(feasible_schedules(), st.integers(0, 2**32))
def test_every_order_holds_what_a_walk_row_by_row_finds(schedule, seed):
    for each in (schedule, with_some_recomputed(schedule, seed)):
        assert_as_row_by_row(each, seed)
        assert_as_row_by_row(lower(each), seed)
        if not schedule.is_forward_only:
            assert_as_row_by_row(lower(each, offload=range(0, schedule.num_stages, 2)), seed)


@given(feasible_schedules(), st.integers(0, 2**32), st.sampled_from([2, 3, None]), st.integers(0, 2))
def test_sharded_programs_hold_what_a_walk_row_by_row_finds(schedule, seed, residency, look_ahead):
    chance = np.random.default_rng(seed)
    units = [held[:2] for held in schedule.placement.stages_of_rank if len(held) > 1 and chance.random() < 0.5]
    options = {"residency": residency, "look_ahead": look_ahead, "units": units}

    program = lower(schedule, shard="full", optimizer_step=bool(seed % 2), **options)

    assert_as_row_by_row(program, seed)


def test_the_host_holds_what_is_offloaded_from_the_start_of_its_offload_to_the_end_of_its_reload():
    program = lower(build("gpipe", ranks=2, microbatches=4), offload=[0])
    sizes = StageBytes.of(2, activation=[100, 7])

    # 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0F3 0OFFLOAD3 0RELOAD1 0B0 0RELOAD2 0B1 0RELOAD3 0B2 0B3
    assert peak_host_bytes(program, sizes) == [300, 0]
    assert peak_bytes(program, sizes) == [200, 28]
    assert peak_activations(program) == [2, 4]


def test_bytes_on_the_host_follow_those_of_their_microbatch():
    program = sharded("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2")
    sizes = replace(StageBytes.of(1, activation=10), microbatch_factor=np.array([0.5, 3.0, 1.0]))

    assert peak_host_bytes(program, sizes) == [35]


def test_static_bytes_are_those_of_all_stages_of_a_rank_and_of_two_copies_in_the_middle_once():
    sizes = StageBytes.of(4, static=[1, 2, 4, 8])

    assert sizes.static_of_ranks(Placement.loop(2, 4)).tolist() == [5, 10]
    sizes = StageBytes.of(6, static=[1, 2, 4, 1, 2, 4])  # of 3 ranks, the one in the middle has stage 1 and its copy
    assert sizes.static_of_ranks(Placement.bidirectional(3)).tolist() == [5, 2, 5]


def test_what_is_left_is_what_the_next_row_finds():
    schedule = schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1")

    assert left_bytes(schedule, StageBytes.of(1, activation=3)).tolist() == [3, 6, 3, 0]


@pytest.mark.feature("0.9")
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gpipe", {}, [6, 6, 6, 6]),
        ("1f1b", {}, [4, 3, 2, 1]),
        ("1f1b", {"warmup": "eager"}, [6, 5, 3, 1]),
        ("sequential", {}, [1, 1, 1, 1]),
        ("forward-only", {}, [1, 1, 1, 1]),
    ],
)
def test_the_peaks_of_the_families_are_those_of_their_formulas(name, options, expected):
    schedule = build(name, ranks=4, microbatches=6, **options)

    assert peak_activations(schedule) == expected
    assert peak_activations(lower(schedule)) == expected


def test_rows_that_take_and_free_at_once_count_themselves():
    schedule = schedule_of("0F0 0B0")

    assert peak_alive(schedule, np.array([5, 1]), np.array([5, 0])) == [5]
    assert peak_alive(schedule, np.array([5, 1]), np.array([0, 5])) == [6]
