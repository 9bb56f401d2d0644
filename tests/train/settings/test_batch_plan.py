"""Which batches each optimizer step adds up."""

from penstock.train.settings.batch_plan import BatchPlan


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
