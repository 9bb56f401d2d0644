"""Targets that cross entropy leaves out, and which losses are known to."""

from functools import partial
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
        (Own(), None),
        (F.mse_loss, None),
        (lambda output, target: F.cross_entropy(output, target), None),
        (None, None),
    ],
)
def test_torchs_own_means_of_cross_entropy_are_known(loss, ignored):
    counted = counted_targets(loss)

    assert (None if counted is None else counted.ignored) == ignored


def test_a_part_of_a_batch_weighs_the_targets_that_are_not_ignored():
    assert CountedTargets(-100).share(CLASSES, 2) == 3
    assert CountedTargets(2).share(CLASSES, 2) == 5
    assert CountedTargets(-100).share(CLASSES.clamp(min=0), 2) == 6
    assert CountedTargets(-100).share(CLASSES[:0], 2) == 0


@pytest.mark.parametrize(("ignored", "num_counted"), [(255, 2), (-100, 3), (156, 2)])
def test_classes_of_eight_bits_count_too(ignored, num_counted):
    assert CountedTargets(ignored).share(torch.tensor([1, 255, 156], dtype=torch.uint8), 7) == num_counted


@pytest.mark.parametrize(
    ("ignored", "weight"), [(-100, 0.5 + 0.25 + 1.0), (0, 0.5 + 0.25)], ids=["none of them", "class 0"]
)
def test_targets_of_classes_with_weights_count_as_much_as_these(ignored, weight):
    class_weights = torch.tensor([1.0, 0.5, 0.25])
    target = CLASSES if ignored == -100 else torch.tensor([1, 0, 2, 0])

    assert CountedTargets(ignored, class_weights).share(target, 7) == weight


def test_the_order_of_targets_changes_no_share_of_a_stream():
    weights = torch.tensor([0.1, 0.7, 0.2, 1.1, 1e-9, 0.3], dtype=torch.float64)
    counted = counted_targets(nn.CrossEntropyLoss(weight=weights))
    orders = [torch.tensor(order) for order in permutations(range(6))]

    assert len({counted.share(target, 1.0) for target in orders}) > 1
    assert len({tuple(counted.streamed_shares(target)) for target in orders}) == 1


def test_a_class_that_does_not_exist_is_left_to_the_loss():
    assert CountedTargets(-100, torch.ones(2)).share(torch.tensor([0, 9, -3]), 7) == 3


@pytest.mark.parametrize("target", [CLASSES.double(), None, {"classes": CLASSES}])
def test_the_size_stays_where_there_are_no_classes(target):
    assert CountedTargets(-100).share(target, 7) == 7


def test_microbatches_with_other_shares_of_ignored_targets_are_found_in_trees_of_any_length():
    even, odd = {"ids": CLASSES, "boxes": torch.zeros(2)}, {"ids": CLASSES[:1], "boxes": torch.zeros(1)}

    assert uneven_targets([even, even, odd]) == (0, 2)
    assert uneven_targets([even, {"ids": CLASSES.repeat(2, 1), "boxes": torch.zeros(4)}]) is None
    assert uneven_targets([None, None]) is None
    assert (count_ignored(even), count_ignored(odd), count_ignored(None)) == (3, 1, 0)
