"""Adapters of peft train in a pipeline as they do in one process, and what would not is refused by name."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch

import penstock as ps
from penstock.errors import CheckpointError, ConfigError
from tests.hugging_face.families import model_of
from tests.support.local_pipelines import error_of, on_ranks

peft = pytest.importorskip("peft")

from tests.hugging_face.adapted import (  # noqa: E402
    KINDS,
    LABELS,
    LORA,
    QV,
    TOKENS,
    adapted,
    joined,
    loaded_base,
    pipeline_of,
    saved_base,
    settle,
    tier,
    trained_by_peft,
    trained_on,
    with_weights,
)

LARGEST = 1e-6
QUICK = ("LoRA", "last layers", "a trained head", "VeRA")
CASES = [
    pytest.param(kind, ranks, schedule, marks=tier(kind, ranks, QUICK))
    for kind in KINDS
    for ranks, schedule in ((1, "1f1b"), (2, "1f1b"), (4, "zb-h1"))
]


def assert_close(results, wanted):
    found = joined(results, "gradients")
    largest = max(gradient.abs().max() for gradient in wanted.gradients.values())
    assert found.keys() == wanted.gradients.keys()
    assert max((found[name] - each).abs().max() / largest for name, each in wanted.gradients.items()) < LARGEST
    assert abs(results[0].loss - wanted.loss) < LARGEST * wanted.loss


@pytest.mark.parametrize(("kind", "ranks", "schedule"), CASES)
@pytest.mark.feature("X60")
def test_adapters_put_into_a_folder_have_the_gradients_of_peft(tmp_path, kind, ranks, schedule):
    base = saved_base(tmp_path / "base")

    results = trained_on(ps.from_transformers(base, adapter=KINDS[kind]()), ranks, schedule)

    model = with_weights(adapted(base, kind), joined(results, "weights"))
    assert_close(results, trained_by_peft(model, settled=False))


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_so_they_do_in_other_families_and_under_tied_heads(tmp_path, family):
    base = saved_base(tmp_path / "base", family, tie_word_embeddings=True)

    results = trained_on(ps.from_transformers(base, adapter=peft.LoraConfig(**LORA)), 2)

    torch.manual_seed(0)
    model = peft.get_peft_model(loaded_base(base), peft.LoraConfig(**LORA))
    assert_close(results, trained_by_peft(with_weights(model, joined(results, "weights")), settled=False))


@pytest.mark.parametrize("kind", ["LoRA", pytest.param("a trained head", marks=pytest.mark.slow)])
def test_a_model_with_peft_around_it_is_used_in_place(tmp_path, kind):
    model = adapted(saved_base(tmp_path / "base"), kind)
    wanted = trained_by_peft(copy.deepcopy(model))

    results = trained_on(ps.from_transformers(model), 2, "zb-h1")

    assert_close(results, wanted)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, pytest.param({"bias": "all"}, marks=pytest.mark.slow)])
def test_adapters_of_a_head_train_under_a_loss_in_chunks_of_positions(tmp_path, settings):
    base = saved_base(tmp_path / "base")
    config = peft.LoraConfig(**LORA, target_modules=["q_proj", "lm_head"], **settings)
    layers = ps.from_transformers(base, adapter=config)

    results = trained_on(layers, 2, loss=partial(ps.losses.chunked_cross_entropy, chunk=4))

    model = with_weights(peft.get_peft_model(loaded_base(base), config), joined(results, "weights"))
    assert_close(results, trained_by_peft(model, settled=False))


@pytest.mark.parametrize("kind", ["PiSSA", "OLoRA", "VeRA"])
def test_first_values_that_follow_from_the_model_are_those_of_peft(tmp_path, kind):
    base = saved_base(tmp_path / "base")
    layers = ps.from_transformers(base, adapter=KINDS[kind]())
    wanted = adapted(base, kind).get_base_model().state_dict()

    for state in on_ranks(2, lambda transport: pipeline_of(layers, transport).state_dict()):
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)


def test_first_values_depend_on_the_seed_and_not_on_the_ranks(tmp_path):
    base = saved_base(tmp_path / "base")

    def first_values(ranks, seed=0):
        layers = ps.from_transformers(base, adapter=KINDS["LoRA"](), seed=seed)
        states = on_ranks(ranks, lambda transport: pipeline_of(layers, transport).state_dict())
        return {name: value for state in states for name, value in state.items() if "lora_A" in name}

    one, two, other = first_values(1), first_values(2), first_values(2, seed=1)

    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert len({value.flatten()[0].item() for value in one.values()}) == len(one)


def test_frozen_parameters_have_no_gradient_and_the_optimizer_keeps_nothing_of_them(tmp_path):
    layers = ps.from_transformers(saved_base(tmp_path / "base"), adapter=KINDS["last layers"]())

    def case(transport):
        with pipeline_of(layers, transport) as pipeline:
            trained = [each for each in pipeline.parameters() if each.requires_grad]
            optimizer = torch.optim.AdamW(trained) if trained else None
            pipeline.step(batch, target=batch)
            if optimizer is not None:
                optimizer.step()
            norm = pipeline.clip_grad_norm_(1.0)
            frozen_gradients = [each.grad for each in pipeline.parameters() if not each.requires_grad]
            return len(trained), norm.item(), frozen_gradients, pipeline.norms(gradients=True).keys()

    batch = torch.randint(3, 64, (8, 12))
    first, *_, last = on_ranks(3, case)

    assert first[0] == 0  # a rank without an optimizer is in all calls
    assert last[0] == 8
    assert first[1] == last[1] > 0
    assert {gradient for _, _, gradients, _ in (first, last) for gradient in gradients} == {None}
    assert len(first[3]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("layers", [[0], [2, 3], [5]])
@pytest.mark.parametrize("schedule", ["zbv", "interleaved-1f1b", "chimera", "dualpipe-v"])
def test_adapters_on_some_stages_alone_train_under_every_schedule(tmp_path, layers, schedule):
    base = saved_base(tmp_path / "base")
    config = peft.LoraConfig(**LORA, target_modules=QV, layers_to_transform=layers)

    results = trained_on(ps.from_transformers(base, adapter=config), 2, schedule)

    model = with_weights(peft.get_peft_model(loaded_base(base), config), joined(results, "weights"))
    assert_close(results, trained_by_peft(model, settled=False))


def test_forwards_below_the_first_adapter_keep_nothing_for_a_backward(tmp_path):
    base = saved_base(tmp_path / "base")

    def kept_bytes(adapter):
        layers = ps.from_transformers(base, adapter=adapter)
        sizes = {}

        def note(tensor):
            if not isinstance(tensor, torch.nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with pipeline_of(layers, None, microbatches=1) as pipeline:
            pipeline.evaluate(TOKENS, target=LABELS)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                pipeline.step(TOKENS, target=LABELS)
        return sum(sizes.values())

    whole, last_layers = kept_bytes(None), kept_bytes(KINDS["last layers"]())

    assert 0 < last_layers < 0.35 * whole


def refused(source, adapter=None):
    error = error_of(ps.from_transformers, source, adapter=adapter)
    assert isinstance(error, ConfigError | CheckpointError), error
    return str(error)


def test_other_methods_and_settings_are_refused_by_name(tmp_path):
    base = saved_base(tmp_path / "base")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adaptive = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10)

    for told, adapter in {
        "ADALORA of peft changes its ranks and adds a loss in the wrapper": adaptive,
        "PROMPT_TUNING of peft puts its prompt before the batch": prompt,
        "LOHA of peft has not been compared with one process; take LoraConfig": peft.LoHaConfig(target_modules=QV),
        "LoraConfig(layer_replication=[(0, 2)]) is not supported": peft.LoraConfig(layer_replication=[(0, 2)]),
        "LoraConfig(trainable_token_indices=[1])": peft.LoraConfig(trainable_token_indices=[1]),
        "LoraConfig(target_parameters=['mlp.x'])": peft.LoraConfig(target_parameters=["mlp.x"]),
        "3 of type int; expected a config of peft, or a folder": 3,
        "holds no adapter_config.json": tmp_path / "none",
    }.items():
        assert told in refused(base, adapter)
    assert "ADALORA of peft" in refused(peft.get_peft_model(model_of("llama"), adaptive))
    assert "PROMPT_TUNING of peft" in refused(peft.get_peft_model(model_of("llama"), prompt))
    quantized = model_of("llama")
    quantized.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert "its weights are quantized" in refused(peft.get_peft_model(quantized, peft.LoraConfig()))


def test_a_target_that_is_on_no_stage_is_told_with_the_nearest_names(tmp_path):
    base = saved_base(tmp_path / "base")

    told = refused(base, peft.LoraConfig(target_modules=["q_prj", "v_proj"]))
    assert "target_modules has 'q_prj', which names no module of LlamaForCausalLM" in told
    assert "Did you mean 'q_proj'" in told
    assert "Did you mean 'lm_head'?" in refused(base, peft.LoraConfig(target_modules=QV, modules_to_save=["head"]))
    assert "Target modules .*x_proj not found" in refused(base, peft.LoraConfig(target_modules=r".*x_proj"))


def test_targets_that_peft_turns_into_parameters_of_experts_are_refused_before_a_layer_is_built(tmp_path):
    base = saved_base(tmp_path / "base", "mixtral")

    told = refused(base, peft.LoraConfig(target_modules="all-linear"))
    assert "target_modules also means 'down_proj', 'gate.weight', 'gate_up_proj' of MixtralForCausalLM" in told
    assert "such as target_modules=['k_proj', 'o_proj', 'q_proj', 'v_proj']" in told
    assert "means 'gate.weight' of" in refused(base, peft.LoraConfig(target_modules=["q_proj", "gate"]))


def test_an_adapter_for_another_model_is_refused_before_a_layer_is_built(tmp_path):
    base, wider = saved_base(tmp_path / "base"), saved_base(tmp_path / "wider", hidden_size=64)
    fewer, other = saved_base(tmp_path / "fewer", num_hidden_layers=4), saved_base(tmp_path / "other", "gpt2")
    folder = tmp_path / "adapter"
    adapted(base, "LoRA").save_pretrained(folder)

    assert "layers.0.self_attn.q_proj.lora_A.weight' has the shape (4, 32); expected (4, 64)" in refused(wider, folder)
    assert "it also has 'base_model.model.model.layers.4." in refused(fewer, folder)
    assert f"names {base!r}; give that model" in refused(fewer, folder)
    assert "'q_proj', which names no module of GPT2LMHeadModel" in refused(other, folder)


def test_folders_that_are_no_adapters_and_models_that_cannot_be_used_in_place_are_told_so(tmp_path):
    base, folder = saved_base(tmp_path / "base"), tmp_path / "adapter"
    model = adapted(base, "LoRA")
    model.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())

    assert "a model, whose modules are used in place; pass get_peft_model" in refused(model, KINDS["LoRA"]())
    mixed = peft.get_peft_model(loaded_base(base), KINDS["LoRA"](), mixed=True)
    assert "a PeftMixedModel; expected a model with one adapter" in refused(mixed)
    model.merge_adapter()
    assert "merged into the model; call unmerge_adapter()" in refused(model)
    model.unmerge_adapter()
    model.add_adapter("second", KINDS["LoRA"]())
    assert "has the adapters 'default', 'second'; expected one" in refused(model)
    (folder / "adapter_model.safetensors").unlink()
    assert "holds no adapter_model.safetensors" in refused(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    assert "names no model (base_model_name_or_path); pass the folder of the model" in refused(folder)
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json: peft cannot read it: JSONDecodeError" in refused(folder)
    shutil.copy(tmp_path / "base" / "config.json", folder)
    assert "holds both a model (config.json) and an adapter" in refused(folder)


def with_alpha(base, **settings):
    return ps.from_transformers(base, adapter=peft.LoraConfig(**{**LORA, "target_modules": QV, **settings}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_alpha": 16}, "self_attn.q_proj' was trained with lora_alpha=8, but has lora_alpha=16 in the model"),
        ({"use_rslora": True}, "was trained with use_rslora=False, but has use_rslora=True"),
        ({"alpha_pattern": {"layers.4.self_attn.v_proj": 2}}, "layers.4.self_attn.v_proj' was trained with lora_alp"),
    ],
)
def test_a_checkpoint_of_an_adapter_does_not_load_under_another_scale(tmp_path, settings, told):
    base = saved_base(tmp_path / "base")

    def used(layers, use):
        return on_ranks(2, lambda wires: use(pipeline_of(layers, wires)))

    used(with_alpha(base), lambda own: ps.save_checkpoint(tmp_path / "run", own, step=1))

    used(with_alpha(base), lambda own: ps.load_checkpoint(tmp_path / "run", own))
    errors = used(with_alpha(base, **settings), lambda own: error_of(ps.load_checkpoint, tmp_path / "run", own))
    for error in errors:
        assert type(error) is CheckpointError
    assert any(told in str(error) for error in errors), errors


def test_a_scale_that_was_set_on_the_model_in_use_is_that_of_a_checkpoint(tmp_path):
    model = adapted(saved_base(tmp_path / "base"), "LoRA")
    pipeline = pipeline_of(ps.from_transformers(model), None)
    ps.save_checkpoint(tmp_path / "run", pipeline, step=1)
    layer = model.get_base_model().model.layers[3].self_attn.v_proj
    layer.set_scale("default", 3)

    error = error_of(ps.load_checkpoint, tmp_path / "run", pipeline)

    assert "'model.layers.3.self_attn.v_proj' was trained with scaling=2.0, but has scaling=6.0 in the model" in str(
        error
    )


def test_vera_that_saves_no_matrices_is_not_loaded_under_those_of_another_seed(tmp_path):
    base = saved_base(tmp_path / "base")

    def pipeline_under(seed):
        config = peft.VeraConfig(r=4, target_modules=QV, save_projection=False, projection_prng_key=seed)
        return pipeline_of(ps.from_transformers(base, adapter=config), None)

    ps.save_checkpoint(tmp_path / "run", pipeline_under(0), step=1)

    error = error_of(ps.load_checkpoint, tmp_path / "run", pipeline_under(1))

    assert "was trained with projection_prng_key=0, but has projection_prng_key=1" in str(error)


OVERLAPPING = {"q_proj": 2, "layers.1.self_attn.q_proj": 3}


@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
def test_patterns_by_whose_order_a_module_has_another_rank_or_scale_are_refused(tmp_path, setting):
    base = saved_base(tmp_path / "base")

    def config(patterns):
        return peft.LoraConfig(**LORA, target_modules=QV, **{setting: dict(patterns)})

    for text in (
        refused(base, config(OVERLAPPING)),
        str(error_of(ps.from_transformers, peft.get_peft_model(loaded_base(base), config(OVERLAPPING)))),
    ):
        assert (
            f"{setting}: 'q_proj' and 'layers.1.self_attn.q_proj' both mean 'model.layers.1.self_attn.q_proj'" in text
        )
        assert "which takes the first, 2; but peft's file has them sorted, and is read with 3" in text


def test_patterns_that_overlap_in_the_order_of_the_file_give_the_ranks_and_scales_of_peft(tmp_path):
    base = saved_base(tmp_path / "base")
    patterns = dict(sorted(OVERLAPPING.items()))
    config = peft.LoraConfig(**LORA, target_modules=QV, rank_pattern=patterns, alpha_pattern=patterns)

    def forms(model):
        modules = {name: item for name, item in model.named_modules() if hasattr(item, "lora_A")}
        return {name: (item.r["default"], item.scaling["default"]) for name, item in modules.items()}

    def case(transport):
        pipeline = pipeline_of(ps.from_transformers(base, adapter=copy.deepcopy(config)), transport)
        return {
            name: form for stage in pipeline.stages for layer in stage.modules for name, form in forms(layer).items()
        }

    first, second = on_ranks(2, case)
    assert first | second == forms(peft.get_peft_model(loaded_base(base), config).get_base_model())


def test_dropouts_of_adapters_in_blocks_are_no_draws_of_the_end_that_a_loss_applies_in_chunks(tmp_path):
    base = saved_base(tmp_path / "base")
    head = ["q_proj", "lm_head"]

    def case(loss, targets=QV, seed=5):
        config = peft.LoraConfig(**LORA, target_modules=targets, lora_dropout=0.5)
        layers = ps.from_transformers(base, adapter=config)
        pipeline = pipeline_of(layers, None, loss=loss or layers.loss, seed=seed)
        settle(pipeline.named_parameters())
        loss_value = pipeline.step(TOKENS, target=LABELS).loss.item()
        return loss_value, {name: each.grad for name, each in pipeline.named_parameters() if each.grad is not None}

    chunked = partial(ps.losses.chunked_cross_entropy, chunk=4)
    (loss, gradients), (wanted, wanted_gradients) = case(chunked), case(None)

    assert abs(loss - wanted) < LARGEST * wanted != case(None, seed=6)[0]
    largest = max(each.abs().max() for each in wanted_gradients.values())
    assert max((gradients[name] - each).abs().max() / largest for name, each in wanted_gradients.items()) < LARGEST
    assert "random numbers" in str(error_of(case, chunked, head))
