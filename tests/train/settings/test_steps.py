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


def test_without_warm_up_or_without_decay_the_rate_is_defined():
    no_warmup = OptimizerSection(learning_rate=1.0, warmup_steps=0, minimum_fraction=0.0)
    no_decay = OptimizerSection(learning_rate=1.0, warmup_steps=4)

    assert [learning_rate_at(step, no_warmup, 4) for step in (2, 4)] == pytest.approx([0.5, 0.0])
    assert [learning_rate_at(step, no_decay, 4) for step in (2, 4)] == pytest.approx([0.5, 1.0])


def test_a_run_that_is_shorter_than_its_warm_up_ends_on_the_way():
    short = OptimizerSection(learning_rate=1.0, warmup_steps=4)

    assert [learning_rate_at(step, short, 2) for step in (1, 2)] == pytest.approx([0.25, 0.5])


def test_steps_are_counted_from_1():
    with pytest.raises(PenstockError, match="step 0 has no learning rate"):
        learning_rate_at(0, OPTIONS, 10)


def rates_of(schedule, num_steps=10, **options):
    given = {"learning_rate": 0.3, "warmup_steps": 2, "minimum_fraction": 0.2} | options
    section = OptimizerSection(learning_rate_schedule=schedule, **given)
    return [learning_rate_at(step, section, num_steps) for step in range(1, num_steps + 2)]


def test_a_constant_rate_is_the_largest_one_after_the_warm_up():
    assert rates_of("constant") == [0.15, *[0.3] * 10]


def test_a_linear_rate_falls_evenly_to_the_floor_and_stays_there():
    rates = rates_of("linear")

    assert rates[1] == 0.3
    assert rates[9] == rates[10] == pytest.approx(0.06)
    assert [after - before for before, after in pairwise(rates[1:10])] == pytest.approx([-0.03] * 8)


def test_wsd_warms_up_stays_and_decays_over_the_last_steps():
    rates = rates_of("wsd", decay_steps=4)

    assert rates[:6] == [0.15, 0.3, 0.3, 0.3, 0.3, 0.3]
    assert rates[6:] == pytest.approx([0.24, 0.18, 0.12, 0.06, 0.06])


def test_wsd_decays_over_a_tenth_of_the_run_unless_it_is_said():
    assert decay_steps_of(OptimizerSection(), 250) == 25
    assert decay_steps_of(OptimizerSection(), 5) == 1
    assert decay_steps_of(OptimizerSection(decay_steps=7), 250) == 7


def test_without_a_ramp_every_step_has_as_many_batches():
    plan = BatchPlan(3, 3)

    assert plan.is_constant
    assert [(plan.begin(step), plan.count(step)) for step in (1, 2, 100)] == [(0, 3), (3, 3), (297, 3)]


def test_a_ramp_grows_evenly_and_leaves_no_batch_out():
    plan = BatchPlan(5, 1, ramp_steps=8)

    counts = [plan.count(step) for step in range(1, 12)]

    assert not plan.is_constant
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert [plan.begin(step) for step in range(1, 12)] == [sum(counts[:step]) for step in range(11)]
