"""The learning rate of each step, and which batches it adds up."""

from itertools import pairwise

import pytest

from penstock.errors import PenstockError
from penstock.train.settings.sections import OptimizerSection
from penstock.train.settings.steps import BatchPlan, decay_steps_of, learning_rate_at

OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=4, minimum_fraction=0.1)


def test_the_learning_rate_warms_up_and_follows_a_cosine_to_its_floor():
    rates = [learning_rate_at(step, OPTIONS, 10) for step in range(1, 13)]

    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[6] == pytest.approx(0.01 * (0.1 + 0.9 * 0.5))  # half-way
    assert rates[9:] == pytest.approx([0.001] * 3)
    assert all(before > after for before, after in pairwise(rates[3:10]))


@pytest.mark.parametrize(
    ("options", "num_steps", "expected"),
    [
        ({"warmup_steps": 0, "minimum_fraction": 0.0}, 4, {2: 0.5, 4: 0.0}),
        ({"warmup_steps": 4}, 4, {2: 0.5, 4: 1.0}),
        ({"warmup_steps": 4}, 2, {1: 0.25, 2: 0.5}),
    ],
    ids=["no warm-up", "no decay", "a run that is shorter than its warm-up"],
)
def test_without_warm_up_or_without_decay_the_rate_is_defined_for_steps_from_1_on(options, num_steps, expected):
    section = OptimizerSection(learning_rate=1.0, **options)

    assert {step: learning_rate_at(step, section, num_steps) for step in expected} == pytest.approx(expected)
    with pytest.raises(PenstockError, match="step 0 has no learning rate"):
        learning_rate_at(0, section, num_steps)


def rates_of(schedule, num_steps=10, **options):
    given = {"learning_rate": 0.3, "warmup_steps": 2, "minimum_fraction": 0.2} | options
    section = OptimizerSection(learning_rate_schedule=schedule, **given)
    return [learning_rate_at(step, section, num_steps) for step in range(1, num_steps + 2)]


def test_rates_stay_fall_evenly_or_only_over_the_last_steps():
    linear, wsd = rates_of("linear"), rates_of("wsd", decay_steps=4)

    assert rates_of("constant") == [0.15, *[0.3] * 10]
    assert linear == pytest.approx([0.15, 0.3, 0.27, 0.24, 0.21, 0.18, 0.15, 0.12, 0.09, 0.06, 0.06])
    assert wsd[:6] == [0.15, 0.3, 0.3, 0.3, 0.3, 0.3]
    assert wsd[6:] == pytest.approx([0.24, 0.18, 0.12, 0.06, 0.06])


def test_wsd_decays_over_a_tenth_of_the_run_unless_it_is_said():
    assert decay_steps_of(OptimizerSection(), 250) == 25
    assert decay_steps_of(OptimizerSection(), 5) == 1
    assert decay_steps_of(OptimizerSection(decay_steps=7), 250) == 7


def test_a_ramp_grows_evenly_and_leaves_no_batch_out():
    constant, plan = BatchPlan(3, 3), BatchPlan(5, 1, ramp_steps=8)

    counts = [plan.count(step) for step in range(1, 12)]

    assert (constant.is_constant, plan.is_constant) == (True, False)
    assert [(constant.begin(step), constant.count(step)) for step in (1, 2, 100)] == [(0, 3), (3, 3), (297, 3)]
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert [plan.begin(step) for step in range(1, 12)] == [sum(counts[:step]) for step in range(11)]
