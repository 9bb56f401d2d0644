"""Problems of splits are those of costs per stage, with recomputation as programs have it."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.ir.operations import NUM_OPS, Kind
from penstock.placement import Placement
from penstock.planning import plan
from penstock.searching.joint.annealing import Annealing, row_of
from penstock.searching.joint.splits import Splits
from penstock.searching.listing import list_schedule
from penstock.searching.problem import Problem
from penstock.searching.sequences import run
from penstock.searching.settings import settings_for
from penstock.simulation import LayerCosts

COLUMNS = ("seconds", "taken_bytes", "freed_bytes", "room_bytes", "lag_s", "wire_s", "limit")
MICROBATCHES = 4
IS_RECOMPUTE = np.arange(NUM_OPS) == Kind.RECOMPUTE


def layers(seed, **others):
    random = np.random.default_rng(seed)
    names = "forward", "backward_input", "backward_weight"
    seconds = {name: random.uniform(1.0, 3.0, 9) for name in names}
    sizes = {
        name: random.integers(1, 50, 9)
        for name in ("activation_bytes", "weight_context_bytes", "parameter_bytes", "optimizer_bytes", "message_bytes")
    }
    return LayerCosts(**(seconds | sizes | {"latency_s": 0.1, "bandwidth_bytes_per_s": 200.0} | others))


CASES = [
    {},
    {"is_exclusive": True},
    {
        "launch_s": 0.05,
        "microbatch_compute_factor": [1.0, 2.0, 0.5, 1.5],
        "microbatch_bytes_factor": [1.0, 2.0, 0.5, 3.0],
    },
    {"forward_workspace_bytes": range(9), "backward_workspace_bytes": range(90, 0, -10)},
    {"recompute": [0.5] * 9, "checkpoint_bytes": range(9), "split_forward": [4.0] * 9, "shards": 3},
]


@pytest.mark.parametrize("others", CASES)
@pytest.mark.parametrize("placement", [Placement.line(3), Placement.vee(3)], ids=lambda each: each.style)
def test_columns_that_annealing_fills_in_are_those_of_the_problem(placement, others):
    random = np.random.default_rng(1)
    splits = Splits(layers(0, **others), placement, MICROBATCHES, np.full(3, 5000, np.int64))
    annealing = Annealing(splits, seed=0, may_recompute=True)
    for _ in range(6):
        cuts = np.sort(random.choice(np.arange(1, 9), placement.num_stages - 1, replace=False))
        split = tuple(np.diff([0, *cuts, 9]).tolist())
        recomputed = tuple(np.flatnonzero(random.integers(2, size=placement.num_stages)).tolist())
        row = row_of(split, recomputed, 3, np.full(placement.num_stages, 3), wait=1)

        choice = annealing.run(row, 1, 0.0)

        assert (choice.split, choice.recomputed) == (split, recomputed)
        problem = splits.problem_of(split, recomputed)
        for name in COLUMNS:
            assert getattr(annealing.columns, name).tolist() == getattr(problem, name).tolist(), name


@pytest.mark.parametrize("others", CASES)
@pytest.mark.parametrize("placement", [Placement.line(3), Placement.vee(3)], ids=lambda each: each.style)
def test_a_problem_of_a_split_is_that_of_its_stages(placement, others):
    """What a rank takes and holds follows from prefix sums of layers: equal but for the last digits of seconds."""
    costs = layers(2, **others)
    for split in ((2, 3, 4), (7, 1, 1)) if placement.num_stages == 3 else ((1, 2, 1, 2, 1, 2), (4, 1, 1, 1, 1, 1)):
        problem = Splits(costs, placement, MICROBATCHES, None).problem_of(split)

        stages = Problem.of(placement, MICROBATCHES, costs.of_stages(split))

        for name in COLUMNS:
            np.testing.assert_allclose(getattr(problem, name), getattr(stages, name), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    "workspaces", [{}, {"forward_workspace_bytes": range(9)}, {"backward_workspace_bytes": [7] * 9}]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_recomputed_stage_holds_what_its_schedule_holds(seed, workspaces):
    """The schedule has R rows; its proof counts them by the table of operations. Without messages both are equal."""
    placement = (Placement.line(3), Placement.vee(3))[seed % 2]
    costs = layers(seed, message_bytes=[0], checkpoint_bytes=[3] * 9, latency_s=0.0, **workspaces)
    splits = Splits(costs, placement, MICROBATCHES, None)
    split = (2, 3, 4) if placement.num_stages == 3 else (1, 2, 1, 2, 1, 2)
    recomputed = tuple(range(seed % 3, placement.num_stages, 2))
    problem = splits.problem_of(split, recomputed)
    sequence = list_schedule(problem, next(settings_for(problem)))

    timed = run(problem, sequence)
    schedule = problem.schedule(sequence, "recomputed")
    timeline = plan(schedule, splits.costs_of(split)).timeline

    assert len(schedule.rows_of(IS_RECOMPUTE)) == MICROBATCHES * len(recomputed)
    assert timed.peak_bytes.tolist() == timeline.peak_bytes
    assert timeline.makespan_s <= timed.makespan_s * (1 + 1e-12)  # R may begin before the gradient has come


def test_forwards_that_run_again_take_longer_and_hold_less():
    splits = Splits(layers(0, message_bytes=[1]), Placement.line(3), MICROBATCHES, None)
    plain, again = splits.problem_of((3, 3, 3)), splits.problem_of((3, 3, 3), (0,))

    assert again.recomputed_stages == (0,)
    assert again.seconds.sum() > plain.seconds.sum()
    order = list_schedule(plain, next(settings_for(plain)))
    assert run(again, order).peak_bytes[0] < run(plain, order).peak_bytes[0]
    assert (
        replace(again, recomputed_stages=()).schedule(order, "plain").num_rows < again.schedule(order, "again").num_rows
    )
