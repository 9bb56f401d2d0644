"""A batch of DeepSpeed's engine is pulled item by item, as far as its losses allow it, and each item once."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.moving.deepspeed import PipelineModule, initialize
from tests.acceptance.steps.test_streamed_steps import noted
from tests.moving.test_deepspeed import check, data, halving, on_engines, one_process, parameters_of, sgd
from tests.support.local_pipelines import VOCABULARY, WIDTH, block, error_of, square_loss, values


class Noting(nn.Module):
    """A layer that notes when it runs."""

    def __init__(self, log):
        super().__init__()
        self.inner = block(0)
        self._log = log

    def forward(self, features):
        self._log.append("F")
        return self.inner(features)


def pairs(num_items, rows=2, labels=None):
    return [
        (values(index, rows, WIDTH), values(9 + index, rows, WIDTH) if labels is None else labels)
        for index in range(num_items)
    ]


def log_of(loss_fn, items, **options):
    """What one rank does for a batch of three items, and how many items it leaves."""
    log = []
    engine = initialize(PipelineModule([Noting(log)], loss_fn=loss_fn), gradient_accumulation_steps=3, **options)
    iterator = noted(log, items)
    engine.train_batch(iterator)
    return log, len(list(iterator))


LAZY = ["pull 0", "F", "pull 1", "F", "pull 2", "F"]
WHOLE = ["pull 0", "pull 1", "pull 2", "F", "F", "F"]


@pytest.mark.feature("G2")
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}])
def test_the_first_forward_starts_before_the_second_item_is_pulled_and_none_of_the_next_batch(options):
    log, num_left = log_of(square_loss, pairs(5), **options)

    assert log[:6] == LAZY
    assert num_left == 2


@pytest.mark.feature("G2")
@pytest.mark.parametrize(
    ("loss_fn", "labels", "options"),
    [
        (square_loss, None, {"count": len}),
        (nn.CrossEntropyLoss(), torch.tensor([1, -100]), {}),
        (nn.functional.cross_entropy, torch.tensor([1, -100]), {}),
    ],
)
def test_where_losses_are_weighed_by_their_labels_all_are_pulled_before_the_first_backward(loss_fn, labels, options):
    log, num_left = log_of(loss_fn, pairs(5, labels=labels), **options)

    assert log[:6] == WHOLE
    assert num_left == 2


def test_items_of_unequal_rows_are_refused_unless_their_rows_are_counted():
    items = [*pairs(2), *pairs(1, rows=1)]

    error = error_of(log_of, square_loss, items)
    assert isinstance(error, PipelineError)
    assert "microbatch 2 of the stream is args[0] float32[1, 6], target float32[1, 6], microbatch 0" in str(error)
    assert log_of(square_loss, items, count=len)[1] == 0


@pytest.mark.parametrize("ends_with", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_behind_a_batch_that_failed_all_ranks_go_on_with_the_same_items(schedule, ends_with):
    failing = data(4)
    failing[1] = failing[1][0], failing[1][1] + VOCABULARY

    def case(engine):
        items = iter([*failing, *data(8), *failing, *data(4)])
        error = error_of(engine.train_batch, items)
        losses = [engine.train_batch(items) for _ in range(2)]
        found = losses, parameters_of(engine), None
        again = error_of(engine.train_batch, items)
        getattr(engine, ends_with)(items)
        return found, error, again, list(items)

    outcomes = on_engines(2, case, optimizer=sgd, lr_scheduler=halving, schedule=schedule)

    for _, error, again, left in outcomes:
        assert isinstance(error, PipelineError)
        assert isinstance(again, PipelineError)
        assert left == []
    check([found for found, *_ in outcomes], one_process())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_an_evaluation_of_other_data_does_not_hide_what_a_batch_that_failed_has_left(schedule):
    failing = data(4)
    failing[1] = failing[1][0], failing[1][1] + VOCABULARY

    def case(engine):
        items = iter([*failing, *data(8)])
        error_of(engine.train_batch, items)
        engine.eval_batch(iter(data(4)))
        losses = [engine.train_batch(items) for _ in range(2)]
        return losses, parameters_of(engine), None

    check(on_engines(2, case, optimizer=sgd, lr_scheduler=halving, schedule=schedule), one_process())
