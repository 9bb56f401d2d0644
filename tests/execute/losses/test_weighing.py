"""A batch weighs its rows, or what `count` says of its targets, as a share of the job."""

from dataclasses import replace

from penstock.execute.batch.admission import Batch
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.control.agreement import AgreedStep, BatchWeight, Mode, StepProposal
from penstock.execute.losses.loss import LossWeights
from penstock.execute.losses.weighing import LossMaker


def loss(output, target):
    return output.sum()


def batch(sizes, weight=None, mode=Mode.TRAIN, has_target=True):
    """A batch, and the step that ranks run on it; with replicas, of a weight."""
    parts = [Microbatch(index, (), {}, target, size) for index, (size, target) in enumerate(sizes)]
    agreed = replace(AgreedStep.of([StepProposal(mode=mode)]), weight=weight)
    return Batch(parts, [[part] for part in parts], (0, 0, int(has_target))), agreed


def test_without_replicas_the_weights_are_shares_of_the_batch():
    own = LossMaker(loss, LossWeights(), None, is_last=True).of(*batch([(3, None), (1, None)]))

    assert own.shares.weights == own.auxiliary_shares.weights == [0.75, 0.25]


def test_with_replicas_they_are_shares_of_the_job_and_count_is_asked_once():
    asked = []
    maker = LossMaker(loss, LossWeights(count=lambda target: asked.append(target) or target), None, is_last=True)
    own = batch([(3, 5), (1, 7)])

    assert maker.weigh(*own) == BatchWeight(4, 12.0, 2)
    job = BatchWeight(8, 48.0, 4)
    found = maker.of(*batch([(3, 5), (1, 7)], job))

    assert asked == [5, 7]
    assert found.shares.weights == [5 / 48, 7 / 48]
    assert found.shares.counts == [[5], [7]]
    assert found.auxiliary_shares.weights == [3 / 8, 1 / 8]


def test_a_rank_without_a_last_stage_counts_nothing():
    maker = LossMaker(loss, LossWeights(count=lambda target: 1 / 0), None, is_last=False)

    assert maker.weigh(*batch([(3, None)])) == BatchWeight(3, 3, 1)
    assert maker.of(*batch([(3, None)], BatchWeight(6, 9, 2))).shares.weights == []


def test_batches_without_rows_weigh_alike_and_sums_are_not_weighed():
    job = BatchWeight(0, 0, 4)
    maker = LossMaker(loss, LossWeights(), None, is_last=True)
    maker.weigh(*batch([(0, None)] * 2))
    assert maker.of(*batch([(0, None)] * 2, job)).shares.weights == [0.25, 0.25]

    maker = LossMaker(loss, LossWeights("sum"), None, is_last=True)
    maker.weigh(*batch([(3, None)] * 2))
    job = BatchWeight(9, 9, 4)
    assert maker.of(*batch([(3, None)] * 2, job)).shares.weights == [1, 1]


def test_an_evaluation_without_a_target_has_no_loss():
    maker = LossMaker(loss, LossWeights(), None, is_last=True)

    found = maker.of(*batch([(3, None)], mode=Mode.EVALUATE, has_target=False))

    assert found.loss is None
