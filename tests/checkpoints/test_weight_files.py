"""The files of weights have the unsplit model's names and values, whatever the split."""

import json
import os
import threading
import time
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from penstock.checkpoints import agreement, weight_files
from penstock.checkpoints.pretrained import files_of, find_weights, load_weights
from penstock.checkpoints.shards import write_tensors
from penstock.checkpoints.weight_files import INDEX, WHOLE, require_saveable, save_tensors, save_weights
from penstock.checkpoints.weight_format import PLAIN, ConversionUnit, WeightFormat
from penstock.errors import NotSaved, PipelineError
from penstock.models import LayerSpec
from tests.checkpoints.written_files import all_tensors, fill_disk_at_rename, names, note_writers
from tests.local_pipelines import error_of, on_ranks
from tests.ranks import run_ranks, run_ranks_with_deaths
from tests.train.local_ranks import VOCABULARY, on_small_pipelines, random_batch, small_layers, small_pipeline


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
def test_the_file_has_every_parameter_of_every_rank_under_its_name(tmp_path):
    parameters = on_ranks(3, save, tmp_path, small_layers())

    loaded = load_file(tmp_path / WHOLE)
    expected = {name: parameter for own in parameters for name, parameter in own.items()}
    assert names(tmp_path) == [WHOLE]
    assert loaded.keys() == expected.keys()
    assert {"embedding.weight", "blocks.3.attention.query.weight", "norm.weight", "head.weight"} < loaded.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_split_does_not_change_a_byte_of_the_file(tmp_path):
    for num_ranks in (1, 2, 4):
        on_ranks(num_ranks, save, tmp_path / str(num_ranks), small_layers("bfloat16"))

    contents = {(tmp_path / str(num_ranks) / WHOLE).read_bytes() for num_ranks in (1, 2, 4)}
    assert len(contents) == 1


@pytest.mark.feature("X50")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
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


def test_both_forms_are_loaded_by_any_number_of_ranks(tmp_path, small_files):
    on_ranks(2, save, tmp_path)
    expected = all_tensors(tmp_path)

    def load(pipeline):
        load_weights(tmp_path, pipeline)
        return {name: value.detach().clone() for name, value in pipeline.state_dict().items()}

    for num_ranks in (1, 3):
        loaded = on_small_pipelines(num_ranks, load, small_layers("float64"))
        found = {name: value for own in loaded for name, value in own.items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name].double()) for name in expected)


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
def test_a_tied_weight_is_saved_once_under_its_first_name(tmp_path, num_ranks):
    on_ranks(num_ranks, save, tmp_path, small_layers(tied_head=True))

    found = load_file(tmp_path / WHOLE).keys()
    assert "embedding.weight" in found
    assert "head.weight" not in found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_types_shapes_and_saved_buffers_come_back(tmp_path, num_ranks):
    on_ranks(num_ranks, save, tmp_path, [nn.Identity(), Mixed()])

    loaded = load_file(tmp_path / WHOLE)
    expected = {f"1.{name}": value for name, value in Mixed().state_dict().items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert all(loaded[name].dtype == expected[name].dtype for name in expected)


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


class Merging(Turned):
    """Saves all under one name, which no two ranks can."""

    def units(self, tensors):
        return [ConversionUnit(names=[name], file_types={"all": entry}) for name, entry in tensors.items()]


def test_two_ranks_that_would_save_one_tensor_are_refused(tmp_path):
    told = refused(tmp_path, [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)], Merging())

    assert all("'1.weight' and '0.weight' are saved as one tensor, 'all'" in words for words in told)
    assert names(tmp_path) == []


def test_the_file_says_that_torch_reads_it(tmp_path):
    on_ranks(1, save, tmp_path, [nn.Linear(2, 2)])

    with safe_open(tmp_path / WHOLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


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


def test_a_type_that_the_format_lacks_is_refused_on_every_rank(tmp_path):
    told = refused(tmp_path, [nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)])

    assert all("'1.weight' is a Tensor of type torch.complex64" in words for words in told)
    assert names(tmp_path) == []


def test_what_cannot_be_saved_is_found_before_a_step_runs_and_the_size_is_known(tmp_path):
    def error(pipeline):
        return error_of(require_saveable, pipeline)

    on_ranks(2, save, tmp_path)
    num_bytes = sum(tensor.nbytes for tensor in all_tensors(tmp_path).values())
    assert on_small_pipelines(2, require_saveable) == [num_bytes] * 2
    errors = on_small_pipelines(2, error, [nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)])
    assert [type(error) for error in errors] == [NotSaved] * 2
    assert all("'1.weight' is a Tensor of type torch.complex64" in str(error) for error in errors)


TIED = {
    "embedding": lambda: nn.Embedding(VOCABULARY, 16),
    "body": lambda: nn.Linear(16, 16),
    "head": lambda: nn.Linear(16, VOCABULARY, bias=False),
}


def train_tied(transport, folder):
    ties = {"head": (("weight", "embedding.weight"),)}
    layers = [LayerSpec(name, build, tied=ties.get(name, ())) for name, build in TIED.items()]
    pipeline = small_pipeline(transport, layers)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    tokens, target = random_batch(0)
    pipeline.step(tokens, target=target)
    optimizer.step()
    save_weights(folder, pipeline)
    outputs = pipeline.evaluate(tokens, return_outputs=True).outputs
    pipeline.close()
    return outputs


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tied_weights_are_loaded_elsewhere_by_a_plain_model_that_ties_them_itself(tmp_path, num_ranks):
    outputs = on_ranks(num_ranks, train_tied, tmp_path)[-1]

    plain = nn.Sequential(OrderedDict((name, build()) for name, build in TIED.items()))
    plain.head.weight = plain.embedding.weight
    found = plain.load_state_dict(load_file(tmp_path / WHOLE), strict=False)

    assert (found.missing_keys, found.unexpected_keys) == (["head.weight"], [])
    assert plain.head.weight is plain.embedding.weight
    torch.testing.assert_close(plain(random_batch(0)[0]), outputs)


def save_slowly(rank, folder, dying_rank=None):
    """Save on a disk that is slower than the deadline; one rank may die meanwhile."""

    def write_late(path, tensors):
        time.sleep(1.5)
        write_tensors(path, tensors)

    weight_files.write_tensors = write_late
    pipeline = small_pipeline(None, deadline_s=30.0)
    pipeline.transport.deadline_s = 1.0
    begin_s = time.monotonic()
    if rank == dying_rank:
        threading.Timer(0.7, os._exit, [7]).start()
    error = None
    try:
        save_weights(folder, pipeline)
        pipeline.transport.deadline_s = 30.0
        tokens, target = random_batch(0)
        pipeline.step(tokens, target=target)
    except PipelineError as caught:
        error = caught
        pipeline.close()
    return time.monotonic() - begin_s, type(error).__name__, str(error)


@pytest.mark.slow
def test_a_disk_slower_than_the_deadline_loses_no_weights(tmp_path):
    (tmp_path / "slowly").mkdir()
    results = run_ranks(2, save_slowly, tmp_path / "slowly")
    on_ranks(2, save, tmp_path / "quickly", small_layers())

    assert [result[1] for result in results] == ["NoneType"] * 2, results
    assert min(result[0] for result in results) > 3.0, "the disk was to take longer than the deadline, twice"
    assert (tmp_path / "slowly" / WHOLE).read_bytes() == (tmp_path / "quickly" / WHOLE).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_while_a_slow_disk_is_written_ends_the_saving(tmp_path, dying_rank):
    outcome = run_ranks_with_deaths(2, save_slowly, tmp_path, dying_rank)

    [(duration_s, name, message)] = outcome.results.values()
    assert outcome.exit_codes == {dying_rank: 7}
    assert name in ("PeerLost", "DeadlineExceeded")
    assert f"rank {dying_rank}" in message
    assert duration_s < 30.0, "the deadline of the run"
    assert not (tmp_path / WHOLE).exists()


def test_a_disk_that_takes_nothing_for_too_long_is_an_error_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "STALLED_AFTER_S", 0.2)
    is_free = threading.Event()
    monkeypatch.setattr(weight_files, "write_tensors", lambda *_: is_free.wait(20))

    told = refused(tmp_path)

    is_free.set()
    assert all(f"{tmp_path}: a disk took more than 0 s" in words for words in told)
    assert names(tmp_path) == []
