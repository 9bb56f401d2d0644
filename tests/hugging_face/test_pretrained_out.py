"""What a pipeline writes is what transformers loads, and what it was read from comes back byte for byte."""

import json
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.checkpoints import weight_files
from penstock.checkpoints.shards import write_tensors
from penstock.checkpoints.weight_files import INDEX, save_weights
from penstock.checkpoints.writer import save_checkpoint
from penstock.errors import CheckpointError, NotSaved
from penstock.hugging_face import pretrained_out
from penstock.hugging_face.pretrained_out import PretrainedFormat, convert_weights, save_as
from penstock.hugging_face.weights_in import PretrainedWeights
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.checkpoints.written_files import all_tensors, names, note_writers
from tests.hugging_face.tiny_models import FAMILIES, saved_model
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.mesh_pipelines import on_mesh

pytest.importorskip("transformers")

CONFIG_FILES = {"config.json", "generation_config.json"}


class CutPart(nn.Module):
    """Holds parameters of a transformers model under its own names; it has no forward of use."""

    has_full_names = True

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            *path, own = name.split(".")
            module = self
            for each in path:
                if each not in dict(module.named_children()):
                    module.add_module(each, nn.Module())
                module = module.get_submodule(each)
            module.register_parameter(own, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, x):
        return x


def parts_of(empty, num_parts, dtype=torch.float32):
    """Cut a model into parts that have the model's names; a tied parameter of another part is tied to it."""
    shapes = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
    names = list(shapes)
    specs = []
    for part in range(num_parts):
        own = names[part * len(names) // num_parts : (part + 1) * len(names) // num_parts]
        ties = tuple((name, owner) for name, owner in empty.all_tied_weights_keys.items() if name in own)
        build = lambda own=own: CutPart({name: shapes[name] for name in own}, dtype)  # noqa: E731
        # The owner of a tie is found by the name of its layer: it comes first in its part.
        specs.append(LayerSpec(own[0].rpartition(".")[0], build, tied=ties, has_full_names=True))
    return specs


def pipeline_of(transport, saved, num_parts, dtype=torch.float32, **options):
    """Make a pipeline of a model and fill it from the folder of the model."""
    mesh = options or {"transport": transport}
    parts = parts_of(saved.empty, num_parts, dtype)
    pipeline = Pipeline(parts, "gpipe", 4, lambda output, target: output.mean(), **mesh)
    weights = PretrainedWeights.open(saved.folder, saved.empty)
    read = {name: weights.read(name) for name in pipeline.state_dict()}
    with torch.no_grad():
        pipeline.load_state_dict({name: value.to(dtype) for name, value in read.items()})
    return pipeline


def go_round(transport, saved, folder, num_parts=4, dtype=torch.float32):
    with pipeline_of(transport, saved, num_parts, dtype) as pipeline:
        save_as(pipeline, folder, PretrainedFormat(saved.empty, saved.folder))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def loaded(folder):
    """Return what transformers loads from a folder, without a complaint."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    return model


@pytest.fixture
def llama(tmp_path):
    """A small model of this family, which transformers saved."""
    return saved_model("llama", tmp_path / "from")


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(weight_files, "FILE_BYTES", 5000)


@pytest.mark.feature("X50")
@pytest.mark.parametrize(
    ("family", "num_ranks", "in_shards"),
    [
        *((family, 2, False) for family in [*FAMILIES, "hrm"]),
        ("llama-tied", 1, True),
        ("gpt2", 4, True),
        ("mixtral", 4, True),
    ],
)
def test_a_folder_comes_back_byte_for_byte_in_one_file_or_in_shards(
    tmp_path, monkeypatch, family, num_ranks, in_shards
):
    shard_bytes = 5000 if in_shards else weight_files.FILE_BYTES
    monkeypatch.setattr(weight_files, "FILE_BYTES", shard_bytes)
    saved, to = saved_model(family, tmp_path / "from", shard_bytes=shard_bytes), tmp_path / "to"

    on_ranks(num_ranks, go_round, saved, to)

    found = all_tensors(to)
    assert_same(found, all_tensors(tmp_path / "from"))
    assert_same(loaded(to).state_dict(), saved.state)
    files = ["model.safetensors"]
    if in_shards:
        index = json.loads((to / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
        assert all(name in load_file(to / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    assert set(names(to)) == {*files, *(["model.safetensors.index.json"] if in_shards else []), *CONFIG_FILES}
    with safe_open(to / files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for


def test_configs_are_the_models_with_the_type_of_the_weights_and_the_model_given_stays_as_it_is(tmp_path, llama):
    llama.empty.generation_config.max_new_tokens = 7
    before = llama.empty.config.to_dict()

    on_ranks(2, go_round, llama, tmp_path / "to", 4, torch.bfloat16)

    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert loaded(tmp_path / "to").dtype == torch.bfloat16
    assert loaded(tmp_path / "to").generation_config.max_new_tokens == 7
    assert llama.empty.config.to_dict() == before


def test_tokenizer_files_alone_are_copied_and_what_transformers_does_not_save_is_left_out(tmp_path, llama):
    kept = {"tokenizer.json": "{1}", "tokenizer_config.json": "{2}", "tokenizer.model": "m", "chat_template.jinja": "c"}
    for name, text in {**kept, "README.md": "of another model", "training_args.bin": "pickle"}.items():
        (tmp_path / "from" / name).write_text(text)
    llama.empty._keys_to_ignore_on_save = {"model.norm.weight"}

    on_ranks(2, go_round, llama, tmp_path / "to")

    assert set(names(tmp_path / "to")) == {"model.safetensors", *CONFIG_FILES, *kept}
    assert {name: (tmp_path / "to" / name).read_text() for name in kept} == kept
    assert all_tensors(tmp_path / "to").keys() == llama.state.keys() - {"model.norm.weight"}


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("gpt2", {}, "which also has 'model."),
        ("llama", {"vocab_size": 65}, "has the shape (64, 16); expected (65, 16)"),
        ("llama", {"num_hidden_layers": 3}, "it has no 'model.layers.2."),
        ("llama-tied", {}, "has 'lm_head.weight' besides 'model.embed_tokens.weight'"),
        ("llama", {}, "generation_config.json: transformers refuses it"),
    ],
    ids=["another family", "another shape", "more layers", "tied weights", "a temperature without sampling"],
)
def test_what_cannot_be_written_is_refused_on_all_ranks_and_nothing_is_written(tmp_path, llama, family, options, told):
    other = saved_model(family, tmp_path / "other", **options)
    if "generation" in told:
        other.empty.generation_config.temperature = 0.5

    def case(transport):
        with pipeline_of(transport, llama, 4) as pipeline:
            return error_of(save_as, pipeline, tmp_path / "to", PretrainedFormat(other.empty, llama.folder))

    for error in on_ranks(2, case):
        assert type(error) is NotSaved
        assert told in str(error)
    assert names(tmp_path / "to") == []


@pytest.mark.parametrize(("family", "shard"), [("llama", "full"), ("mixtral", "none"), ("hrm", "full")])
def test_replicas_share_the_writing_also_where_they_hold_shards(tmp_path, monkeypatch, family, shard):
    saved = saved_model(family, tmp_path / "from")
    written = note_writers(monkeypatch)

    def go(places):
        with pipeline_of(None, saved, 4, mesh=places, shard=shard) as pipeline:
            save_as(pipeline, tmp_path / "to", PretrainedFormat(saved.empty))

    on_mesh(2, 2, go)

    assert len(written) >= 4
    assert_same(all_tensors(tmp_path / "to"), all_tensors(tmp_path / "from"))


def save_own(transport, saved, folder, save=save_weights):
    folder.mkdir(exist_ok=True, parents=True)
    with pipeline_of(transport, saved, 4) as pipeline:
        save(folder, pipeline)


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "hrm"])
def test_files_of_weights_are_converted_without_a_pipeline(tmp_path, family):
    saved = saved_model(family, tmp_path / "from")
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    on_ranks(2, save_own, saved, tmp_path / "own")

    where = convert_weights(tmp_path / "own", tmp_path / "from", saved.empty, tmp_path / "from")

    assert where == tmp_path / "own" / "weights.safetensors"
    assert set(names(tmp_path / "from")) == {"model.safetensors", "tokenizer.json", *CONFIG_FILES}
    assert_same(loaded(tmp_path / "from").state_dict(), saved.state)


def test_a_checkpoint_is_converted_and_a_damaged_one_is_refused(tmp_path):
    saved = saved_model("mixtral", tmp_path / "from")
    (tmp_path / "to").mkdir()
    on_ranks(2, save_own, saved, tmp_path / "run" / "checkpoints", partial(save_checkpoint, step=7))

    where = convert_weights(tmp_path / "run", tmp_path / "to", saved.empty, tmp_path / "from")

    assert where.name == "step-7"
    assert_same(all_tensors(tmp_path / "to"), all_tensors(tmp_path / "from"))

    file = next(where.glob("weights-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="was changed or damaged"):
        convert_weights(tmp_path / "run", tmp_path / "to", saved.empty, tmp_path / "from")
    assert_same(all_tensors(tmp_path / "to"), all_tensors(tmp_path / "from"))


def test_conversion_reads_a_tensor_of_the_files_at_a_time(tmp_path, small_files, monkeypatch):
    saved = saved_model("mixtral", tmp_path / "from")
    on_ranks(2, save_own, saved, tmp_path / "own")
    (tmp_path / "to").mkdir()
    read, read_tensors = [], pretrained_out.read_tensors

    def note(path, names):
        read.append(tuple(names))
        return read_tensors(path, names)

    monkeypatch.setattr(pretrained_out, "read_tensors", note)
    convert_weights(tmp_path / "own", tmp_path / "to", saved.empty, tmp_path / "from")

    assert sorted(read) == sorted((name,) for name in saved.state)
    assert_same(all_tensors(tmp_path / "to"), all_tensors(tmp_path / "from"))


def test_both_names_of_a_tied_weight_are_one_if_they_are_equal(tmp_path):
    saved = saved_model("llama-tied", tmp_path / "from")
    state = {name: value.clone() for name, value in saved.state.items()}
    write_tensors(tmp_path / "own.safetensors", state)
    (tmp_path / "to").mkdir()

    convert_weights(tmp_path / "own.safetensors", tmp_path / "to", saved.empty, tmp_path / "from")
    assert_same(all_tensors(tmp_path / "to"), all_tensors(tmp_path / "from"))

    state["lm_head.weight"] += 1
    write_tensors(tmp_path / "own.safetensors", state)
    with pytest.raises(CheckpointError, match="have other values, but the model ties them"):
        convert_weights(tmp_path / "own.safetensors", tmp_path / "to", saved.empty, tmp_path / "from")


def refused(path, folder, saved):
    folder.mkdir()
    with pytest.raises(CheckpointError) as caught:
        convert_weights(path, folder, saved.empty, saved.folder)
    assert names(folder) == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "new_name", "dtype", "told"),
    [
        (
            "lm_head.weight",
            "lm_head.weight",
            torch.float8_e5m2,
            "own.safetensors: 'lm_head.weight' has the type F8_E5M2; ",
        ),
        (
            "model.norm.weight",
            "model.norms.weight",
            torch.float32,
            "'model.norms.weight'. Did you mean 'model.norm.weight'",
        ),
    ],
    ids=["a type that files of Penstock cannot have", "another name"],
)
def test_a_file_that_is_none_of_the_model_is_not_converted(tmp_path, llama, name, new_name, dtype, told):
    state = {name: value.clone() for name, value in llama.state.items()}
    changed = state.pop(name).to(dtype)
    save_file(state | {new_name: changed}, tmp_path / "own.safetensors")

    assert told in refused(tmp_path / "own.safetensors", tmp_path / "to", llama)


def test_an_index_that_lists_what_no_file_has_and_a_quantized_config_are_refused(tmp_path, llama, small_files):
    on_ranks(2, save_own, llama, tmp_path / "own")
    llama.empty.config.quantization_config = {"quant_method": "fp8"}
    assert "has a quantization_config, but its weights" in refused(tmp_path / "own", tmp_path / "other", llama)
    del llama.empty.config.quantization_config
    index = json.loads((tmp_path / "own" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    listed = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = next(file for file in files if file != listed)
    (tmp_path / "own" / INDEX).write_text(json.dumps(index))

    assert "has no 'model.norm.weight', which its index lists" in refused(tmp_path / "own", tmp_path / "to", llama)
