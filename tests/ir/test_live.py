"""What is alive while each row runs, per rank, in counts and bytes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.instruction import Op
from penstock.ir.live import (
    StageBytes,
    left_bytes,
    live_bytes,
    one_each,
    peak_activations,
    peak_alive,
    peak_bytes,
    peak_host_bytes,
)
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import FAMILIES, build
from tests.proofs.tables import schedule_of
from tests.strategies import feasible_schedules


def live_activations(table):
    """Activations, counted, that the row's rank holds while each row runs."""
    return live_bytes(table, one_each(table))


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
    if op is Op.RECOMPUTE:
        del there["checkpoint", stage, place]
        there["activation", stage, place] = _size(table, sizes, "activation", stage, place)
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT) and previous >= 0:
        there["gradient of output", previous, place] = _size(table, sizes, "message", previous, place)


def _end(table, sizes, row, there):
    op, stage, previous, following, place = _place(table, row)
    schedule_sends_at_once = isinstance(table, Schedule)
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


def offloaded(line):
    """The program of one rank, with copies."""
    return Program.from_csv(",".join(line.split()), name="offloaded")


def uneven_sizes(table, seed):
    chance = np.random.default_rng(seed)
    names = ("activation", "weight_context", "checkpoint", "message", "static", "weights", "gradient")
    named = {name: chance.integers(0, 1000, table.num_stages) for name in names}
    factor = chance.choice([0.25, 1.0, 2.5], table.num_microbatches) if seed % 2 else None
    return StageBytes(**named, microbatch_factor=factor)


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


@pytest.mark.slow
@given(feasible_schedules(), st.integers(0, 2**32), st.sampled_from([2, 3, None]), st.integers(0, 2))
def test_sharded_programs_hold_what_a_walk_row_by_row_finds(schedule, seed, residency, look_ahead):
    chance = np.random.default_rng(seed)
    units = [held[:2] for held in schedule.placement.stages_of_rank if len(held) > 1 and chance.random() < 0.5]
    options = {"residency": residency, "look_ahead": look_ahead, "units": units}

    program = lower(schedule, shard="full", optimizer_step=bool(seed % 2), **options)

    assert_as_row_by_row(program, seed)


def test_whole_weights_and_gradients_count_beside_the_shards():
    program = lower(schedule_of("0F0 1F0 1B0 0B0", placement=Placement.loop(1, 2)), shard="full", residency=1)
    sizes = StageBytes.of(2, static=3, weights=[100, 200], gradient=[10, 20])

    held = [(str(program.row(row)), live) for row, live in enumerate(live_bytes(program, sizes).tolist())]

    assert held == [
        ("0UNSHARD", 100), ("0F0", 100), ("0RESHARD", 100), ("1UNSHARD", 200), ("1F0", 200), ("1B0", 220),
        ("1REDUCE_GRAD", 220), ("1RESHARD", 220), ("0UNSHARD", 120), ("0B0", 110), ("0REDUCE_GRAD", 110),
        ("0RESHARD", 110),
    ]  # fmt: skip
    assert left_bytes(program, sizes).tolist()[-1] == 0


def test_a_program_that_gathers_nothing_has_its_weights_in_what_is_static():
    program = lower(schedule_of("0F0 0B0"))

    assert peak_bytes(program, StageBytes.of(1, static=3, weights=100, gradient=10)) == [0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_forward_only", [False, True])
def test_every_family_holds_what_a_walk_row_by_row_finds(name, is_forward_only):
    slices = 2 if FAMILIES[name].takes_slices else 1
    schedule = build(name, ranks=4, microbatches=8, slices=slices, forward_only=is_forward_only)

    for seed in (2, 3):
        for each in (schedule, with_some_recomputed(schedule, seed)):
            assert_as_row_by_row(each, seed)
            assert_as_row_by_row(lower(each), seed)
            if not schedule.is_forward_only:
                assert_as_row_by_row(lower(each, offload=range(schedule.num_stages)), seed)


def test_a_message_counts_from_its_maker_to_its_send_and_from_its_receive_to_its_consumer():
    """Messages of 100 bytes, activations of 10: drawn in docs/simulator.md."""
    program = lower(schedule_of("0F0 0B0\n1F0 1B0"))
    sizes = StageBytes.of(2, activation=10, message=100)

    held = {str(program.row(row)): live for row, live in enumerate(live_bytes(program, sizes).tolist())}

    assert {text: held[text] for text in ("0F0", "0SEND_F0", "0RECV_B0", "0B0")} == {
        "0F0": 110, "0SEND_F0": 110, "0RECV_B0": 110, "0B0": 110,
    }  # fmt: skip
    # What arrived is a part of the activation as soon as the forward runs: 100 before it, 10 of its own from then on.
    assert {text: held[text] for text in ("1RECV_F0", "1F0", "1B0", "1SEND_B0")} == {
        "1RECV_F0": 100, "1F0": 10, "1B0": 110, "1SEND_B0": 100,
    }  # fmt: skip


def test_a_receive_that_is_posted_early_counts_from_where_it_stands():
    early = Program.from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1", name="early")

    live = live_bytes(early, StageBytes.of(2, message=5))

    assert live.tolist()[-4:] == [5, 10, 5, 0]


def test_what_stays_on_the_rank_is_there_from_its_maker_to_its_consumer():
    schedule = schedule_of("0F0 1F0 1B0 0B0", placement=Placement.explicit((0, 0)))

    assert live_bytes(lower(schedule), StageBytes.of(2, message=7)).tolist()[:4] == [7, 0, 7, 7]


def test_a_forward_that_runs_again_keeps_its_inputs_until_then():
    program = lower(schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1R0 1B0 1R1 1B1"))
    sizes = StageBytes.of(2, activation=50, checkpoint=10, message=10)
    first = int(program.offsets[1])

    held = {str(program.row(row)): live for row, live in enumerate(live_bytes(program, sizes).tolist()) if row >= first}

    # A message becomes the checkpoint, beside that of 1F1, which is posted; a checkpoint then a part of the activation.
    assert [held[text] for text in ("1F0", "1R0", "1B0", "1R1", "1B1")] == [20, 60, 70, 50, 60]


def test_what_is_offloaded_is_on_the_device_until_then_and_from_its_reload_on():
    program = offloaded("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B2 0B0 0B1")
    sizes = StageBytes.of(1, activation=10, weight_context=3)

    assert live_bytes(program, sizes).tolist() == [10, 10, 10, 20, 30, 30, 20, 10]
    assert left_bytes(program, sizes).tolist() == [10, 0, 10, 20, 30, 20, 10, 0]
    assert (peak_bytes(program, sizes), peak_host_bytes(program, sizes)) == ([30], [10])


def test_the_host_holds_what_is_offloaded_from_the_start_of_its_offload_to_the_end_of_its_reload():
    program = lower(build("gpipe", ranks=2, microbatches=4), offload=[0])
    sizes = StageBytes.of(2, activation=[100, 7])

    # 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0F3 0OFFLOAD3 0RELOAD1 0B0 0RELOAD2 0B1 0RELOAD3 0B2 0B3
    assert peak_host_bytes(program, sizes) == [300, 0]
    assert peak_bytes(program, sizes) == [200, 28]
    assert peak_activations(program) == [2, 4]


def test_two_copies_at_once_of_a_host_that_waits_for_neither():
    program = offloaded("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0RELOAD1 0B0 0B1 0B2")

    assert peak_host_bytes(program, StageBytes.of(1, activation=4)) == [8]


def test_where_a_forward_runs_again_only_its_inputs_are_moved():
    program = offloaded("0F0 0OFFLOAD0 0F1 0RELOAD0 0R0 0B0 0B1")
    sizes = StageBytes.of(1, activation=50, checkpoint=10)

    assert live_bytes(program, sizes).tolist() == [10, 10, 50, 60, 100, 100, 50]
    assert peak_host_bytes(program, sizes) == [10]


def test_bytes_on_the_host_follow_those_of_their_microbatch():
    program = offloaded("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2")
    sizes = replace(StageBytes.of(1, activation=10), microbatch_factor=np.array([0.5, 3.0, 1.0]))

    assert peak_host_bytes(program, sizes) == [35]


def test_programs_without_offloads_leave_the_host_empty():
    assert peak_host_bytes(lower(build("1f1b", ranks=3, microbatches=4)), StageBytes.of(3, activation=9)) == [0, 0, 0]


def test_static_bytes_are_those_of_all_stages_of_a_rank():
    sizes = StageBytes.of(4, static=[1, 2, 4, 8])

    assert sizes.static_of_ranks(Placement.loop(2, 4)).tolist() == [5, 10]


def test_the_two_copies_of_the_stage_in_the_middle_are_one_module():
    sizes = StageBytes.of(6, static=[1, 2, 4, 1, 2, 4])  # of 3 ranks, the one in the middle has stage 1 and its copy

    assert sizes.static_of_ranks(Placement.bidirectional(3)).tolist() == [5, 2, 5]


def test_what_is_left_is_what_the_next_row_finds():
    schedule = schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1")

    assert left_bytes(schedule, StageBytes.of(1, activation=3)).tolist() == [3, 6, 3, 0]


@pytest.mark.parametrize(
    ("orders", "live"),
    [
        ("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", [1, 2, 3, 3, 3, 3, 2, 1]),
        ("0F0 0F1 0I0 0I1 0W0 0W1", [1, 2, 2, 2, 2, 1]),
        ("0F0 0F1 0F2", [1, 1, 1]),
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", [1, 2, 2, 1]),
        ("0F0 (0B0;0F1)OVERLAP_F_B 0B1", [1, 2, 2, 1]),
        ("0F0 0F1\n1F0 1F1 1B0 1B1", [1, 2, 1, 2, 2, 1]),
    ],
    ids=[
        "a backward still holds the activation that it frees",
        "an input gradient frees no activation and the weight gradient does",
        "a forward without any backward frees its activation itself",
        "both members of a pair are alive together",
        "both members of a pair are alive together, the backward first",
        "what one rank leaves alive does not count on the next",
    ],
)
def test_activations_are_alive_from_their_forward_to_the_end_of_their_backward(orders, live):
    assert live_activations(schedule_of(orders)).tolist() == live


def test_bytes_shrink_to_the_weight_context_after_the_input_part():
    schedule = schedule_of("0F0 0F1 0I0 0I1 0W0 0W1")

    live = live_bytes(schedule, StageBytes.of(1, activation=10, weight_context=3))

    assert live.tolist() == [10, 20, 20, 13, 6, 3]


def test_bytes_are_those_of_each_stage():
    schedule = schedule_of("0F0 0B0\n1F0 1B0")

    assert live_bytes(schedule, StageBytes.of(2, activation=[10, 7])).tolist() == [10, 10, 7, 7]


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


def most_alive(program, made, gone, rows):
    held = most = 0
    for row in range(rows.start, rows.stop):
        is_second = row > 0 and program.joined[row - 1]
        held += 0 if is_second else int(made[row]) + int(program.joined[row] and made[row + 1])
        most = max(most, held)
        held -= int(gone[row])
    return most


@given(feasible_schedules())
def test_peaks_are_the_largest_of_what_is_alive(schedule):
    program = lower(schedule)
    made, gone = program.is_compute, ~program.is_compute

    assert peak_activations(program) == peaks(program, live_activations(program))
    assert peak_alive(program, made, gone) == [most_alive(program, made, gone, rows) for rows in program.ranks]
