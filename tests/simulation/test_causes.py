"""Causes of idle time: they add up to it, planted ones are found, and a second definition says the same."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.ir.timeline import DataWait
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.blocks import blocks_of
from penstock.simulation.causes import NEVER, Cause, ExpectedDurations, accounts_of, idle_times, memory_blocked_since_s
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.drawing import drawn, late_ranks, later, row_of, sharded
from tests.simulation.events import programs, uneven_costs
from tests.simulation.slow_data import slow_rows, with_slow_data


def seconds(found, rank):
    """The causes of one rank that took any time."""
    return {cause.name.lower(): found.by_rank[rank, cause] for cause in Cause if found.by_rank[rank, cause]}


class Why:
    """A second definition: the cause of one rank's idleness at one moment, asked from rank to rank."""

    def __init__(self, timeline, costs, memory_limit):
        self.timeline, self.expected = timeline, ExpectedDurations(timeline.program, costs)
        self.blocks = blocks_of(timeline)
        self.blocked_since_s = memory_blocked_since_s(timeline, costs, self.blocks, memory_limit)
        self.begin_s = min(block.start_s for block in self.blocks)
        self.end_s = max(block.end_s for block in self.blocks)
        self.of_rank = [[i for i, b in enumerate(self.blocks) if b.rank == r] for r in range(timeline.num_ranks)]

    def by_rank(self):
        found = np.zeros((self.timeline.num_ranks, len(Cause)))
        moments = sorted(m for m in self.moments() if self.begin_s <= m <= self.end_s)
        for before_s, after_s in pairwise(moments):
            if after_s - before_s < 1e-12:
                continue  # rounded
            for rank in range(len(found)):
                label = self.label(rank, (before_s + after_s) / 2)
                if label is not None and not isinstance(label, str):
                    found[rank, label] += after_s - before_s
        return found

    def moments(self):
        """Every moment at which a label may change."""
        yield from (self.begin_s, self.end_s)
        yield from (moment_s for wait in self.timeline.data_waits for moment_s in (wait.begin_s, wait.end_s))
        for index, block in enumerate(self.blocks):
            yield from (block.start_s, block.end_s, self.blocked_since_s[index])
            yield from (block.start_s + length_s for length_s in self.work_limits(block))
            yield from (message.arrival_s for message in block.messages)
            yield from (moment_s for each in block.reductions for moment_s in (each.begin_s, each.end_s))
            yield from self.phases(index)

    def work_limits(self, block):
        on_its_stage_s = self.expected.on_its_stage_s(block)
        return min(on_its_stage_s, self.expected.on_the_mean_stage_s(block)), on_its_stage_s

    def previous(self, index):
        own = self.of_rank[self.blocks[index].rank]
        place = own.index(index)
        return None if place == 0 else self.blocks[own[place - 1]]

    def phases(self, index):
        """Until when a block waits for its message, for its gather, and for launches."""
        block, before = self.blocks[index], self.previous(index)
        free_s = self.begin_s if before is None else before.end_s
        first_row = self.timeline.program.offsets[block.rank] if before is None else before.rows.stop
        arrival_s = max([free_s, *(message.arrival_s for message in block.messages)])
        gathered_s = max(arrival_s, block.gather.end_s) if block.gather else arrival_s
        return arrival_s, gathered_s, gathered_s + self.expected.launches_s(block, int(block.row - first_row))

    def label(self, rank, moment_s):
        """A cause, or a string while the rank works as it should."""
        for index in self.of_rank[rank]:
            block = self.blocks[index]
            if moment_s < block.start_s:
                return self.waiting(index, moment_s)
            if moment_s < block.end_s:
                return self.working(block, moment_s)
        ends = [max((self.blocks[i].end_s for i in own), default=self.begin_s) for own in self.of_rank]
        return self.inherited(ends.index(max(ends)), moment_s, Cause.SYNCHRONISATION)

    def inherited(self, rank, moment_s, of_work):
        """Why a rank is idle that waits for what this one does."""
        label = self.label(rank, moment_s)
        return of_work if label in ("work", Cause.DEPENDENCY) else Cause(int(label))

    def working(self, block, moment_s):
        ordinary_s, on_its_stage_s = self.work_limits(block)
        if moment_s < block.start_s + ordinary_s:
            return "work"
        return f"{Cause.IMBALANCE if moment_s < block.start_s + on_its_stage_s else Cause.STRAGGLER}"

    def waiting(self, index, moment_s):
        block = self.blocks[index]
        if moment_s > self.blocked_since_s[index]:
            return Cause.MEMORY
        message = max(block.messages, key=lambda each: each.arrival_s, default=None)
        arrival_s, gathered_s, launched_s = self.phases(index)
        if message is not None and moment_s < self.blocks[message.producer].end_s:
            return self.inherited(self.blocks[message.producer].rank, moment_s, Cause.DEPENDENCY)
        if moment_s < arrival_s and any(
            each.begin_s < moment_s < each.end_s <= message.posted_s for each in block.reductions
        ):
            return Cause.SYNCHRONISATION
        if moment_s < gathered_s:
            return Cause.TRANSFER if moment_s < arrival_s else Cause.SYNCHRONISATION
        own = [wait for wait in self.timeline.data_waits if wait.rank == block.rank]
        if any(wait.begin_s < moment_s < wait.end_s for wait in own):
            return Cause.DATA
        if any(each.begin_s < moment_s < each.end_s for each in block.reductions):
            return Cause.SYNCHRONISATION
        return Cause.LAUNCH if moment_s < launched_s else Cause.STRAGGLER


# Properties of every timeline

played_steps = st.sampled_from([with_slow_data, with_blocking_reductions])


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 0.3]), played_steps, st.booleans())
def test_the_causes_are_those_that_each_moment_has(program, seed, limit, share_of_slow_data, played, awaits_receives):
    costs = replace(uneven_costs(program, seed), awaits_receives=awaits_receives)
    timeline = played(program, costs, slow_rows(program, seed, share_of_slow_data))
    usual = replace(costs, microbatch_compute_factor=(1.0,), launch_s=0.0)

    found = idle_times(timeline, usual, memory_limit=limit)

    expected = Why(timeline, usual, limit).by_rank()
    assert found.by_rank == pytest.approx(expected, abs=1e-9)


# Planted causes


TWO = drawn("0F0 0F1", "1F0 1F1", num_microbatches=2)
UNIT = Costs.uniform()
UNEVEN = replace(UNIT, forward_s=(3.0, 1.0))
RELOAD = Costs.uniform(reload_s=(4.0,))
REDUCTION = Costs.uniform(reduce_s=(0.75,), launch_s=0.25)
TRANSFER = {0: {"transfer": 0.5, "synchronisation": 1}, 1: {"dependency": 1, "transfer": 0.5}}


PLANTED = {
    # Rank 1 still runs 1F1 when rank 0 is done.
    "the work of another rank is a dependency": (
        simulate(TWO, UNIT), UNIT, {0: {"synchronisation": 1}, 1: {"dependency": 1}},
    ),
    # Rank 0 waits for rank 1, which waits for the message.
    "a message that is on its way is a transfer": (
        simulate(drawn("0F0", "1F0"), Costs.uniform(transfer=0.5)), Costs.uniform(transfer=0.5), TRANSFER,
    ),
    # Stages take 2 seconds in the mean. Rank 1 waits for 0F0 three seconds, and for 0F1 from 4 to 6; 0F1 runs from 3.
    "what a slow stage takes above the mean is imbalance": (
        simulate(TWO, UNEVEN), UNEVEN, {0: {"synchronisation": 1}, 1: {"dependency": 2 + 1, "imbalance": 1 + 1}},
    ),
    "a rank that begins late is a straggler for itself and those that wait": (
        late_ranks(simulate(drawn("0F0", "1F0", "2F0"), UNIT), 0.5, first=1), UNIT,
        {1: {"dependency": 1, "straggler": 0.5, "synchronisation": 1}, 2: {"dependency": 2, "straggler": 0.5}},
    ),
    "the launch of a computation is before it": (
        later(simulate(drawn("0F0 0F1", num_microbatches=2), UNIT), [0, 0.25]), Costs.uniform(launch_s=0.25),
        {0: {"launch": 0.25}},
    ),
    "beside data the host has the time that it usually needs": (
        later(
            simulate(drawn("0F0 0F1", num_microbatches=2), UNIT), [0, 4.0], data_waits=(DataWait(0, 1, 1.125, 4.125),)
        ),
        Costs.uniform(launch_s=0.5), {0: {"data": 3, "launch": 0.5, "straggler": 0.5}},
    ),
    "waiting for a reload is synchronisation": (
        simulate(sharded("0F0 0OFFLOAD0 0F1 0RELOAD0 0F2 0B0 0B1 0B2"), RELOAD), RELOAD, {0: {"synchronisation": 3}},
    ),
    # All launches but that of 0F0.
    "a reduction that blocks between computations is synchronisation": (
        with_blocking_reductions(sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0"), REDUCTION), REDUCTION,
        {0: {"synchronisation": 0.75, "launch": 4 * 0.25}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("timeline", "usual", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_cause_is_found(timeline, usual, expected):
    found = idle_times(timeline, usual)

    assert {rank: seconds(found, rank) for rank in expected} == expected


def test_the_causes_of_a_schedule_are_those_of_its_program():
    schedule, costs = build("zbv", ranks=4, microbatches=8), Costs.uniform(transfer=0.25)

    bare, lowered = (idle_times(simulate(table, costs), costs) for table in (schedule, lower(schedule)))

    assert bare.total(Cause.TRANSFER) > 0
    assert bare.by_rank == pytest.approx(lowered.by_rank)


@pytest.mark.feature("X5")
def test_waiting_for_a_microbatch_is_data_on_its_rank_and_on_those_that_wait_for_it():
    program = drawn("0F0 0F1", "1F0 1F1", "2F0 2F1", num_microbatches=2)
    timeline = with_slow_data(program, Costs.uniform(), {row_of(program, "0F1"): 2.5})

    found = idle_times(timeline, Costs.uniform())

    assert seconds(found, 0) == {"data": 2.5, "synchronisation": 2}
    # Rank 0 waits from 1 to 3.5; rank 1 from 2 on, when it has done 1F0, and rank 2 from 3 on.
    assert seconds(found, 1) == {"dependency": 1 + 1, "data": 1.5, "synchronisation": 1}
    assert seconds(found, 2) == {"dependency": 2 + 2, "data": 0.5}


def test_being_full_while_a_forward_could_run_is_memory():
    costs = Costs.uniform(backward=2.0, transfer=1.0)
    timeline = simulate(drawn("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2), costs)

    without, found = (idle_times(timeline, costs, memory_limit=limit) for limit in (None, 1))

    # Rank 0 runs 0F0 until 1, waits for 1F0 and 1B0 from 2 to 5 and their transfers, runs 0B0 at 6; and so on.
    assert seconds(without, 0) == {"dependency": 6, "transfer": 4}
    assert seconds(found, 0) == {"memory": 5, "dependency": 3, "transfer": 2}
    assert idle_times(timeline, costs, memory_limit=[2, 1]).by_rank[0, Cause.MEMORY] == 0  # it may hold more
    with pytest.raises(ConfigError, match="memory_limit: 3 values for 2 ranks; give one"):
        idle_times(timeline, costs, memory_limit=[1, 1, 1])


@pytest.mark.slow
@given(programs(), st.integers(0, 2**32))
def test_spans_lie_between_blocks_and_add_up_to_the_idle_time_of_each_cause(program, seed):
    costs = uneven_costs(program, seed)
    timeline = with_slow_data(program, costs, slow_rows(program, seed))

    sums = np.zeros((timeline.num_ranks, len(Cause)))
    for rank, account in enumerate(accounts_of(timeline, costs)):
        rows = timeline.compute_rows(rank)
        assert all(earlier.end_s <= later.begin_s for earlier, later in pairwise(account.spans))
        for begin_s, end_s, cause in account.spans:
            sums[rank, cause] += end_s - begin_s
            middle_s = (begin_s + end_s) / 2
            assert not ((timeline.start_s[rows] < middle_s) & (middle_s < timeline.end_s[rows])).any()
    assert sums == pytest.approx(idle_times(timeline, costs).by_rank)


COSTS = Costs(forward_s=(1.0, 3.0), backward_s=(2.0, 6.0), microbatch_compute_factor=(1.0, 2.0), overlap_factor=0.5)
PROGRAM = drawn("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2)


def expected(costs):
    """By the text of a block: seconds on its stage, and on the mean stage."""
    found = ExpectedDurations(PROGRAM, costs)
    blocks = {str(PROGRAM.instruction(block.row)): block for block in blocks_of(simulate(PROGRAM, costs))}
    return {text: (found.on_its_stage_s(block), found.on_the_mean_stage_s(block)) for text, block in blocks.items()}


def test_a_stage_takes_its_own_time_for_its_microbatch_and_the_mean_is_over_stages_and_microbatches():
    forward_s, backward_s = 2 * 1.5, 4 * 1.5

    assert expected(COSTS) == {
        "0F0": (1, forward_s), "0F1": (0.5 * (2 * 1 + 2), 0.5 * (forward_s + backward_s)), "0B1": (4, backward_s),
        "1F0": (3, forward_s), "1B0": (6, backward_s), "1F1": (6, forward_s), "1B1": (12, backward_s),
    }  # fmt: skip


def test_launches_come_before_a_block_and_are_no_part_of_it():
    launched = replace(COSTS, launch_s=0.25)
    single, pair = (block for block in blocks_of(simulate(PROGRAM, COSTS))[:2])

    assert expected(launched) == expected(COSTS)
    assert expected(Costs(forward_s=(1.0,), backward_s=(2.0,)))["0B1"] == (2.0, 2.0)  # kinds that do not run need none
    assert ExpectedDurations(PROGRAM, launched).launches_s(single, 3) == 4 * 0.25
    assert ExpectedDurations(PROGRAM, launched).launches_s(pair, 3) == 5 * 0.25


ONE_AT_A_TIME = drawn("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", num_microbatches=3)


def blocked_since(program, limit, costs=None):
    """Since when the rank of each block was full, by the text of the block; without those where it never was."""
    costs = costs or Costs.uniform()
    timeline = simulate(program, costs)
    blocks = blocks_of(timeline)
    since_s = memory_blocked_since_s(timeline, costs, blocks, limit)
    found = zip(blocks, since_s, strict=True)
    return {str(program.instruction(block.row)): since for block, since in found if since != NEVER}


def test_the_first_stage_could_run_its_next_forward_from_the_beginning_on():
    since = blocked_since(ONE_AT_A_TIME, 1)

    assert since["0B0"] == since["0B1"] == -float("inf")
    assert "0B2" not in since  # no forward is left
    assert "0F1" not in since  # a forward waits for its own input


def test_without_a_limit_and_below_it_no_rank_is_full():
    assert blocked_since(ONE_AT_A_TIME, None) == blocked_since(ONE_AT_A_TIME, 2) == {}
    assert {text[0] for text in blocked_since(ONE_AT_A_TIME, [2, 1])} == {"1"}


@pytest.mark.parametrize(
    ("options", "arrival_s"),
    [
        ({}, 8.0),
        ({"transfer": 0.5}, 9.5),
        ({"message_bytes": (4,), "bandwidth_bytes_per_s": 8.0}, 9.5),
        ({"message_bytes": (4,), "bandwidth_bytes_per_s": 8.0, "microbatch_bytes_factor": (1, 1, 2)}, 10.0),
        ({"message_bytes": (4,), "bandwidth_bytes_per_s": 8.0, "is_exclusive": True}, 9.5),
    ],
)
def test_a_later_stage_could_run_its_next_forward_when_its_input_has_come(options, arrival_s):
    program = drawn("0F0 0B0 0F1 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", num_microbatches=3)

    since = blocked_since(program, [2, 1], Costs.uniform(**options))

    # 0F2 ends at 8 without transfers; the message is counted from its send on, however late its receive is posted.
    assert since["1B1"] == arrival_s


def test_the_earliest_of_all_later_forwards_counts():
    program = drawn("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1",
                    placement=Placement.vee(2), num_microbatches=2)  # fmt: skip

    since = blocked_since(program, 2)

    assert since["3B0"] == -float("inf")  # 0F1, though 3F1 comes later
    assert "0B0" not in since  # one of two is free again


def test_activations_count_until_their_weight_gradients_and_a_slice_is_ready_when_the_one_before_it_has_run():
    split = drawn("0F0 0I0 0W0 0F1 0I1 0W1", num_microbatches=2)
    sliced = drawn("0F0 0F0.1 0B0.1 0B0 0F1 0F1.1 0B1.1 0B1", num_microbatches=2, num_slices=2)

    assert set(blocked_since(split, 1)) == {"0I0", "0W0"}
    assert blocked_since(sliced, 2)["0B0.1"] == -float("inf")


NO_NUMBERS = r"memory_limit: .*; give whole numbers of 0 or more"


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        *((limit, NO_NUMBERS) for limit in (-1, 1.5, True, "3", float("nan"), [1, -2])),
        ([1, 2, 3], "memory_limit: 3 values for 2 ranks; give one, or one per rank"),
    ],
)
def test_limits_that_are_none_of_these_ranks_are_refused(limit, told):
    with pytest.raises(ConfigError, match=told):
        blocked_since(ONE_AT_A_TIME, limit)
