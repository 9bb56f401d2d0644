"""Targets that cross entropy leaves out, and which losses are known to."""

from functools import partial
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.execute.losses.chunked import chunked_cross_entropy
from penstock.execute.losses.ignored import CountedTargets, count_ignored, counted_targets, uneven_targets

CLASSES = torch.tensor([[1, -100, 2], [-100, 0, -100]])


class Own(nn.CrossEntropyLoss):
    pass


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100),
        (nn.CrossEntropyLoss(), -100),
        (nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1), 7),
        (partial(F.cross_entropy, ignore_index=0), 0),
        (partial(partial(F.cross_entropy, ignore_index=0), ignore_index=3), 3),
        (partial(nn.CrossEntropyLoss(ignore_index=5)), 5),
        (partial(F.cross_entropy, reduction="sum"), None),
        (partial(F.cross_entropy, size_average=True), None),
        (partial(F.cross_entropy, torch.zeros(2, 3)), None),
        (nn.CrossEntropyLoss(weight=torch.ones(3), ignore_index=4), 4),
        (nn.CrossEntropyLoss(reduction="none"), None),
        (F.nll_loss, -100),
        (nn.NLLLoss(ignore_index=3), 3),
        (nn.NLLLoss(reduction="sum"), None),
        (chunked_cross_entropy, -100),
        (partial(chunked_cross_entropy, chunk=3, shift=False), -100),
        (partial(chunked_cross_entropy, shift=True), None),
        (Own(), None),
        (F.mse_loss, None),
        (lambda output, target: F.cross_entropy(output, target), None),
        (None, None),
    ],
)
def test_torchs_own_means_of_cross_entropy_are_known(loss, ignored):
    counted = counted_targets(loss)

    assert (None if counted is None else counted.ignored) == ignored


WEIGHTS, BYTES = torch.tensor([1.0, 0.5, 0.25]), torch.tensor([1, 255, 156], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("counted", "target", "share"),
    [
        (CountedTargets(-100), CLASSES, 3),
        (CountedTargets(2), CLASSES, 5),
        (CountedTargets(-100), CLASSES.clamp(min=0), 6),
        (CountedTargets(-100), CLASSES[:0], 0),
        (CountedTargets(255), BYTES, 2),
        (CountedTargets(-100), BYTES, 3),
        (CountedTargets(156), BYTES, 2),
        (CountedTargets(-100, WEIGHTS), CLASSES, 0.5 + 0.25 + 1.0),
        (CountedTargets(0, WEIGHTS), torch.tensor([1, 0, 2, 0]), 0.5 + 0.25),
        (CountedTargets(-100, torch.ones(2)), torch.tensor([0, 9, -3]), 3),  # the loss refuses 9
        *((CountedTargets(-100), target, 7) for target in (CLASSES.double(), None, {"classes": CLASSES})),
    ],
)
def test_a_part_of_a_batch_weighs_the_targets_that_are_not_ignored_or_else_its_size(counted, target, share):
    assert counted.share(target, 7) == share


def test_the_order_of_targets_changes_no_share_of_a_stream():
    weights = torch.tensor([0.1, 0.7, 0.2, 1.1, 1e-9, 0.3], dtype=torch.float64)
    counted = counted_targets(nn.CrossEntropyLoss(weight=weights))
    orders = [torch.tensor(order) for order in permutations(range(6))]

    assert len({counted.share(target, 1.0) for target in orders}) > 1
    assert len({tuple(counted.streamed_shares(target)) for target in orders}) == 1


def test_microbatches_with_other_shares_of_ignored_targets_are_found_in_trees_of_any_length():
    even, odd = {"ids": CLASSES, "boxes": torch.zeros(2)}, {"ids": CLASSES[:1], "boxes": torch.zeros(1)}

    assert uneven_targets([even, even, odd]) == (0, 2)
    assert uneven_targets([even, {"ids": CLASSES.repeat(2, 1), "boxes": torch.zeros(4)}]) is None
    assert uneven_targets([None, None]) is None
    assert (count_ignored(even), count_ignored(odd), count_ignored(None)) == (3, 1, 0)
