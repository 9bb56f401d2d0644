"""The files of weights have the unsplit model's names and values, whatever the split."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from penstock.checkpoints import weight_files
from penstock.checkpoints.pretrained import files_of, find_weights
from penstock.checkpoints.shards import write_tensors
from penstock.checkpoints.weight_files import INDEX, WHOLE, require_saveable, save_tensors, save_weights
from penstock.checkpoints.weight_format import PLAIN, ConversionUnit, WeightFormat
from penstock.errors import NotSaved
from tests.checkpoints.written_files import all_tensors, fill_disk_at_rename, names, note_writers
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.local_ranks import on_small_pipelines, random_batch, small_layers, small_pipeline


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


def save(transport, folder, layers=None, **options):
    folder.mkdir(exist_ok=True)
    pipeline = small_pipeline(transport, layers, **options)
    save_weights(folder, pipeline)
    pipeline.close()
    return dict(pipeline.named_parameters())


def refused(folder, layers=None, format=PLAIN):
    """Return what each of two ranks is told where nothing can be saved."""
    errors = on_small_pipelines(2, lambda pipeline: error_of(save_weights, folder, pipeline, format), layers)
    assert [type(error) for error in errors] == [NotSaved] * 2
    return [str(error) for error in errors]


@pytest.fixture
def small_files(monkeypatch):
    """A file takes 3000 bytes, so that the small model needs several."""
    monkeypatch.setattr(weight_files, "FILE_BYTES", 3000)


@pytest.mark.feature("X36")
def test_the_file_has_every_parameter_of_every_rank_under_its_name_and_the_split_changes_no_byte(tmp_path):
    for num_ranks in (1, 2, 4):
        parameters = on_ranks(num_ranks, save, tmp_path / str(num_ranks), small_layers("bfloat16"))

    loaded = load_file(tmp_path / "4" / WHOLE)
    expected = {name: parameter for own in parameters for name, parameter in own.items()}
    assert names(tmp_path / "4") == [WHOLE]
    assert loaded.keys() == expected.keys()
    assert {"embedding.weight", "blocks.3.attention.query.weight", "norm.weight", "head.weight"} < loaded.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert len({(tmp_path / str(num_ranks) / WHOLE).read_bytes() for num_ranks in (1, 2, 4)}) == 1


@pytest.mark.feature("X50")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_weights_beyond_the_size_of_a_file_become_an_index_with_shards(tmp_path, small_files, num_ranks):
    parameters = on_ranks(num_ranks, save, tmp_path)

    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert names(tmp_path) == [*files, INDEX]
    assert files == [f"weights-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    assert len(files) > num_ranks
    expected = {name: parameter for own in parameters for name, parameter in own.items()}
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in expected.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], expected[name])
    sizes = [sum(tensor.nbytes for tensor in load_file(tmp_path / file).values()) for file in files]
    assert max(sizes) <= 3000


def test_a_rank_writes_its_own_tensors_and_reads_no_others(tmp_path, small_files, monkeypatch):
    written = note_writers(monkeypatch)
    monkeypatch.delattr(weight_files, "read_tensors")
    parameters = on_ranks(2, save, tmp_path)

    assert sorted(map(sorted, written.values())) == sorted(sorted(own) for own in parameters)


def test_the_files_of_an_earlier_run_with_another_form_are_removed(tmp_path, monkeypatch):
    for size in (10**9, 3000, 1000, 10**9):
        monkeypatch.setattr(weight_files, "FILE_BYTES", size)
        on_ranks(2, save, tmp_path)

        kept = {WHOLE} if size == 10**9 else {INDEX, *json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}
        assert set(names(tmp_path)) == kept
        assert len(files_of(find_weights(tmp_path))) == len(all_tensors(tmp_path))


def test_a_crash_amid_the_renames_leaves_no_mixture_that_counts(tmp_path, small_files, monkeypatch):
    on_ranks(2, save, tmp_path)
    fill_disk_at_rename(monkeypatch, 3)

    assert "No space left on device. Free some space" in refused(tmp_path)[1]
    assert not (tmp_path / INDEX).exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_types_shapes_and_saved_buffers_come_back(tmp_path, num_ranks):
    on_ranks(num_ranks, save, tmp_path, [nn.Identity(), Mixed()])

    loaded = load_file(tmp_path / WHOLE)
    expected = {f"1.{name}": value for name, value in Mixed().state_dict().items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert all(loaded[name].dtype == expected[name].dtype for name in expected)
    with safe_open(tmp_path / WHOLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # so that others know that torch reads it


class Turned(WeightFormat):
    """Saves matrices as others have them: turned, and named so."""

    stem = "turned"

    def units(self, tensors):
        return [
            ConversionUnit(names=[name], file_types={f"{name}.t": (dtype, shape[::-1])})
            for name, (dtype, shape) in tensors.items()
        ]

    def convert(self, tensors):
        return {f"{name}.t": tensor.T for name, tensor in tensors.items()}

    def write_further(self, folder, file_types):
        folder.mkdir()
        (folder / "notes.txt").write_text(", ".join(file_types))


@pytest.mark.parametrize("num_bytes", [10**9, 30])
def test_a_format_names_files_and_tensors_and_adds_files(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr(weight_files, "FILE_BYTES", num_bytes)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, 1)}
    entries = {name: ("F32", list(tensor.shape)) for name, tensor in tensors.items()}

    save_tensors(tmp_path, entries, lambda names: {name: tensors[name] for name in names}, Turned())

    found = all_tensors(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        f"{name}.t": tensor.T.tolist() for name, tensor in tensors.items()
    }
    files = {"turned.safetensors"} if num_bytes == 10**9 else {path.name for path in tmp_path.glob("turned-*-of-*")}
    files |= set() if num_bytes == 10**9 else {"turned.safetensors.index.json"}
    assert set(names(tmp_path)) == {*files, "notes.txt"}
    assert (tmp_path / "notes.txt").read_text() == "a.t, b.t"


def test_a_failed_save_is_raised_on_every_rank_and_the_pipeline_goes_on(tmp_path):
    def save_twice(pipeline):
        error = error_of(save_weights, tmp_path / "missing", pipeline)
        tokens, target = random_batch(0)
        pipeline.step(tokens, target=target)
        save_weights(tmp_path, pipeline)
        return error

    errors = on_small_pipelines(3, save_twice)

    assert [type(error) for error in errors] == [NotSaved] * 3
    assert all("missing/weights.safetensors: cannot be written: No such file" in str(error) for error in errors)
    assert names(tmp_path) == [WHOLE]


def test_a_file_that_rank_0_does_not_see_is_refused(tmp_path, monkeypatch):
    """As on a host that has a disk of its own under the same path."""

    def elsewhere(path, tensors):
        write_tensors(path.with_name("other") if "00002" in path.name else path, tensors)

    monkeypatch.setattr(weight_files, "write_tensors", elsewhere)
    told = refused(tmp_path)

    assert "rank 0 does not see it; choose a folder on a file system that all hosts share" in told[1]
    assert names(tmp_path) == ["other"]


def test_what_cannot_be_saved_is_found_before_a_step_runs_and_the_size_is_known(tmp_path):
    def error(pipeline):
        return error_of(require_saveable, pipeline)

    on_ranks(2, save, tmp_path)
    num_bytes = sum(tensor.nbytes for tensor in all_tensors(tmp_path).values())
    assert on_small_pipelines(2, require_saveable) == [num_bytes] * 2
    errors = on_small_pipelines(2, error, [nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)])
    assert [type(error) for error in errors] == [NotSaved] * 2
    assert all("'1.weight' is a Tensor of type torch.complex64" in str(error) for error in errors)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_tied_weight_is_saved_once_under_its_owners_name(tmp_path, num_ranks):
    parameters = on_ranks(num_ranks, save, tmp_path, small_layers(tied_head=True))

    loaded = load_file(tmp_path / WHOLE)
    assert loaded.keys() == {name for own in parameters for name in own} - {"head.weight"}
    assert torch.equal(loaded["embedding.weight"], parameters[0]["embedding.weight"])
