"""Models of transformers whose forward does more around its blocks: long ropes, layer drop, a cache by default."""

import copy

import pytest
import torch

import penstock as ps
from tests.hugging_face.families import GROUPED, SHAPE, config_of
from tests.support.local_pipelines import on_ranks

transformers = pytest.importorskip("transformers")

NUM_MICROBATCHES, LARGEST = 2, 1e-6
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.5, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}


def made(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


def tokens_of(length):
    return torch.randint(3, 60, (4, length), generator=torch.Generator().manual_seed(length))


def token_loss(output, target):
    logits = getattr(output, "logits", output)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def gradients_of(model, tokens):
    """Return the gradients of the model itself, one microbatch after another."""
    model.zero_grad()
    for rows in tokens.chunk(NUM_MICROBATCHES):
        (token_loss(model(input_ids=rows), rows) / NUM_MICROBATCHES).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def trained(model, num_ranks, lengths, layers_of):
    """Compare the gradients of steps with those of the model itself."""
    plain = copy.deepcopy(model)
    wanted = [gradients_of(plain, tokens_of(length)) for length in lengths]

    def train(transport):
        layers = layers_of(copy.deepcopy(model))
        pipeline = ps.Pipeline(layers, "1f1b", NUM_MICROBATCHES, token_loss, transport=transport)
        for length, gradients in zip(lengths, wanted, strict=True):
            pipeline.step(input_ids=tokens_of(length), target=tokens_of(length))
            largest = max(gradient.abs().max() for gradient in gradients.values())
            for name, parameter in pipeline.named_parameters():
                wrong = (parameter.grad - gradients[name]).abs().max() / largest
                assert wrong <= LARGEST, f"{name} at length {length}: off by {wrong:.2g}"
                parameter.grad = None

    on_ranks(num_ranks, train)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("lengths", [(12, 12), (12, 20, 12, 20), (20, 12)])
def test_a_long_rope_is_made_anew_where_batches_are_longer(lengths, num_ranks):
    config = config_of("phi3", original_max_position_embeddings=16, rope_parameters=LONG_ROPE)

    trained(made(config), num_ranks, lengths, ps.from_transformers)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layer_drop_is_refused_as_such_before_a_step_trains(num_ranks):
    settings = {key: value for key, value in SHAPE.items() if key != "intermediate_size"}
    config = transformers.OPTConfig(**settings, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, layerdrop=0.3)

    model = made(config)

    def train(transport):
        layers = ps.from_transformers(copy.deepcopy(model))
        pipeline = ps.Pipeline(layers, "1f1b", NUM_MICROBATCHES, token_loss, transport=transport)
        for _ in range(8):
            pipeline.step(input_ids=tokens_of(12), target=tokens_of(12))

    with pytest.raises(ps.PenstockError, match=r"(?i)layer.?drop"):
        on_ranks(num_ranks, train)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_fills_a_cache_by_default_is_cut_without_one_or_refused_by_its_name(num_ranks):
    model = made(transformers.LlamaConfig(**GROUPED))
    assert model.config.use_cache
    message = "use_cache"
    try:
        trained(model, num_ranks, (12, 12), lambda model: ps.cut(model, ["model.layers.*"]))
    except ps.PenstockError as error:
        message = str(error)
    assert "use_cache" in message


@pytest.mark.slow
def test_a_submodule_that_its_owner_replaces_after_the_cut_holds_from_the_next_step_on():
    model = made(config_of("llama"))
    layers = ps.from_transformers(model)
    pipeline = ps.Pipeline(layers, "1f1b", NUM_MICROBATCHES, token_loss, ranks=1)
    pipeline.step(tokens_of(12), target=tokens_of(12))
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    wanted = gradients_of(copy.deepcopy(model), tokens_of(12))
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(tokens_of(12), target=tokens_of(12))

    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-6, atol=1e-8)
