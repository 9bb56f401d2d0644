"""Batches on the way to a rank's steps."""

import threading
import time

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.train.activation_checkpoints import with_checkpointing
from penstock.train.data.batches import Batch, BatchReader, Wants
from penstock.train.data.dataset import BatchOptions, TokenDataset
from penstock.train.data.sequences import Source
from penstock.train.settings.sections import OptimizerSection
from penstock.train.step import Trainer
from tests.support.local_pipelines import error_of
from tests.train.local_ranks import VOCABULARY, on_small_pipelines, small_layers

WAIT_S = 10.0


def batch_of(number):
    return Batch(torch.tensor([number]), target=torch.tensor([-number]))


def numbers_of(reader, numbers):
    return [int(reader.get(number).args[0]) for number in numbers]


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_batches_come_in_order_and_each_is_read_once(num_ahead):
    read = []
    reader = BatchReader(lambda number: read.append(number) or batch_of(number), 3, 9, num_ahead=num_ahead)

    found = []
    for first in (3, 5, 7):
        reader.begin(first, 2)
        assert [int(batch.args[0]) for batch in reader] == [first, first + 1]
        found += numbers_of(reader, [first, first + 1, first])  # a step that is not finite is run again
    reader.close()

    assert found == [3, 4, 3, 5, 6, 5, 7, 8, 7]
    assert read == [3, 4, 5, 6, 7, 8]


def test_no_more_batches_are_read_ahead_than_are_asked_for():
    read, is_read = [], threading.Semaphore(0)

    def record(number):
        read.append(number)
        is_read.release()
        return batch_of(number)

    reader = BatchReader(record, 0, 100, num_ahead=2)
    for _ in range(2):
        assert is_read.acquire(timeout=WAIT_S)
    assert read == [0, 1]
    reader.get(0)
    assert is_read.acquire(timeout=WAIT_S)
    reader.close()

    assert read == [0, 1, 2]


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_an_error_comes_with_its_batch_and_comes_again(num_ahead):
    def fail(number):
        if number == 1:
            raise ConfigError("batch 1 is damaged", key="data.files")
        return batch_of(number)

    reader = BatchReader(fail, 0, 9, num_ahead=num_ahead)

    assert numbers_of(reader, [0]) == [0]
    for _ in range(2):
        with pytest.raises(ConfigError, match="batch 1 is damaged"):
            reader.get(1)
    reader.close()


def test_a_batch_that_takes_too_long_is_named_and_does_not_block_the_end():
    go_on = threading.Event()
    reader = BatchReader(lambda number: go_on.wait(WAIT_S) and batch_of(number), 0, 9, num_ahead=1, limit_s=0.05)

    with pytest.raises(PenstockError, match=r"batch 0 was not ready after 0\.05 s"):
        reader.get(0)
    go_on.set()
    reader.close()


@pytest.mark.parametrize("num_taken", [0, 3])
def test_the_thread_ends_with_the_reader(num_taken):
    before = threading.active_count()
    reader = BatchReader(batch_of, 0, 3, num_ahead=1)
    numbers_of(reader, range(num_taken))

    reader.close()

    end_s = time.monotonic() + WAIT_S
    while threading.active_count() > before and time.monotonic() < end_s:
        time.sleep(0.001)
    assert threading.active_count() == before


OPTIONS = OptimizerSection(warmup_steps=0)


class CountedReads:
    """A data set that notes what each batch was read for."""

    def __init__(self):
        tokens = torch.arange(2000).numpy() % VOCABULARY
        self.dataset = TokenDataset([Source(tokens, length=8)], BatchOptions(8, 8), vocabulary=VOCABULARY)
        self.wants = []

    def batch(self, number, wants):
        self.wants.append((wants.inputs, wants.target))
        return self.dataset.batch(number, wants)


def train_counted(num_ranks, schedule, wants_of):
    def case(pipeline):
        wants = wants_of(pipeline)
        dataset, trainer = CountedReads(), Trainer(pipeline, OPTIONS, num_steps=3)
        losses = [trainer.step(step, [dataset.batch(step, wants)]).loss for step in range(1, 4)]
        weights = {name: value.clone() for name, value in pipeline.state_dict().items()}
        return dataset.wants, losses, weights

    return on_small_pipelines(num_ranks, case, schedule=schedule)


@pytest.mark.feature("G1")
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", [(True, False), (False, False), (False, True)]),
        ("zbv", [(True, True), (False, False), (False, False)]),
        ("dualpipe", [(True, True), (True, True)]),  # a route begins and ends on both
    ],
)
def test_only_ranks_that_take_inputs_or_targets_read_them_and_no_bit_changes(schedule, expected):
    found = train_counted(len(expected), schedule, Wants.of)
    whole = train_counted(len(expected), schedule, lambda pipeline: Wants())

    assert [wants for wants, _, _ in found] == [[each] * 3 for each in expected]
    for (_, losses, weights), (_, other_losses, other_weights) in zip(found, whole, strict=True):
        assert losses == other_losses
        assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)


def train_packed(num_ranks, checkpointing="none", **options):
    def case(pipeline):
        tokens = torch.arange(2000).numpy() ** 2 % VOCABULARY
        source = Source(tokens, length=8, document_ends=np.cumsum([1, 2, 3, 5, 7, 11] * 60))
        dataset = TokenDataset([source], BatchOptions(8, 8, packing="documents"), vocabulary=VOCABULARY)
        trainer, wants = Trainer(pipeline, OPTIONS, num_steps=3), Wants.of(pipeline)
        losses = [trainer.step(step, [dataset.batch(step, wants)]).loss for step in range(1, 4)]
        return [*losses, trainer.evaluate([dataset.batch(9, wants)])]

    layers = with_checkpointing(small_layers("float64", takes_positions=True), [checkpointing] * 7)
    return on_small_pipelines(num_ranks, case, layers, **options)


@pytest.mark.parametrize(
    ("num_ranks", "options", "checkpointing", "tolerance"),
    [
        (3, {"schedule": "zbv"}, "none", 0),
        (2, {"schedule": "1f1b", "recompute": True}, "selective", 0),
        (2, {"schedule": "seq1f1b", "slices": 4}, "none", 1e-12),  # documents go on in the next slice
    ],
)
def test_packed_documents_train_the_same_on_any_layout(num_ranks, options, checkpointing, tolerance):
    [expected] = train_packed(1, schedule="gpipe")

    for losses in train_packed(num_ranks, checkpointing, **options):
        assert losses == pytest.approx(expected, rel=tolerance, abs=0)


class Missing:
    """The batches of a step that one rank cannot read."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 1

    def __getitem__(self, index):
        if self.rank == 1:
            raise ConfigError("a.py:3: ValueError: no more", key="data.source")
        return Batch(torch.zeros(8, 8, dtype=torch.int64))


def test_a_rank_that_cannot_read_its_batch_ends_the_step_on_all_ranks_with_its_words():
    def case(pipeline):
        trainer = Trainer(pipeline, OPTIONS, num_steps=3)
        return str(error_of(trainer.step, 1, Missing(pipeline.transport.rank)))

    errors = on_small_pipelines(2, case)

    assert all("a.py:3: ValueError: no more" in error for error in errors)
