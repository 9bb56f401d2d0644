"""Collectives: gathers and reductions in one queue beside the computations, barriers of tied groups."""

from dataclasses import replace

import pytest

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.simulation.drawing import ends, sharded, starts


def test_the_first_computation_of_a_stage_waits_for_its_gather_and_others_do_not():
    program = sharded("0UNSHARD 1UNSHARD 0F0 1F0")

    timeline = simulate(program, Costs.uniform(unshard_s=(2.0, 0.5)))

    assert starts(timeline) == {"0UNSHARD": 0, "1UNSHARD": 0, "0F0": 2, "1F0": 3}
    assert ends(timeline)["1UNSHARD"] == 2.5  # after the gather of stage 0


def test_a_gather_runs_under_the_computations_that_do_not_need_it():
    program = sharded("0F0 1UNSHARD 0F1 1F0 1F1")

    timeline = simulate(program, Costs.uniform(unshard_s=(1.5,)))

    assert (starts(timeline)["0F1"], starts(timeline)["1F0"], starts(timeline)["1F1"]) == (1, 2.5, 3.5)


def test_a_reshard_takes_no_time():
    timeline = simulate(sharded("0F0 0RESHARD 0F1"), Costs.uniform(unshard_s=(5.0,), reduce_s=(5.0,)))

    assert starts(timeline)["0F1"] == 1


def test_a_reduction_runs_under_computations_and_the_optimizer_step_waits_for_it():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0STEP")

    timeline = simulate(program, Costs.uniform(backward=2.0, reduce_s=(1.0, 4.0), optimizer_s=(0.25, 0.5)))

    assert (starts(timeline)["1REDUCE_GRAD"], ends(timeline)["1REDUCE_GRAD"]) == (4, 8)
    assert (starts(timeline)["0B0"], ends(timeline)["0B0"]) == (4, 6)
    assert (starts(timeline)["0REDUCE_GRAD"], ends(timeline)["0REDUCE_GRAD"]) == (6, 9)  # behind that of stage 1
    assert (starts(timeline)["0STEP"], ends(timeline)["0STEP"]) == (9, 9.75)
    assert (timeline.makespan_s, timeline.step_s) == (6, 9.75)
    assert timeline.work_s.tolist() == [6]


def test_a_step_without_an_optimizer_is_over_when_its_reductions_are():
    timeline = simulate(sharded("0F0 0B0 0REDUCE_GRAD"), Costs.uniform(reduce_s=(4.0,)))

    assert (timeline.makespan_s, timeline.step_s) == (3, 7)


@pytest.mark.feature("H4")
def test_gathers_and_reductions_share_one_lane_in_the_order_of_the_program():
    program = sharded("0F0 0B0 1UNSHARD 0REDUCE_GRAD 2UNSHARD 1F0 2F0")

    timeline = simulate(program, Costs.uniform(unshard_s=(4.0, 4.0, 1.0), reduce_s=(1.0,)))

    assert [ends(timeline)[text] for text in ("1UNSHARD", "0REDUCE_GRAD", "2UNSHARD")] == [7, 8, 9]
    assert (starts(timeline)["1F0"], starts(timeline)["2F0"]) == (7, 9)


def test_what_is_free_on_every_stage_waits_for_nothing():
    program = sharded("0F0 0B0 1UNSHARD 0REDUCE_GRAD 1F0 0STEP")

    timeline = simulate(program, Costs.uniform(unshard_s=(4.0,)))

    assert (starts(timeline)["0REDUCE_GRAD"], ends(timeline)["0REDUCE_GRAD"]) == (3, 3)


def test_a_unit_takes_the_time_of_all_its_stages():
    program = replace(sharded("0UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 0RESHARD"), units=((0, 1),))

    timeline = simulate(program, Costs.uniform(unshard_s=(2.0, 0.5), reduce_s=(1.0, 2.0)))

    assert (starts(timeline)["0F0"], starts(timeline)["1F0"]) == (2.5, 3.5)
    assert ends(timeline)["0REDUCE_GRAD"] == 2.5 + 6 + 3


def test_reductions_without_costs_end_where_they_stand():
    program = lower(build("1f1b", ranks=2, microbatches=2), optimizer_step=True)

    timeline = simulate(program, Costs.uniform())

    assert timeline.step_s == timeline.makespan_s
    assert starts(timeline)["0STEP"] == ends(timeline)["0B1"] == 9
    assert starts(timeline)["1STEP"] == ends(timeline)["1B1"] == 7


def test_an_optimizer_step_waits_for_the_reductions_of_its_own_rank_only():
    program = lower(build("gpipe", ranks=2, microbatches=1), optimizer_step=True)

    timeline = simulate(program, Costs.uniform(reduce_s=(3.0, 1.0)))

    assert starts(timeline)["0STEP"] == ends(timeline)["0B0"] + 3
    assert starts(timeline)["1STEP"] == ends(timeline)["1B0"] + 1


def test_members_wait_in_a_tied_reduction_until_the_last_has_come():
    program = lower(build("gpipe", ranks=3, microbatches=1), tied_groups=[(0, 2)], optimizer_step=True)

    timeline = simulate(program, Costs.uniform(tied_reduce_s=(0.5,), reduce_s=(0.0, 0.0, 0.25)))

    assert ends(timeline)["0B0"] == 9
    assert (starts(timeline)["0REDUCE_TIED0"], starts(timeline)["2REDUCE_TIED0"]) == (9, 5.25)
    assert ends(timeline)["0REDUCE_TIED0"] == ends(timeline)["2REDUCE_TIED0"] == 9.5
    assert (starts(timeline)["0STEP"], starts(timeline)["1STEP"], starts(timeline)["2STEP"]) == (9.5, 7, 9.5)


def test_tied_groups_are_reduced_one_after_the_other_in_their_order():
    program = lower(build("gpipe", ranks=2, microbatches=1), tied_groups=[(0, 1), (0, 1)])

    timeline = simulate(program, Costs.uniform(tied_reduce_s=(2.0, 1.0)))

    assert (ends(timeline)["0REDUCE_TIED0"], ends(timeline)["1REDUCE_TIED1"]) == (8, 9)


@pytest.mark.feature("X23")
def test_a_member_comes_to_a_tied_reduction_when_its_own_reductions_are_over():
    program = sharded("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_TIED0", "2F0 2B0 2REDUCE_TIED0")

    timeline = simulate(program, Costs.uniform(reduce_s=(7.0,), tied_reduce_s=(0.5,)))

    assert (ends(timeline)["1REDUCE_GRAD"], ends(timeline)["0B0"]) == (7 + 7, 9)
    assert (starts(timeline)["0REDUCE_TIED0"], starts(timeline)["2REDUCE_TIED0"]) == (14, 5)
    assert ends(timeline)["0REDUCE_TIED0"] == ends(timeline)["2REDUCE_TIED0"] == 14.5


def test_a_member_that_has_nothing_else_to_do_waits_from_the_beginning():
    program = sharded("0F0 0B0 0REDUCE_TIED0", "1REDUCE_TIED0")

    timeline = simulate(program, Costs.uniform(tied_reduce_s=(0.5,), launch_s=0.25))

    assert (starts(timeline)["0REDUCE_TIED0"], starts(timeline)["1REDUCE_TIED0"]) == (3.75, 0.25)
    assert (ends(timeline)["0REDUCE_TIED0"], ends(timeline)["1REDUCE_TIED0"]) == (4.25, 4.25)


def test_gathers_keep_the_order_in_which_they_are_launched():
    program = sharded("0UNSHARD 0F0 0B0 0REDUCE_GRAD 1UNSHARD 2UNSHARD 1F0")

    timeline = simulate(program, Costs.uniform(unshard_s=(1.0,), reduce_s=(1.0,)))

    assert [ends(timeline)[text] for text in ("0UNSHARD", "0REDUCE_GRAD", "1UNSHARD", "2UNSHARD")] == [1, 5, 6, 7]


def test_copies_that_end_under_computations_cost_nothing():
    program = sharded("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0F3 0B0 0B1 0B2 0B3")

    timeline = simulate(program, Costs.uniform(offload_s=(2.0,), reload_s=(1.0,)))

    assert (starts(timeline)["0OFFLOAD0"], ends(timeline)["0OFFLOAD0"]) == (1, 3)
    assert (starts(timeline)["0RELOAD0"], ends(timeline)["0RELOAD0"]) == (3, 4)
    assert (starts(timeline)["0F1"], starts(timeline)["0B0"]) == (1, 4)
    assert timeline.makespan_s == 4 + 4 * 2


def test_what_reads_waits_for_its_reload_and_that_for_the_copies_before_it():
    program = sharded("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0F3 0B0 0B1 0B2 0B3")

    timeline = simulate(program, Costs.uniform(offload_s=(3.0,), reload_s=(2.5,)))

    assert ends(timeline)["0OFFLOAD0"] == 4
    assert (starts(timeline)["0RELOAD0"], ends(timeline)["0RELOAD0"]) == (3, 6.5)
    assert (starts(timeline)["0F3"], starts(timeline)["0B0"], starts(timeline)["0B1"]) == (3, 6.5, 8.5)


def test_a_recomputation_waits_for_the_inputs_that_are_reloaded():
    program = sharded("0F0 0OFFLOAD0 0F1 0RELOAD0 0R0 0B0 0B1")

    timeline = simulate(program, Costs.uniform(reload_s=(4.0,)))

    assert (starts(timeline)["0R0"], starts(timeline)["0B0"]) == (6, 7)


def test_copies_and_gathers_do_not_wait_for_each_other():
    program = sharded("0UNSHARD 0F0 0OFFLOAD0 1UNSHARD 0F1 0RELOAD0 1F1 1F0 1B0 0B0 1B1 0B1")

    timeline = simulate(program, Costs.uniform(unshard_s=(2.0, 4.0), offload_s=(0.5,), reload_s=(0.5,)))

    assert (ends(timeline)["0OFFLOAD0"], ends(timeline)["1UNSHARD"]) == (3.5, 7)
    assert ends(timeline)["0RELOAD0"] == 4.5


def test_each_stage_has_its_own_seconds_and_a_launch_comes_before_a_copy():
    program = lower(build("gpipe", ranks=2, microbatches=3), offload=[0, 1])

    timeline = simulate(program, Costs.uniform(offload_s=(0.25, 0.5), launch_s=1.0))

    lasts = {text: ends(timeline)[text] - starts(timeline)[text] for text in ("0OFFLOAD0", "1OFFLOAD0")}
    assert lasts == {"0OFFLOAD0": 1.25, "1OFFLOAD0": 1.5}
