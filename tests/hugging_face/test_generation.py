"""Text by a pipeline whose ranks keep what they have read: the tokens are those of the model's own `generate`."""

import copy

import pytest
import torch

import penstock as ps
from penstock.errors import ConfigError, PenstockError, PipelineError
from penstock.hugging_face import generation
from penstock.hugging_face.generation import cached_model, obstacle_to_cache
from tests.hugging_face import tiny_further
from tests.hugging_face.families import FAMILIES, config_of, model_of
from tests.support.local_pipelines import error_of, on_ranks, token_layers
from tests.support.mesh_pipelines import on_mesh

pytest.importorskip("transformers")

NUM_TOKENS = 8
PROMPTS = torch.tensor([[5, 9, 12, 30, 7, 22], [8, 3, 11, 40, 33, 21], [8, 8, 8, 40, 33, 60]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
WAYS = {
    "1 rank": (1, "gpipe", 1, {}),
    "2 ranks": (2, "1f1b", 2, {}),
    "4 ranks": (4, "1f1b", 4, {}),
    "interleaved": (2, "interleaved-1f1b", 2, {"stages_per_rank": 2}),
    "zbv": (2, "zbv", 2, {}),
    "zbv on 4 ranks": (4, "zbv", 4, {}),
    "two routes": (2, "dualpipe", 4, {}),
}
QUICK_FAMILIES = ("llama", "gemma3")
NO_END = {"eos_token_id": None}


def lively_model(family="llama", dtype=torch.float32, **changes):
    """Return a model whose weights are large enough that its texts do not repeat one token."""
    model = model_of(family, "eager" if family == "gemma2" else "sdpa", **changes).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def expected(model, prompts=PROMPTS, mask=None, seed=0, **options):
    """Return the text of transformers' own generate."""
    sampling = {"do_sample": "temperature" in options, **({} if "top_k" in options else {"top_k": 0})}
    torch.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.generate(prompts, attention_mask=mask, max_new_tokens=NUM_TOKENS, **sampling, **options)


def generated(layers, way="2 ranks", prompts=PROMPTS, mask=None, **options):
    """Return the text of a pipeline, on each of its ranks."""
    num_ranks, schedule, microbatches, schedule_options = WAYS[way]

    def generate(transport):
        pipeline = ps.Pipeline(layers, schedule, microbatches, transport=transport, **schedule_options)
        return layers.generate(pipeline, prompts, mask, max_new_tokens=NUM_TOKENS, **options)

    return on_ranks(num_ranks, generate)


def require_equal(texts, text):
    assert len({tuple(row) for row in text[:, PROMPTS.shape[1] :].tolist()}) > 1, "all rows are alike"
    assert [found.tolist() for found in texts] == [text.tolist()] * len(texts)


@pytest.mark.feature("X58")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK_FAMILIES else pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize("way", ["2 ranks", pytest.param("1 rank", marks=pytest.mark.slow)])
def test_the_likeliest_tokens_are_those_of_the_model_itself(family, way):
    model = lively_model(family)
    text = expected(model, **NO_END)

    require_equal(generated(ps.from_transformers(model), way, eos_token_id=()), text)


@pytest.mark.feature("X58")
@pytest.mark.parametrize("way", ["zbv", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "zbv")])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_rows_with_padding_on_their_left_are_continued_alike_in_every_placement(family, way):
    model = lively_model(family)
    text = expected(model, mask=PADDED, **NO_END)

    require_equal(generated(ps.from_transformers(model), way, mask=PADDED, eos_token_id=()), text)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5, "top_p": 0.8, "seed": 3},
        pytest.param({"temperature": 1.5, "seed": 4}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.5, "top_k": 7, "top_p": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_drawn_tokens_are_those_of_transformers_with_the_same_seed(options):
    model = lively_model()
    text = expected(model, **options, **NO_END)

    texts = generated(ps.from_transformers(model), **options, eos_token_id=())

    require_equal(texts, text)
    assert texts[0].tolist() != expected(model, **NO_END).tolist()


def test_a_row_ends_with_its_end_of_sequence_and_the_others_go_on():
    model = lively_model()
    free_text = expected(model, **NO_END)
    end = int(free_text[1, PROMPTS.shape[1] + 2])
    text = expected(model, eos_token_id=end)
    assert (text[1] == model.config.pad_token_id).any()

    require_equal(generated(ps.from_transformers(model), eos_token_id=[end]), text)
    every_end = sorted(set(free_text[:, PROMPTS.shape[1] + 1].tolist()))
    short_texts = generated(ps.from_transformers(model), eos_token_id=every_end)
    assert short_texts[0].tolist() == expected(model, eos_token_id=every_end).tolist()
    assert short_texts[0].shape[1] <= PROMPTS.shape[1] + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_tied_heads_and_other_types_give_the_tokens_of_the_model_itself(dtype):
    model = lively_model(dtype=dtype, tie_word_embeddings=True)
    text = expected(model, **NO_END)

    require_equal(generated(ps.from_transformers(model), eos_token_id=()), text)


def test_a_folder_is_read_with_a_cache_and_its_padding_is_found_as_transformers_finds_it(tmp_path):
    model = lively_model()
    model.save_pretrained(tmp_path)
    prompts = PROMPTS.masked_fill(PADDED == 0, model.config.pad_token_id)

    require_equal(generated(ps.from_transformers(tmp_path), prompts=prompts), expected(model, prompts))


@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {}), pytest.param("zbv", {}, marks=pytest.mark.slow)], ids=["1f1b", "zbv"]
)
def test_the_steps_after_a_text_are_bit_for_bit_those_without_one(schedule, options):
    model = lively_model(attention_dropout=0.1)
    batch = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))

    def trained(transport, *, writes):
        layers = ps.from_transformers(copy.deepcopy(model).train())
        pipeline = ps.Pipeline(layers, schedule, 2, transport=transport, seed=5, **options)
        optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipeline.step(batch, target=batch).loss.item())
            optimizer.step()
            if writes:
                layers.generate(pipeline, PROMPTS, max_new_tokens=2, temperature=1.0)
        return losses, {name: parameter.clone() for name, parameter in pipeline.named_parameters()}

    pairs = zip(
        on_ranks(2, lambda transport: trained(transport, writes=False)),
        on_ranks(2, lambda transport: trained(transport, writes=True)),
        strict=True,
    )
    for (losses, weights), (other_losses, other_weights) in pairs:
        assert losses == other_losses
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_each_rank_keeps_its_own_layers_alone_and_lets_go_of_them_at_the_end(monkeypatch):
    layers, caches = ps.from_transformers(lively_model()), []
    make = generation.rank_cache
    monkeypatch.setattr(generation, "rank_cache", lambda config: caches.append(make(config)) or caches[-1])

    def generate(transport):
        pipeline = ps.Pipeline(layers, "1f1b", 1, transport=transport)
        request = generation.Request(tokens=PROMPTS, mask=torch.ones_like(PROMPTS), max_new_tokens=3)
        tokens = generation.next_tokens(pipeline, layers.whole, request, lambda logits: logits.argmax(-1))
        next(tokens)
        own = [int(name.split(".")[2]) for name in pipeline.stages[0].names if "layers." in name]
        transport_caches = [cache for cache in caches if cache.filled_layers() == own]
        next(tokens)
        tokens.close()
        return own, len(transport_caches)

    found = on_ranks(2, generate)

    assert [own for own, _ in found] == [[0, 1, 2], [3, 4, 5]]
    assert [number for _, number in found] == [1, 1]
    assert [list(cache.layers) for cache in caches] == [[], []]


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"microbatches": None, "microbatch_size": 2}])
def test_rows_need_not_be_as_many_as_microbatches(options):
    model = lively_model()
    layers, text = ps.from_transformers(model), expected(model, **NO_END)

    def generate(transport):
        pipeline = ps.Pipeline(layers, "1f1b", transport=transport, **options)
        return layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS, eos_token_id=())

    require_equal(on_ranks(2, generate), text)


def test_replicas_write_on_behind_prompts_of_their_own():
    model = lively_model()
    layers = ps.from_transformers(model)
    end = int(expected(model, PROMPTS[:1], **NO_END)[0, PROMPTS.shape[1] + 1])

    def generate(places):
        pipeline = ps.Pipeline(layers, "1f1b", 1, mesh=places)
        prompts = PROMPTS[pipeline.replica : pipeline.replica + 1]
        return layers.generate(pipeline, prompts, max_new_tokens=NUM_TOKENS, eos_token_id=end)

    found = on_mesh(2, 2, generate)

    for rank, text in enumerate(found):
        wanted = expected(model, PROMPTS[rank // 2 : rank // 2 + 1], eos_token_id=end)
        assert text[:, : wanted.shape[1]].tolist() == wanted.tolist()
        assert (text[:, wanted.shape[1] :] == model.config.pad_token_id).all()


# ---- what is refused


def errors_of(call_of_rank):
    """Return the errors of `call_of_rank(layers, pipeline)` on two ranks; a right text must follow."""
    model = lively_model()
    layers, text = ps.from_transformers(model), expected(model, **NO_END)

    def case(transport):
        pipeline = ps.Pipeline(layers, "1f1b", 2, transport=transport)
        error = error_of(call_of_rank, layers, pipeline)
        return error, layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS, eos_token_id=())

    found = on_ranks(2, case)
    assert [right.tolist() for _, right in found] == [text.tolist()] * 2
    return [error for error, _ in found]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": PROMPTS + 1}, "disagree on input_ids: rank 0 and rank 1 have different values"),
        ({"max_new_tokens": 3}, "disagree on max_new_tokens: rank 0 has 8, rank 1 has 3"),
        *(
            pytest.param({name: value}, f"disagree on {name}", marks=pytest.mark.slow)
            for name, value in {
                "input_ids": PROMPTS[:, 1:],
                "attention_mask": PADDED,
                "seed": 1,
                "temperature": 2.0,
                "eos_token_id": 5,
            }.items()
        ),
    ],
)
def test_a_rank_that_passes_something_else_is_named_on_all_ranks(changes, words):
    def call(layers, pipeline):
        others = changes if pipeline.rank else {}
        layers.generate(pipeline, **{"input_ids": PROMPTS, "max_new_tokens": NUM_TOKENS, **others})

    for error in errors_of(call):
        assert isinstance(error, PipelineError)
        assert words in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -1.0}, "temperature: -1.0; expected a number of at least 0"),
        ({"temperature": "hot"}, "temperature: 'hot'"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0}, "top_p: 0 leaves no token"),
        ({"top_p": 1.5}, "top_p: 1.5; expected a number of at least 0 and at most 1"),
        ({"top_k": 1.5}, "top_k: 1.5; expected an integer"),
        ({"seed": -1}, "seed: -1; expected an integer of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0; expected an integer of at least 1"),
        ({"max_new_tokens": 60}, "60 tokens behind prompts of 6 are more than the 64 positions .* ask for 58 at most"),
        ({"eos_token_id": "end"}, "eos_token_id: .* expected an id"),
        ({"input_ids": [[1, 2]]}, "input_ids: .*expected prompts"),
        ({"input_ids": PROMPTS.float()}, "input_ids: torch.float32 of shape"),
        ({"input_ids": PROMPTS[:, :0]}, "expected a token in each row"),
        ({"input_ids": PROMPTS + 30}, "input_ids: the id 90 is none of the 64 tokens"),
        ({"attention_mask": PADDED[:2]}, r"attention_mask: .* expected a tensor of shape \(3, 6\)"),
        ({"attention_mask": PADDED * 2}, "attention_mask: has other numbers"),
        ({"attention_mask": PADDED.flip(1)}, "attention_mask: row 1 ends with padding"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(changes, words):
    model = model_of("llama")
    layers = ps.from_transformers(model)

    with ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline, pytest.raises(ConfigError, match=words):
        layers.generate(pipeline, **{"input_ids": PROMPTS, "max_new_tokens": NUM_TOKENS, **changes})


def test_a_wrong_argument_on_one_rank_is_told_to_all():
    def call(layers, pipeline):
        layers.generate(pipeline, PROMPTS, temperature=-1.0 if pipeline.rank else 0.0, max_new_tokens=NUM_TOKENS)

    errors = errors_of(call)

    assert str(errors[0]).startswith("rank 1: temperature: -1.0")
    assert str(errors[1]).startswith("temperature: -1.0")


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("repetition_penalty", 1.1, {}),
        ("encoder_repetition_penalty", 1.5, {}),
        ("no_repeat_ngram_size", 1, {}),
        ("min_new_tokens", 1, {}),
        ("forced_eos_token_id", 1, {}),
        ("forced_bos_token_id", 0, {}),
        ("remove_invalid_values", True, {}),
        ("guidance_scale", 0, {}),
        ("min_p", 0.1, {"temperature": 1.0}),
        ("typical_p", 0.5, {"temperature": 1.0}),
        ("epsilon_cutoff", 0.02, {"temperature": 1.0}),
    ],
)
def test_settings_by_which_transformers_takes_other_tokens_are_refused_by_name(name, value, options):
    model = model_of("llama")
    setattr(model.generation_config, name, value)
    layers = ps.from_transformers(model)

    with (
        ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline,
        pytest.raises(ConfigError, match=rf"^generation_config.{name}: {value!r}"),
    ):
        layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS, **options)


def test_settings_that_leave_the_tokens_as_they_are_are_taken():
    model = lively_model()
    text = expected(model, **NO_END)
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": 1, "suppress_tokens": []}
    for name, value in (neutral | {"min_length": 0, "typical_p": 0.5}).items():
        setattr(model.generation_config, name, value)  # the last one counts where tokens are drawn

    require_equal(generated(ps.from_transformers(model), "1 rank", eos_token_id=()), text)


def test_a_temperature_by_which_logits_become_infinite_is_refused():
    layers = ps.from_transformers(model_of("llama"))

    with (
        ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline,
        pytest.raises(PenstockError, match="divided by the temperature 1e-300, are too large for float32"),
    ):
        layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS, temperature=1e-300)


@pytest.mark.parametrize(
    ("name", "words"),
    [("t5", "has an encoder"), ("bert", "has no generate"), ("llava", "is no decoder of text alone")],
)
def test_models_that_keep_no_cache_of_their_own_are_refused_by_name(name, words):
    assert words in obstacle_to_cache(tiny_further.model_of(name))


def test_a_model_with_a_cache_of_a_class_of_its_own_is_refused_by_name():
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    with torch.device("meta"):
        model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**shape, **heads))

    assert "takes no cache but one of a class of its own" in obstacle_to_cache(model)


def test_a_config_whose_layers_have_attributes_of_their_own_is_read_with_a_cache():
    model = tiny_further.model_of("gemma4", global_head_dim=16).eval()
    text = expected(model, **NO_END)

    require_equal(generated(ps.from_transformers(model), eos_token_id=()), text)


def test_a_model_of_which_layers_keep_nothing_is_refused_by_name():
    model = model_of("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, past_key_values=None, **kwargs: forward(*args, past_key_values=None, **kwargs)
    layers = ps.from_transformers(model)

    with (
        ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline,
        pytest.raises(ConfigError, match="LlamaForCausalLM keeps nothing in the cache of its layers 1,"),
    ):
        layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS)


def test_a_pipeline_of_another_model_and_one_that_merges_outputs_are_refused():
    layers, other = ps.from_transformers(model_of("llama")), ps.from_transformers(model_of("gpt2"))

    with (
        ps.Pipeline(other, "gpipe", 1, ranks=1) as pipeline,
        pytest.raises(ConfigError, match=r"^pipeline: its parameter 'transformer.wte.weight'"),
    ):
        layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS)
    with (
        ps.Pipeline(layers, "gpipe", 1, ranks=1, merge=list) as pipeline,
        pytest.raises(PenstockError, match=r"which are no logits of 3 rows .* leave out merge="),
    ):
        layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS)


def test_weights_that_are_not_numbers_are_refused():
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    layers = ps.from_transformers(model)

    with ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline, pytest.raises(PenstockError, match="not numbers"):
        layers.generate(pipeline, PROMPTS, max_new_tokens=NUM_TOKENS)


@pytest.mark.parametrize(("name", "value"), [("eos_token_id", [2, 5]), ("pad_token_id", 7)])
def test_ranks_whose_models_end_or_pad_rows_by_other_ids_are_named(name, value):
    def case(transport):
        layers = ps.from_transformers(model_of("llama"))
        if transport.rank:
            setattr(layers.whole.generation_config, name, value)
        with ps.Pipeline(layers, "1f1b", 2, transport=transport) as pipeline:
            return error_of(layers.generate, pipeline, PROMPTS, max_new_tokens=NUM_TOKENS)

    for error in on_ranks(2, case):
        assert isinstance(error, PipelineError)
        assert f"the ranks disagree on {name}: rank 0 has" in str(error)
        assert "give all ranks the same model.whole.generation_config" in str(error)


@pytest.mark.parametrize(("length", "fix"), [(6, "ask for 4 at most, or call"), (12, "no others; call")])
def test_a_text_beyond_the_first_rotary_factors_of_a_model_is_refused_by_name(length, fix):
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 2.0, 4.0, 1.5]}
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 10, **factors}
    model = lively_model("phi3", rope_parameters=rotary, original_max_position_embeddings=10)
    layers = ps.from_transformers(model)
    text = torch.cat([PROMPTS, PROMPTS], 1)[:, :length]
    with ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline:
        error = error_of(layers.generate, pipeline, text, max_new_tokens=NUM_TOKENS)

        assert cached_model(pipeline, 10) is model
        assert cached_model(pipeline, 11) is None
        found = layers.generate(pipeline, PROMPTS, max_new_tokens=4, eos_token_id=())
    assert isinstance(error, ConfigError)
    assert "go beyond the 10 positions up to which Phi3ForCausalLM takes its first rotary factors" in str(error)
    assert fix in str(error)
    assert found.tolist() == model.generate(PROMPTS, max_new_tokens=4, do_sample=False, **NO_END).tolist()


def test_indices_that_grow_with_the_text_go_between_stages_where_shapes_may_vary():
    model = tiny_further.model_of("glm_moe_dsa").eval()
    layers = ps.from_transformers(model)
    text = model.generate(PROMPTS[:, :1], max_new_tokens=NUM_TOKENS, do_sample=False, **NO_END)

    def case(transport, **options):
        with ps.Pipeline(layers, "1f1b", 2, transport=transport, **options) as pipeline:
            return layers.generate(pipeline, PROMPTS[:, :1], max_new_tokens=NUM_TOKENS, eos_token_id=())

    for found in on_ranks(2, lambda transport: case(transport, variable_shapes=True)):
        assert found.tolist() == text.tolist()
    for error in on_ranks(2, lambda transport: error_of(case, transport)):
        assert "variable_shapes=True" in str(error)


def test_only_a_model_of_transformers_with_positions_for_the_text_is_read_with_a_cache():
    layers = ps.from_transformers(config_of("llama"))
    with ps.Pipeline(layers, "gpipe", 1, ranks=1) as pipeline:
        assert cached_model(pipeline, 64) is layers.whole
        assert cached_model(pipeline, 65) is None
    with ps.Pipeline(token_layers(), "gpipe", 1, ranks=1) as pipeline:
        assert cached_model(pipeline, 1) is None
