"""The losses of a step are noted apart from those of other steps, and weighted and scaled where backwards begin."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from penstock.execute.batch.local_batch import Batch
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.control.agreement import AgreedStep, BatchWeight, Mode, StepProposal
from penstock.execute.losses.loss import LossShares, LossWeights
from penstock.execute.losses.output import LossName
from penstock.execute.losses.step_losses import LossMaker, StepLosses

NAME = LossName("balance", True, torch.float32)


def empty(**options):
    return StepLosses(1, 1, **options)


def test_losses_of_one_name_and_place_are_added_up_without_their_graph_and_forgotten_with_the_rules_kept():
    losses = empty(scale=lambda loss: loss * 8.0)
    losses.computed[0, 0] = torch.tensor(1.0)

    for value in (1.0, 2.0):
        losses.note(NAME, (1, 0), torch.tensor(value, requires_grad=True))
    again = losses.forgetting()
    again.note(NAME, (0, 0), torch.tensor(1.0))

    assert losses.named_losses == {NAME: {(1, 0): torch.tensor(3.0, dtype=torch.float64)}}
    assert not losses.named_losses[NAME][1, 0].requires_grad
    assert again.computed == {}
    assert again.root_of(torch.tensor(3.0), 0.5) == 12.0


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss"])
def test_what_a_step_keeps_of_a_loss_is_as_large_as_the_loss(name):
    """Some of torch's means lie in the memory of what they are the mean of."""
    losses = empty(loss=getattr(functional, name), shares=LossShares([1.0], [[1.0]]))

    losses.compute((0, 0), torch.ones(64, 64, requires_grad=True), torch.zeros(64, 64), is_training=True)

    kept = losses.computed[0, 0]
    assert not kept.requires_grad
    assert kept.untyped_storage().nbytes() == kept.nbytes


def test_a_loss_that_goes_on_changing_stays_as_it_was_returned_or_noted():
    value, named = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    losses = empty(loss=lambda output, target: value.add_(1), shares=LossShares([1.0, 1.0], [[1.0], [1.0]]))

    for index in range(2):
        losses.compute((index, 0), torch.ones(1), None, is_training=False)
        losses.note(NAME, (index, 0), named.add_(1))

    for found in (losses.computed, losses.named_losses[NAME]):
        assert [loss.item() for loss in found.values()] == [1, 2]


# ---- computing a loss

PLACE = (1, 0)


def losses_of(loss, weight=0.25, **options):
    shares = LossShares([1 - weight, weight], [[1.0], [1.0]], options.pop("counts", None))
    return StepLosses(2, 1, loss, shares, **options)


def compute(losses, output, target=None, *, is_training=True):
    return losses.compute(PLACE, output, target, is_training=is_training)


def test_a_backward_begins_at_the_weighted_loss_and_the_loss_is_noted_unweighted():
    output = torch.tensor(3.0, requires_grad=True)
    losses = losses_of(lambda output, target: output * target)

    root = compute(losses, output, 2.0)
    root.backward()

    assert root.item() == 1.5
    assert float(output.grad) == 0.5
    assert float(losses.computed[PLACE]) == 6.0
    assert not losses.computed[PLACE].requires_grad


def test_in_evaluation_nothing_begins_and_nothing_is_scaled_and_without_a_loss_function_there_is_none():
    calls = []
    losses = losses_of(lambda output, target: output, scale=lambda loss: calls.append(loss))

    assert compute(losses, torch.tensor(3.0), is_training=False) is None
    assert float(losses.computed[PLACE]) == 3.0
    assert calls == []
    without = losses_of(None)
    assert compute(without, torch.tensor(3.0, requires_grad=True)) is None
    assert without.computed == {}


def total(output, target):
    return output.sum()


def batch(sizes, weight=None, mode=Mode.TRAIN, has_target=True):
    """A batch, and the step that ranks run on it; with replicas, of a weight."""
    parts = [Microbatch(index, (), {}, target, size) for index, (size, target) in enumerate(sizes)]
    agreed = replace(AgreedStep.of([StepProposal(mode=mode)]), weight=weight)
    return Batch(parts, [[part] for part in parts], (0, 0, int(has_target))), agreed


def test_weights_are_shares_of_the_batch_or_with_replicas_of_the_job_and_count_is_asked_once():
    asked = []
    maker = LossMaker(total, LossWeights(count=lambda target: asked.append(target) or target), None, is_last=True)
    own = batch([(3, 5), (1, 7)])

    assert maker.weigh(*own) == BatchWeight(4, 12.0, 2)
    job = BatchWeight(8, 48.0, 4)
    found = maker.of(*batch([(3, 5), (1, 7)], job))

    alone = LossMaker(total, LossWeights(), None, is_last=True).of(*batch([(3, None), (1, None)]))
    assert alone.shares.weights == alone.auxiliary_shares.weights == [0.75, 0.25]
    assert asked == [5, 7]
    assert found.shares.weights == [5 / 48, 7 / 48]
    assert found.shares.counts == [[5], [7]]
    assert found.auxiliary_shares.weights == [3 / 8, 1 / 8]


def test_a_rank_without_a_last_stage_counts_nothing_and_an_evaluation_without_a_target_has_no_loss():
    maker = LossMaker(total, LossWeights(count=lambda target: 1 / 0), None, is_last=False)

    assert maker.weigh(*batch([(3, None)])) == BatchWeight(3, 3, 1)
    assert maker.of(*batch([(3, None)], BatchWeight(6, 9, 2))).shares.weights == []
    own = LossMaker(total, LossWeights(), None, is_last=True)
    assert own.of(*batch([(3, None)], mode=Mode.EVALUATE, has_target=False)).loss is None


def test_batches_without_rows_weigh_alike_and_sums_are_not_weighed():
    job = BatchWeight(0, 0, 4)
    maker = LossMaker(total, LossWeights(), None, is_last=True)
    maker.weigh(*batch([(0, None)] * 2))
    assert maker.of(*batch([(0, None)] * 2, job)).shares.weights == [0.25, 0.25]

    maker = LossMaker(total, LossWeights("sum"), None, is_last=True)
    maker.weigh(*batch([(3, None)] * 2))
    job = BatchWeight(9, 9, 4)
    assert maker.of(*batch([(3, None)] * 2, job)).shares.weights == [1, 1]
