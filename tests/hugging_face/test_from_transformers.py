"""Models of Hugging Face train in a pipeline as they do by themselves."""

import copy

import pytest
import torch

import penstock as ps
from tests.hugging_face import tiny_further
from tests.hugging_face.families import (
    BATCHES,
    FAMILIES,
    NUM_MICROBATCHES,
    UNDROPPED,
    accumulated,
    batch_of,
    config_of,
    furthest,
    model_of,
)
from tests.support.local_pipelines import on_ranks

pytest.importorskip("transformers")

LARGEST = 1e-6
RATE, NUM_STEPS = 0.03, 3
SCHEDULES, RANKS = ("1f1b", "interleaved-1f1b", "zbv"), (1, 2, 4)
# Each family meets each batch; over the families each pair of batch, schedule, attention and ranks is there. Those with
# rules of their own (sliding windows, experts, tied heads of another form) run by default, with one batch each.
CELLS = [
    pytest.param(
        family,
        "eager" if family == "gemma2" or (place + turn) % 2 else "sdpa",
        kind,
        SCHEDULES[(place + turn) % 3],
        RANKS[(place // 3 + turn) % 3],
        marks=() if family in ("llama", "gemma2", "qwen3_moe", "gpt2") and turn == place % 3 else pytest.mark.slow,
    )
    for place, family in enumerate(FAMILIES)
    for turn, kind in enumerate(BATCHES)
]


def trained(layers, schedule, ranks, tokens, labels, keywords, num_steps=NUM_STEPS):
    """Return, per rank, loss and gradients of the first of these steps of SGD, and the weights after them."""

    def train(transport):
        where = {"ranks": 1} if ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(layers, schedule, NUM_MICROBATCHES, layers.loss, count=layers.count, **where)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE)
        first = None
        for _ in range(num_steps):  # from the second one on, blocks go the short way
            optimizer.zero_grad()
            result = pipeline.step(tokens, target=labels, **keywords)
            first = first or (result.loss, {name: each.grad.clone() for name, each in pipeline.named_parameters()})
            optimizer.step()
        return *first, {name: each.detach().clone() for name, each in pipeline.named_parameters()}

    return on_ranks(ranks, train)


def trained_alone(model, tokens, labels, keywords):
    """Return the same of the model itself."""
    loss, gradients = accumulated(model, tokens, labels, keywords)
    for step in range(NUM_STEPS):
        found = gradients if step == 0 else accumulated(model, tokens, labels, keywords)[1]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= RATE * found[name]
    return loss, gradients, {name: each.detach().clone() for name, each in model.named_parameters()}


def assert_gradients(layers, model, ranks, kind):
    """On each rank, a step of these layers has the gradients of the model itself."""
    tokens, labels, keywords = batch_of(kind)
    _, wanted = accumulated(model, tokens, labels, keywords)

    for _, found, _ in trained(layers, "1f1b", ranks, tokens, labels, keywords, num_steps=1):
        assert furthest(found, wanted, model.all_tied_weights_keys) < LARGEST


@pytest.mark.feature("X50")
@pytest.mark.parametrize(("family", "attention", "kind", "schedule", "ranks"), CELLS)
def test_gradients_and_three_steps_are_those_of_the_model_itself(family, attention, kind, schedule, ranks):
    model = model_of(family, attention)
    tokens, labels, keywords = batch_of(kind)
    loss, gradients, weights = trained_alone(copy.deepcopy(model), tokens, labels, keywords)
    ties = model.all_tied_weights_keys

    found = trained(ps.from_transformers(model), schedule, ranks, tokens, labels, keywords)

    for found_loss, found_gradients, found_weights in found:
        assert abs(found_loss.item() - loss) < LARGEST * loss
        assert furthest(found_gradients, gradients, ties) < LARGEST
        assert furthest(found_weights, weights, ties) < LARGEST


def test_logits_are_bit_for_bit_those_of_the_model():
    model = model_of("gemma3").eval()
    tokens, labels, keywords = batch_of("padded")
    layers = ps.from_transformers(model)
    pipeline = ps.Pipeline(layers, "1f1b", NUM_MICROBATCHES, layers.loss, count=layers.count, ranks=1)

    for _ in range(2):
        found = pipeline.evaluate(tokens, target=labels, return_outputs=True, **keywords).outputs
        with torch.no_grad():
            assert torch.equal(found, model(tokens, use_cache=False, **keywords).logits)


def test_a_batch_that_the_model_or_a_pipeline_does_not_take_is_refused():
    layers = ps.from_transformers(config_of("gpt2"))
    pipeline = ps.Pipeline(layers, "1f1b", NUM_MICROBATCHES, layers.loss, count=layers.count, ranks=1)
    tokens, labels, keywords = batch_of("padded")

    for told, args, named in (
        ("GPT2LMHeadModel: multiple values for argument 'input_ids'", [tokens], {"input_ids": tokens}),
        ("GPT2LMHeadModel: missing a required argument: 'input_ids'", [], keywords),
        ("'past_key_values' is no argument of a batch", [tokens, tokens], {}),
    ):
        with pytest.raises(ps.StepRefused, match=told):
            pipeline.step(*args, target=labels, **named)
    with pytest.raises(ps.StepRefused, match="as target="):
        pipeline.step(input_ids=tokens, labels=labels, **keywords)


def test_names_are_those_of_the_model_and_layers_are_embedding_blocks_and_norm_with_head():
    model = model_of("llama")
    layers = ps.from_transformers(model.config)

    assert [layer.name for layer in layers] == [
        "model.embed_tokens",
        *(f"model.layers.{number}" for number in range(6)),
        "lm_head",
    ]
    assert [name for name, _ in layers[-1]().named_parameters()] == ["model.norm.weight", "lm_head.weight"]
    assert layers[0].weight == 0
    assert [layer.weight for layer in layers[1:7]] == [1.0] * 6
    attention, feed_forward = 2 * 32 * 32 + 2 * 16 * 32, 3 * 32 * 48
    assert layers[-1].weight == 64 * 32 / (attention + feed_forward)
    sparse = ps.from_transformers(config_of("mixtral"))[-1].weight  # of four experts a token uses two
    assert sparse == pytest.approx(64 * 32 / (attention + 2 * feed_forward + 4 * 32))
    pipeline = ps.Pipeline(layers, "1f1b", 4, layers.loss, count=layers.count, ranks=1)
    assert pipeline.state_dict().keys() == model.state_dict().keys()
    first, *_, last = ps.from_transformers(config_of("gpt2"))
    assert [name for name, _ in first().named_parameters()] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert last.tied == (("lm_head.weight", "transformer.wte.weight"),)


def test_a_config_draws_values_by_seed_and_name_whatever_the_split():
    config = config_of("gpt2")
    models = [ps.from_transformers(config, seed=seed) for seed in (1, 1, 2)]
    states = [{name: value for layer in layers for name, value in layer().state_dict().items()} for layers in models]

    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    differing = {name for name in states[0] if not torch.equal(states[0][name], states[2][name])}
    assert differing == {name for name in states[0] if name.endswith("weight") and "ln_" not in name}
    scaled = states[0]["transformer.h.0.mlp.c_proj.weight"].std() / states[0]["transformer.h.0.mlp.c_fc.weight"].std()
    assert scaled.item() == pytest.approx(12**-0.5, rel=0.1), "the first values of GPT-2 go by its depth"


def test_a_model_from_a_config_trains_and_has_the_buffers_that_files_lack():
    config = config_of("gemma3")
    layers = ps.from_transformers(config, dtype=torch.float32)
    whole = model_of("gemma3")
    state = {name: value for layer in layers[:-1] for name, value in layer().state_dict().items()}
    whole.load_state_dict(state, strict=False)  # the head is tied

    assert_gradients(layers, whole, 2, "padded")


def test_types_and_attention_are_those_that_were_asked_for():
    config = config_of("llama")
    layers = ps.from_transformers(config, dtype=torch.bfloat16, attn_implementation="eager")

    assert {each.dtype for each in layers[1]().parameters()} == {torch.bfloat16}
    assert layers.config._attn_implementation == "eager"
    assert config._attn_implementation != "eager", "the config of the caller stays as it is"


@pytest.mark.feature("X50")
@pytest.mark.parametrize("family", ["gpt2", "mixtral", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_folder_trains_as_the_model_that_transformers_loads_from_it(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    layers = ps.from_transformers(tmp_path)

    assert_gradients(layers, model, 2, "padded")
    assert layers.source == tmp_path
    assert all(parameter.is_meta for parameter in layers.whole.parameters())


def test_layers_are_in_the_order_of_the_forward_and_not_of_the_definition():
    """OPT defines its last norm before its blocks; OpenAI's GPT asks a parameter for its type."""
    import transformers

    torch.manual_seed(0)
    opt = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    gpt = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64, **UNDROPPED}
    for config in (
        transformers.OPTConfig(vocab_size=64, max_position_embeddings=64, dropout=0.0, word_embed_proj_dim=16, **opt),
        transformers.OpenAIGPTConfig(vocab_size=64, **gpt),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert_gradients(ps.from_transformers(model), model, 2, "padded")


@pytest.mark.parametrize(("name", "is_decoder"), [("zamba2", True), ("gemma4", True), ("bert", False)])
def test_decoders_of_text_take_tokens_on_the_first_stage_alone(name, is_decoder):
    layers = ps.from_transformers(tiny_further.model_of(name))

    assert layers.is_decoder is is_decoder
    assert ("input_ids" in [item.name for item in layers[0].batch_signature.keywords]) is not is_decoder


def test_a_trial_that_does_not_come_to_all_chains_asks_for_an_example_or_for_their_names():
    model = tiny_further.model_of("qwen3_vl")

    with pytest.raises(
        ps.ConfigError, match=r"a trial run of Qwen3VL\S+ with a made-up batch does not come to 'model.v"
    ):
        ps.from_transformers(model)
    layers = ps.from_transformers(model, chains=["model.language_model.layers"])
    names = [layer.layer_name for layer in layers]
    assert names == ["model", *(f"model.language_model.layers.{index}" for index in range(4)), "lm_head"]
    assert "pixel_values" in layers[0].batch_signature.parameters


def test_a_folder_names_the_class_of_its_model_and_comes_back(tmp_path):
    """A kind of head, a tied bias within a head, positions that no file has, and a tower."""
    from safetensors.torch import load_file

    for name in ("bert", "marian", "vit", "llava"):
        model, source, target = tiny_further.model_of(name), tmp_path / name / "from", tmp_path / name / "to"
        model.save_pretrained(source)
        (source / "preprocessor_config.json").write_text("{}")
        batch, _ = tiny_further.batch_of(name)
        example = batch if name == "llava" else None
        layers, in_place = (ps.from_transformers(each, example=example) for each in (source, model))
        state = model.state_dict()

        found = {key: value for layer in layers for key, value in layer().state_dict().items()}
        layers.save_pretrained(ps.Pipeline(layers, "1f1b", 2, ranks=1), target)
        in_place.save_pretrained(ps.Pipeline(in_place, "1f1b", 2, ranks=1), tmp_path / name / "again")

        assert type(layers.whole) is type(model)
        assert all(torch.equal(value, state[key]) for key, value in found.items())
        assert state.keys() == found.keys()
        files = [load_file(folder / "model.safetensors") for folder in (source, target, tmp_path / name / "again")]
        for file in files[1:]:
            assert file.keys() == files[0].keys()
            assert all(torch.equal(value, files[0][key]) for key, value in file.items())
        _, info = type(model).from_pretrained(target, output_loading_info=True)
        assert not any(info.values())
        assert (target / "preprocessor_config.json").exists()


def test_a_model_that_has_collected_hidden_states_before_is_cut_likewise():
    model = tiny_further.model_of("llava").eval()
    batch, _ = tiny_further.batch_of("llava")
    with torch.no_grad():
        wanted = model(**batch).logits
    layers = ps.from_transformers(model, example=batch)
    pipeline = ps.Pipeline(layers, "1f1b", tiny_further.NUM_MICROBATCHES, ranks=1)

    for _ in range(2):
        torch.testing.assert_close(pipeline.evaluate(**batch, return_outputs=True).outputs, wanted)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, wanted)


@pytest.mark.parametrize("name", ["t5", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_a_folder_of_several_chains_trains_as_the_model_that_transformers_loads_from_it(name, tmp_path):
    model = tiny_further.model_of(name)
    model.save_pretrained(tmp_path)
    batch, labels = tiny_further.batch_of(name)
    _, wanted = tiny_further.reference(model, name, batch, labels)
    layers = ps.from_transformers(tmp_path, example=batch if name == "qwen2_5_vl" else None)
    batch, specs = tiny_further.split_batch(name, batch)

    def train(transport):
        pipeline = ps.Pipeline(layers, "1f1b", tiny_further.NUM_MICROBATCHES, specs=specs, transport=transport)
        pipeline.step(**batch, target=labels)
        return {key: each.grad.clone() for key, each in pipeline.named_parameters() if each.grad is not None}

    for found in on_ranks(2, train):
        assert furthest(found, wanted, model.all_tied_weights_keys) < LARGEST


class Logits(torch.nn.Module):
    """A module around a classifier, which returns its logits."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, input_ids, attention_mask):
        return self.classifier(input_ids, attention_mask=attention_mask, use_cache=False).logits


def test_logits_of_a_classifier_in_a_module_of_ones_own_can_be_cut():
    classifier = tiny_further.model_of("llama-rows").eval()
    batch, _ = tiny_further.batch_of("llama-rows")

    layers = ps.cut(Logits(classifier), ["classifier.model.layers.*"])
    pipeline = ps.Pipeline(layers, "1f1b", 2, ranks=1)
    found = pipeline.evaluate(**batch, return_outputs=True).outputs
    with torch.no_grad():
        torch.testing.assert_close(found, Logits(classifier)(**batch))
