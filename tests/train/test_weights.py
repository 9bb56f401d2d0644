"""The weights file has the unsplit model's names and values, whatever the split."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from penstock.errors import CheckpointError
from penstock.train.weights import save_weights
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

    assert [type(error) for error in errors] == [CheckpointError] * 3
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

    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all("'1.weight' on rank 1 has type torch.complex64" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []
