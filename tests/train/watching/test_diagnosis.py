"""Planted causes are named, and every idle microsecond has a cause."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.measured import Prologue
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.schedules import build
from penstock.searching.what_if import Setting
from penstock.simulation import Costs, simulate
from penstock.simulation.causes import Cause
from penstock.train.watching.diagnosis import ReplicaWaits, diagnose, replica_waits, setting_of
from tests.cli.recorded_steps import recorded_step as simulated_step
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.events import uneven_costs
from tests.support.planted import CLOCKS, Planted
from tests.support.strategies import schedules
from tests.train.settings.tables import config_with

NUM_TRIALS = 5


def planted_causes(chance, num_ranks, num_microbatches):
    """Return what is planted by a test, the cause that it is, and the begin of the culprit's name."""
    rank, link, end = chance.randrange(num_ranks), chance.randrange(num_ranks - 1), chance.choice([0, num_ranks - 1])
    sender, receiver = chance.choice([(link, link + 1), (link + 1, link)])
    late = (end, chance.randrange(1, num_microbatches))
    return [
        ({"slow_stages": {rank: 4.0}}, Cause.IMBALANCE, f"stage {rank} on rank {rank}, "),
        ({"slow_channels": {(sender, receiver): 0.04}}, Cause.TRANSFER, f"rank {sender} to rank {receiver}, "),
        ({"late_ranks": {rank: 0.06}}, Cause.STRAGGLER, f"rank {rank}, late"),
        ({"slow_data": {rank: 0.06}}, Cause.DATA, f"rank {rank}"),
        ({"slow_streams": {late: 0.06}}, Cause.DATA, f"rank {end}, for microbatches"),  # one inside the step
        ({"slow_streams": {(end, 0): 0.06}}, Cause.DATA, f"rank {end}"),
    ]


@pytest.mark.slow
def test_single_recordings_name_the_planted_cause_and_its_culprit(monkeypatch):
    monkeypatch.setattr("bench.emulated_layer.time", CLOCKS)
    missed = []
    for trial in range(NUM_TRIALS):
        chance = random.Random(trial)
        num_ranks, schedule = chance.choice([2, 3, 4]), chance.choice(["1f1b", "gpipe", "zb-h1"])
        for plant, cause, culprit in planted_causes(chance, num_ranks, 2 * num_ranks):
            planted = Planted(schedule=schedule, num_ranks=num_ranks, num_microbatches=2 * num_ranks, **plant)
            diagnosis = diagnose(planted.record(), planted.setting)
            chief = next(loss for loss in diagnosis.losses if loss.cause is not Cause.DEPENDENCY)
            assert chief.duration_s > 0
            if (chief.cause, chief.culprit[: len(culprit)]) != (cause, culprit):
                missed.append((plant, trial, diagnosis.losses[:3]))

    assert not missed


def test_an_unfavourable_split_is_cured_by_moving_a_layer_out_of_the_slow_stage():
    """Four layers take twice as long as the other four: with three of them, 1.5 against 1.25."""
    recorded = simulated_step(build("1f1b", ranks=2, microbatches=6), forward_s=(1.0, 2.0))

    diagnosis = diagnose(recorded, Setting(batch_size=6, family="1f1b", stages_per_rank=1))

    [move] = [change for change in diagnosis.changes if change.text == "move one layer from stage 1 to stage 0"]
    assert -0.25 < move.step_change < -0.15
    assert "move one layer from stage 0 to stage 1" not in [change.text for change in diagnosis.changes]


def recorded_step(schedule, seed):
    """A simulated step that passes for a measured one, with uneven costs and ranks that come at different times."""
    program, chance = lower(schedule), np.random.default_rng(seed)
    timeline = simulate(program, uneven_costs(program, seed))
    measured = Timeline(program, "measured", timeline.start_s, timeline.end_s)
    moments = np.sort(chance.uniform(-9, -1, (program.num_ranks, 3)))
    parts = [range(2 * place, 2 * place + 2) for place in range(len(program.placement.routes[0]))]
    place_of = {stage: place for route in program.placement.routes for place, stage in enumerate(route)}
    return replace(
        measured,
        step=3,
        message_bytes=(0,) * program.num_stages,
        layers_of_stage=tuple(parts[place_of[stage]] for stage in range(program.num_stages)),
        layer_weights=(1.0,) * (2 * len(parts)),
        prologues=tuple(Prologue(*row) for row in moments.tolist()),
    )


@pytest.mark.slow
@given(schedules(), st.integers(0, 2**32))
def test_the_causes_add_up_to_all_idle_time_from_when_a_rank_was_free_to_the_end(schedule, seed):
    recorded = recorded_step(schedule, seed)
    if recorded.makespan_s == 0:
        return

    idle = diagnose(recorded, Setting(batch_size=schedule.num_microbatches)).idle

    end_s = recorded.end_s[recorded.program.is_compute].max()
    expected = [end_s - lead_in.free_s - recorded.work_s[rank] for rank, lead_in in enumerate(recorded.prologues)]
    assert idle.by_rank.sum(axis=1) == pytest.approx(expected, abs=1e-6)


def test_the_setting_of_a_run_is_that_of_its_configuration():
    pipeline = {"schedule": "1f1b", "options": {"warmup": "eager"}, "stages_per_rank": 1}
    run = {"batch": {"size": 24}, "pipeline": pipeline}

    assert setting_of(config_with(**run)) == Setting(
        batch_size=24, family="1f1b", options={"warmup": "eager"}, stages_per_rank=1
    )
    assert setting_of(config_with(**run | {"pipeline": {"schedule": "mine.csv"}})).family is None
    assert setting_of(config_with(**run, parallel={"data": 3})).batch_size == 8  # of a replica


def measured(*ranks, **costs):
    program = Program.from_csv("\n".join(row.replace(" ", ",") for row in ranks), name="replicas")
    return replace(simulate(program, Costs.uniform(**costs)), source="measured")


@pytest.mark.parametrize(("reduce_s", "behind_s"), [((2.0, 1.5), 2.0), ((0.0, 1.5), 0.0)])
def test_only_sums_that_end_behind_the_last_computation_make_the_step_longer(reduce_s, behind_s):
    """Rank 1 sums from 4 to 5.5, while rank 0 computes until 7, and then sums until 9."""
    timeline = measured(
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
        backward=2.0,
        reduce_s=reduce_s,
    )

    assert replica_waits(timeline) == ReplicaWaits(0.0, 0, behind_s, 0)


def test_a_gather_counts_from_when_the_rank_had_all_else():
    """The gather of stage 1 begins with 0F0, at 0, and ends at 3; rank 1 has its input at 1."""
    timeline = measured(
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RESHARD",
        unshard_s=(3.0,),
    )

    found = replica_waits(timeline)

    assert (found.within_s, found.within_rank) == (pytest.approx(2.0), 1)
    assert found.behind_s == 0.0


def test_sums_that_hold_their_rank_up_count_within():
    program = Program.from_csv("0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD", name="held up")

    found = replica_waits(with_blocking_reductions(program, Costs.uniform(reduce_s=(0.5, 0.75))))

    assert (found.within_s, found.behind_s) == (0.75, 0.5)
