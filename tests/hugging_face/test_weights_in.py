"""Weights of a folder are those that transformers loads from it, tensor by tensor, and no other bytes are read."""

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.errors import CheckpointError
from penstock.hugging_face.stored import INDEX, WHOLE, Stored
from penstock.hugging_face.weights_in import PretrainedWeights
from tests.hugging_face.tiny_models import FAMILIES, saved_model

pytest.importorskip("transformers")

EXPERT = "model.layers.1.block_sparse_moe.experts"
OLD = "model.layers.0.self_attn.rotary_emb.inv_freq"


def change(folder, change_of):
    """Rewrite the one file of a folder."""
    tensors = load_file(folder / WHOLE)
    change_of(tensors)
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


def refused(saved):
    with pytest.raises(CheckpointError) as caught:
        PretrainedWeights.open(saved.folder, saved.empty)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "shard_bytes"), [*((family, 10**9) for family in FAMILIES), ("mixtral", 5000), ("hrm", 5000)]
)
def test_every_name_of_the_model_reads_its_values(tmp_path, family, shard_bytes):
    saved = saved_model(family, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / INDEX).exists() == (shard_bytes == 5000)

    weights = PretrainedWeights.open(tmp_path, saved.empty)

    for name, expected in saved.state.items():
        found = weights.read(name)
        assert name in weights
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name


def test_they_are_what_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    saved = saved_model("mixtral", tmp_path, dtype=torch.bfloat16)
    weights = PretrainedWeights.open(tmp_path, saved.empty)

    for dtype in (torch.float32, torch.bfloat16):
        state = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
        with torch.no_grad():
            for value in saved.model.to(dtype).parameters():
                value.zero_()
        weights.fill(saved.model)
        found = saved.model.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
        assert found["model.norm.weight"].dtype == dtype


def test_one_tensor_costs_its_own_bytes(tmp_path):
    saved = saved_model("mixtral", tmp_path, shard_bytes=5000)
    weights = PretrainedWeights.open(tmp_path, saved.empty)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in tmp_path.glob("*.safetensors"))
    assert weights.bytes_read == headers

    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.norm.weight"):
        before = weights.bytes_read
        weights.read(name)
        assert weights.bytes_read - before == saved.state[name].nbytes


def test_a_file_may_have_either_name_of_a_tied_weight_or_both_if_they_are_equal(tmp_path):
    saved = saved_model("llama-tied", tmp_path)
    name, other = "model.embed_tokens.weight", "lm_head.weight"
    change(tmp_path, lambda tensors: tensors.update({other: tensors[name].clone()}))
    assert torch.equal(PretrainedWeights.open(tmp_path, saved.empty).read(name), saved.state[name])

    change(tmp_path, lambda tensors: tensors[other].add_(1))
    weights = PretrainedWeights.open(tmp_path, saved.empty)
    with pytest.raises(CheckpointError, match=r"have other values, but the model ties them\. Set tie_word_embeddings"):
        weights.read(name)

    change(tmp_path, lambda tensors: tensors.pop(name))
    assert torch.equal(PretrainedWeights.open(tmp_path, saved.empty).read(name), saved.state[other] + 1)


def test_names_without_the_prefix_of_the_base_model_are_understood(tmp_path):
    saved = saved_model("gpt2", tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    assert short.keys() != tensors.keys()
    save_file(short, tmp_path / WHOLE)

    weights = PretrainedWeights.open(tmp_path, saved.empty)

    assert torch.equal(weights.read("transformer.h.1.mlp.c_fc.weight"), saved.state["transformer.h.1.mlp.c_fc.weight"])


def test_a_part_of_a_model_is_filled_by_the_full_name_of_each(tmp_path):
    saved = saved_model("llama", tmp_path)
    module = nn.ModuleDict({"lm_head": nn.Linear(16, 64, bias=False)})

    PretrainedWeights.open(tmp_path, saved.empty).fill(module)

    assert torch.equal(module["lm_head"].weight, saved.state["lm_head.weight"])


def test_what_files_may_lack_stays_as_the_module_has_it_and_what_old_files_have_is_no_extra_tensor(tmp_path):
    saved = saved_model("llama", tmp_path)
    saved.empty._keys_to_ignore_on_load_missing = {"model.norm.weight"}
    change(tmp_path, lambda tensors: tensors.update({OLD: tensors.pop("model.norm.weight")}))
    weights = PretrainedWeights.open(tmp_path, saved.empty)
    with torch.no_grad():
        saved.model.model.norm.weight.fill_(3)
        saved.model.lm_head.weight.fill_(3)

    weights.fill(saved.model)

    assert saved.model.model.norm.weight.eq(3).all()
    assert torch.equal(saved.model.lm_head.weight, load_file(tmp_path / WHOLE)["lm_head.weight"])


def test_whole_numbers_keep_their_type(tmp_path):
    saved = saved_model("llama", tmp_path)
    saved.empty.model.register_buffer("count", torch.tensor(0, device="meta"))
    change(tmp_path, lambda tensors: tensors.update({"model.count": torch.tensor(2**60 + 1)}))

    saved.model.to(torch.bfloat16).model.register_buffer("count", torch.tensor(0))
    PretrainedWeights.open(tmp_path, saved.empty).fill(saved.model)

    found = saved.model.model.count
    assert (found.dtype, found.item()) == (torch.int64, 2**60 + 1)


def test_what_shares_a_tensor_of_the_files_is_filled_by_one_read(tmp_path):
    for family in ("hrm", "llama-tied"):
        saved = saved_model(family, tmp_path / family)
        weights = PretrainedWeights.open(tmp_path / family, saved.empty)
        before = weights.bytes_read
        weights.fill(saved.model)
        assert weights.bytes_read - before == sum(t.nbytes for t in load_file(tmp_path / family / WHOLE).values())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_filling_holds_the_sources_of_one_tensor_at_a_time(tmp_path, monkeypatch, family):
    saved = saved_model(family, tmp_path)
    weights = PretrainedWeights.open(tmp_path, saved.empty)
    alive, most, read = weakref.WeakSet(), [0], Stored.read

    def noting(stored):
        tensor = read(stored)
        alive.add(tensor)
        most.append(sum(each.nbytes for each in alive))
        return tensor

    monkeypatch.setattr(Stored, "read", noting)
    weights.fill(saved.model)

    converted = [value.nbytes for name, value in saved.state.items() if "experts" in name]
    assert max(most) == max(converted, default=0), "others are read where they belong"


def test_a_missing_tensor_is_named_with_the_nearest(tmp_path):
    saved = saved_model("llama", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.norm.wieght": tensors.pop("model.norm.weight")}))

    told = refused(saved)

    assert f"{tmp_path}: is of another model: it has no 'model.norm.weight'. Did you mean 'model.norm.wieght'" in told
    assert told.endswith("Take the config.json that belongs to these files, or files of this model")


@pytest.mark.parametrize(
    ("family", "removed", "added", "told"),
    [
        (
            "llama",
            "",
            {"model.norms.weight": (2,)},
            "which also has 'model.norms.weight'. Did you mean 'model.norm.weight'",
        ),
        ("llama", "", {"lm_head.weight": (65, 16)}, "'lm_head.weight' has the shape (65, 16); expected (64, 16)"),
        ("mixtral", "5.w1 5.w3", {}, f"it has no '{EXPERT}.5.w1.weight'"),
        ("mixtral", "11.w1 11.w3", {}, f"it has no '{EXPERT}.11.w1.weight'"),
        ("mixtral", "5.w1 5.w3 6.w1 6.w3 7.w1 7.w3", {}, f"it has no '{EXPERT}.5.w1.weight'"),
        ("mixtral", "3.w3", {}, f"it has no '{EXPERT}.3.w3.weight'. Did you mean"),
        ("gpt2", "", {"wpe.weight": (32, 16)}, "has 'transformer.wpe.weight' 2 times"),
    ],
)
def test_tensors_of_another_model_are_named(tmp_path, family, removed, added, told):
    saved = saved_model(family, tmp_path)

    def edit(tensors):
        for name in removed.split():
            del tensors[f"{EXPERT}.{name}.weight"]
        tensors.update({name: torch.ones(shape) for name, shape in added.items()})

    change(tmp_path, edit)

    assert told in refused(saved)


def test_an_expert_of_another_shape_is_told_by_what_is_made_of_it_and_quantized_weights_are_refused(tmp_path):
    saved = saved_model("mixtral", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({f"{EXPERT}.5.w2.weight": torch.ones(16, 25)}))

    told = refused(saved)

    assert "'model.layers.1.mlp.experts.down_proj' of shape (12, 16, 24) cannot be made of" in told
    assert f"'{EXPERT}.5.w2.weight' (16, 25)" in told
    saved.empty.config.quantization_config = {"quant_method": "fp8"}
    assert "its config.json has a quantization_config; expected unquantized weights" in refused(saved)


def test_what_is_not_there_cannot_be_read_or_filled(tmp_path):
    saved = saved_model("llama", tmp_path)
    weights = PretrainedWeights.open(tmp_path, saved.empty)

    assert "model.norms.weight" not in weights
    with pytest.raises(CheckpointError, match=r"has no tensor for 'model.norms.weight'\. Did you mean"):
        weights.read("model.norms.weight")
    with pytest.raises(CheckpointError, match=r"has no tensor for 'lm_head.bias'\. Did you mean 'lm_head.weight'"):
        weights.fill(nn.ModuleDict({"lm_head": nn.Linear(16, 64)}))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has the shape \(64, 16\); expected \(2, 2\)"):
        weights.fill(nn.ModuleDict({"lm_head": nn.Linear(2, 2, bias=False)}))
