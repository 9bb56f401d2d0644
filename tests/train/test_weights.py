"""The weights file has the unsplit model's names and values, whatever the split."""

import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from penstock.errors import NotSaved, PipelineError
from penstock.files import atomic_file
from penstock.train import weights
from penstock.train.weights import save_weights
from tests.ranks import run_ranks, run_ranks_with_deaths
from tests.train.local_ranks import error_of, on_ranks, random_batch, small_layers, small_pipeline


class Mixed(nn.Module):
    """Parameters and buffers of several types, one of them empty and one without dimensions."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.full((1, 2), 0.25, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("forgotten", torch.ones(2), persistent=False)

    def forward(self, x):
        return x


def save(transport, path, layers, **options):
    pipeline = small_pipeline(transport, layers, **options)
    save_weights(path, pipeline)
    pipeline.close()
    return dict(pipeline.named_parameters())


def test_the_file_has_every_parameter_of_every_rank_under_its_name(tmp_path):
    parameters = on_ranks(3, save, tmp_path / "weights.safetensors", small_layers())

    loaded = load_file(tmp_path / "weights.safetensors")
    expected = {name: parameter for own in parameters for name, parameter in own.items()}
    assert loaded.keys() == expected.keys()
    assert {"embedding.weight", "blocks.3.attention.query.weight", "norm.weight", "head.weight"} < loaded.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_split_does_not_change_a_byte_of_the_file(tmp_path):
    for num_ranks in (1, 2, 4):
        on_ranks(num_ranks, save, tmp_path / str(num_ranks), small_layers("bfloat16"))

    contents = {(tmp_path / str(num_ranks)).read_bytes() for num_ranks in (1, 2, 4)}
    assert len(contents) == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tied_weight_is_saved_once_under_its_first_name(tmp_path, num_ranks):
    on_ranks(num_ranks, save, tmp_path / "weights", small_layers(tied_head=True))

    names = load_file(tmp_path / "weights").keys()
    assert "embedding.weight" in names
    assert "head.weight" not in names


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_types_shapes_and_saved_buffers_come_back(tmp_path, num_ranks):
    on_ranks(num_ranks, save, tmp_path / "weights", [nn.Identity(), Mixed()])

    loaded = load_file(tmp_path / "weights")
    expected = {f"1.{name}": value for name, value in Mixed().state_dict().items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert all(loaded[name].dtype == expected[name].dtype for name in expected)


def test_the_file_says_who_wrote_it(tmp_path):
    on_ranks(1, save, tmp_path / "weights", [nn.Linear(2, 2)])

    with safe_open(tmp_path / "weights", "pt") as file:
        assert file.metadata().keys() == {"format", "penstock"}


def save_twice(transport, bad_path, good_path):
    pipeline = small_pipeline(transport)
    error = error_of(save_weights, bad_path, pipeline)
    tokens, target = random_batch(0)
    pipeline.step(tokens, target=target)
    save_weights(good_path, pipeline)
    pipeline.close()
    return error


def test_a_failed_save_is_raised_on_every_rank_and_the_pipeline_goes_on(tmp_path):
    errors = on_ranks(3, save_twice, tmp_path / "missing" / "weights", tmp_path / "weights")

    assert [type(error) for error in errors] == [NotSaved] * 3
    assert all("missing/weights: cannot be written: No such file" in str(error) for error in errors)
    assert len(load_file(tmp_path / "weights")) > 0


def fail_to_save(transport, path):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)]
    pipeline = small_pipeline(transport, layers)
    error = error_of(save_weights, path, pipeline)
    pipeline.close()
    return error


def test_a_type_that_the_format_lacks_is_refused_on_every_rank(tmp_path):
    errors = on_ranks(2, fail_to_save, tmp_path / "weights")

    assert all(isinstance(error, NotSaved) for error in errors)
    assert all("'1.weight' on rank 1 has type torch.complex64" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


class SlowFile:
    """A file on a disk that needs a while for every piece, and longer for the first one."""

    def __init__(self, file, first_s):
        self.file = file
        self.pause_s = first_s

    def write(self, content):
        time.sleep(self.pause_s)
        self.pause_s = 0.08
        return self.file.write(content)

    def __getattr__(self, name):
        return getattr(self.file, name)


def slow_disk(first_s):
    @contextmanager
    def opened(path):
        with atomic_file(path) as file:
            yield SlowFile(file, first_s)

    return opened


def save_slowly(rank, path, dying_rank=None):
    """Save on a disk that is slower than the deadline, also with its first piece; one rank may die meanwhile."""
    weights.atomic_file = slow_disk(2.5)
    pipeline = small_pipeline(None, deadline_s=30.0)
    pipeline.transport.deadline_s = 1.0
    begin_s = time.monotonic()
    if rank == dying_rank:
        threading.Timer(1.2, os._exit, [7]).start()
    error = None
    try:
        save_weights(path, pipeline)
        pipeline.transport.deadline_s = 30.0
        tokens, target = random_batch(0)
        pipeline.step(tokens, target=target)
    except PipelineError as caught:
        error = caught
        pipeline.close()
    return time.monotonic() - begin_s, type(error).__name__, str(error)


@pytest.mark.slow
def test_a_disk_slower_than_the_deadline_loses_no_weights(tmp_path):
    results = run_ranks(2, save_slowly, tmp_path / "weights")
    on_ranks(2, save, tmp_path / "quickly", small_layers())

    assert [result[1] for result in results] == ["NoneType"] * 2, results
    assert min(result[0] for result in results) > 2.5, "the disk was to take longer than the deadline"
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "quickly").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_while_a_slow_disk_is_written_ends_the_saving(tmp_path, dying_rank):
    outcome = run_ranks_with_deaths(2, save_slowly, tmp_path / "weights", dying_rank)

    [(duration_s, name, message)] = outcome.results.values()
    assert outcome.exit_codes == {dying_rank: 7}
    assert name in ("PeerLost", "DeadlineExceeded")
    assert f"rank {dying_rank}" in message
    assert duration_s < 1.2 + 1.0 + 5.0
    assert not (tmp_path / "weights").exists()


def test_a_disk_that_takes_nothing_for_too_long_is_an_error_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "STALLED_AFTER_S", 0.2)
    monkeypatch.setattr(weights, "atomic_file", slow_disk(0.6))

    errors = on_ranks(2, fail_slowly, tmp_path / "weights")

    assert [type(error) for error in errors] == [NotSaved] * 2
    assert all("weights: cannot be written: the disk took no data for 0.2 s" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def fail_slowly(transport, path):
    pipeline = small_pipeline(transport)
    error = error_of(save_weights, path, pipeline)
    pipeline.close()
    return error


def test_large_tensors_are_written_in_pieces(tmp_path, monkeypatch):
    on_ranks(2, save, tmp_path / "whole", small_layers())
    monkeypatch.setattr(weights, "PIECE_BYTES", 100)

    on_ranks(2, save, tmp_path / "pieces", small_layers())

    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
