"""The adapter of a pipeline is saved as peft's own files, to the byte, and merged as peft merges it."""

import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.errors import NotSaved
from tests.checkpoints.written_files import names
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.mesh_pipelines import on_mesh

peft = pytest.importorskip("peft")

from tests.hugging_face.adapted import (  # noqa: E402
    KINDS,
    LABELS,
    LORA,
    TOKENS,
    adapted,
    loaded_base,
    pipeline_of,
    saved_base,
    settle,
    tier,
)

FILES = ["adapter_model.safetensors", "adapter_config.json", "README.md"]
QUICK = ("LoRA", "embeddings", "a trained head", "VeRA")
CASES = [pytest.param(kind, ranks, marks=tier(kind, ranks, QUICK)) for kind in KINDS for ranks in (1, 2, 4)]


def saved_by_pipeline(layers, folder, ranks, *, merged=False):
    """Save the adapter of settled layers; return the first rank's logits before."""

    def save(transport):
        with pipeline_of(layers, transport if ranks > 1 else None) as pipeline:
            settle(pipeline.named_parameters())
            outputs = pipeline.evaluate(TOKENS, target=LABELS, return_outputs=True).outputs
            layers.save_pretrained(pipeline, folder, merged=merged)
            return outputs

    outputs = on_ranks(ranks, save)[-1]
    return outputs if isinstance(outputs, torch.Tensor) else torch.cat(list(outputs))


def bytes_of(folder, files=FILES):
    return {file: (folder / file).read_bytes() for file in files}


def assert_peft_reads(folder, base, logits):
    """What peft loads from a folder computes what the pipeline has computed."""
    loaded = peft.PeftModel.from_pretrained(loaded_base(base), folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=TOKENS, use_cache=False).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "ranks"), CASES)
@pytest.mark.feature("X61")
def test_a_model_of_peft_is_saved_to_the_byte_as_peft_saves_it(tmp_path, kind, ranks):
    base = saved_base(tmp_path / "base")
    model = adapted(base, kind)
    layers = ps.from_transformers(model)

    logits = saved_by_pipeline(layers, tmp_path / "ours", ranks)

    model = adapted(base, kind)
    settle(model.named_parameters())
    model.peft_config = layers.adapter.peft_model.peft_config  # a set of targets may be listed in another order
    model.save_pretrained(tmp_path / "theirs")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    assert_peft_reads(tmp_path / "ours", base, logits)


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_a_folder_of_an_adapter_goes_in_and_out_unchanged(tmp_path, kind, ranks):
    base, first, second = saved_base(tmp_path / "base"), tmp_path / "first", tmp_path / "second"
    saved_by_pipeline(ps.from_transformers(base, adapter=KINDS[kind]()), first, ranks)

    layers = ps.from_transformers(first)
    on_ranks(2, lambda transport: layers.save_pretrained(pipeline_of(layers, transport), second))

    assert names(second) == sorted(FILES)
    assert bytes_of(first, FILES[:1]) == bytes_of(second, FILES[:1])
    assert peft.PeftConfig.from_pretrained(first) == peft.PeftConfig.from_pretrained(second)


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_merged_weights_are_those_of_peft(tmp_path, kind, ranks):
    base = saved_base(tmp_path / "base")
    saved_by_pipeline(ps.from_transformers(base, adapter=KINDS[kind]()), tmp_path / "adapter", 1)
    wanted = peft.PeftModel.from_pretrained(loaded_base(base), tmp_path / "adapter").merge_and_unload()
    layers = ps.from_transformers(tmp_path / "adapter")

    def save(transport):
        with pipeline_of(layers, transport if ranks > 1 else None) as pipeline:
            layers.save_pretrained(pipeline, tmp_path / "merged", merged=True)

    on_ranks(ranks, save)

    found = loaded_base(tmp_path / "merged").state_dict()
    assert found.keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert torch.equal(found[name], value), name


def test_weights_that_are_tied_and_changed_in_one_place_are_not_merged(tmp_path):
    base = saved_base(tmp_path / "base", "gpt2")
    config = peft.LoraConfig(**LORA, target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True)
    layers = ps.from_transformers(base, adapter=config)

    def case(transport):
        with pipeline_of(layers, transport) as pipeline:
            return error_of(layers.save_pretrained, pipeline, tmp_path / "merged", merged=True)

    for error in on_ranks(2, case):
        assert type(error) is NotSaved
        assert (
            "the adapter changes 'lm_head.weight', but the model ties 'lm_head.weight' to 'transformer.wte.weight'"
            in str(error)
        )
    assert names(tmp_path / "merged") == []


@pytest.mark.parametrize(("lora_bias", "value"), [(True, 0.0), (False, float("nan"))])
def test_what_peft_does_not_merge_is_told_on_every_rank(tmp_path, lora_bias, value):
    config = peft.LoraConfig(**LORA, target_modules=["q_proj"], layers_to_transform=[5], lora_bias=lora_bias)
    layers = ps.from_transformers(saved_base(tmp_path / "base"), adapter=config)

    def case(transport):
        with pipeline_of(layers, transport) as pipeline, torch.no_grad():
            for name, parameter in pipeline.named_parameters():
                if "lora_B.default.weight" in name:
                    parameter.fill_(value)
            return error_of(layers.save_pretrained, pipeline, tmp_path / "merged", merged=True)

    for error in on_ranks(2, case):
        assert type(error) is NotSaved
        assert "peft cannot merge the adapter into 'model.layers.5.self_attn.q_proj'" in str(error)
    assert names(tmp_path / "merged") == []


@pytest.mark.parametrize("shard", ["none", pytest.param("optimizer", marks=pytest.mark.slow), "full"])
def test_replicas_with_and_without_shards_write_one_adapter(tmp_path, shard):
    base = saved_base(tmp_path / "base")
    layers = ps.from_transformers(base, adapter=KINDS["LoRA"]())

    def train(where, folder):
        with pipeline_of(layers, None, mesh=where, shard=shard, microbatches=2) as pipeline:
            optimizer = torch.optim.SGD([each for each in pipeline.parameters() if each.requires_grad], lr=1.0)
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                losses.append(pipeline.step(TOKENS, target=LABELS).loss.item())
                optimizer.step()
            layers.save_pretrained(pipeline, folder)
            return losses

    many = on_mesh(2, 2, train, tmp_path / "many")
    one = on_mesh(1, 1, train, tmp_path / "one") if shard == "none" else many

    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert len({tuple(losses) for losses in many}) == 1
    assert many[0][1] < many[0][0]
    assert set(names(tmp_path / "many")) == set(FILES)
    peft.PeftModel.from_pretrained(loaded_base(base), tmp_path / "many")


def test_an_adapter_of_another_name_gets_a_folder_of_its_own(tmp_path):
    base = saved_base(tmp_path / "base")
    model = peft.get_peft_model(loaded_base(base), KINDS["LoRA"](), adapter_name="mine")
    layers = ps.from_transformers(model)

    saved_by_pipeline(layers, tmp_path / "ours", 2)

    assert set(names(tmp_path / "ours" / "mine")) >= set(FILES[:2])
    loaded = peft.PeftModel.from_pretrained(loaded_base(base), tmp_path / "ours" / "mine")
    assert any(parameter.abs().max() > 0.05 for name, parameter in loaded.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_source_of_weights_brings_the_merged_model_and_generation_reads_it(tmp_path, ranks):
    base = saved_base(tmp_path / "base")
    layers = ps.from_transformers(base, adapter=peft.LoraConfig(**LORA))

    def bring(transport):
        with pipeline_of(layers, transport if ranks > 1 else None) as pipeline:
            settle(pipeline.named_parameters())
            layers.save_pretrained(pipeline, tmp_path / "merged", merged=True)
            tensors = {name: tensor.clone() for name, tensor in layers.weight_source(pipeline)}
            return tensors, layers.generate(pipeline, TOKENS[:, :4], max_new_tokens=4)

    results = on_ranks(ranks, bring)
    expected = loaded_base(tmp_path / "merged")
    tensors = {name: tensor for brought, _ in results for name, tensor in brought.items()}
    assert tensors.keys() == load_file(tmp_path / "merged" / "model.safetensors").keys()
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor)
    text = expected.generate(TOKENS[:, :4], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert all(torch.equal(tokens, text) for _, tokens in results)
