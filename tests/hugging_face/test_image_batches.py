"""Batches of vision-language models without images, or without tokens for them: right, or refused by name at once."""

import copy

import pytest
import torch

import penstock as ps
from tests.hugging_face import tiny_further
from tests.hugging_face.families import furthest
from tests.support.local_pipelines import on_ranks

pytest.importorskip("transformers")

LARGEST = 1e-6
LANGUAGE, LANGUAGE_BY_NAME = ["model.language_model.layers"], {"smolvlm": ["model.text_model.layers"]}
PIXELS = "pixel_values"
on_both = pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
SOME_MODELS = [
    "llava",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "internvl")),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("smolvlm", "paligemma", "mistral3")),
]


def batches_of(name):
    """Return a batch with images, the same with words in the place of images, and labels."""
    batch, labels = tiny_further.batch_of(name)
    words = batch["input_ids"].masked_fill(batch["input_ids"] >= tiny_further.IMAGE, 5)
    text = {"input_ids": words, "attention_mask": batch["attention_mask"]}
    text |= {key: torch.zeros_like(value) for key, value in batch.items() if key.endswith("token_type_ids")}
    return batch, text, labels


def trained(name, num_ranks, *batches, example=None, chains=None):
    """Take a step with each batch, and compare it with the model itself."""
    model = tiny_further.model_of(name).train()
    _, _, labels = batches_of(name)
    wanted = [tiny_further.reference(copy.deepcopy(model), name, batch, labels) for batch in batches]

    def train(transport):
        layers = ps.from_transformers(copy.deepcopy(model), example=example, chains=chains)
        where = {"ranks": 1} if num_ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(layers, "1f1b", tiny_further.NUM_MICROBATCHES, **where)
        for batch, (loss, gradients) in zip(batches, wanted, strict=True):
            found = pipeline.step(**batch, target=labels).loss.item()
            grads = {key: each.grad for key, each in pipeline.named_parameters() if each.grad is not None}
            assert found == pytest.approx(loss, rel=LARGEST)
            ties = model.all_tied_weights_keys
            none = {key: torch.zeros_like(each) for key, each in grads.items() if key not in ties}  # without images
            assert furthest(grads, {**none, **gradients}, ties) < LARGEST
            for parameter in pipeline.parameters():
                parameter.grad = None

    on_ranks(num_ranks, train)


def refusal(name, num_ranks, batch, *, example):
    """Return the message of the first step with a batch; no weight has changed and no gradient is there."""
    model = tiny_further.model_of(name).train()
    _, _, labels = batches_of(name)

    def train(transport):
        layers = ps.from_transformers(copy.deepcopy(model), example=example)
        where = {"ranks": 1} if num_ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(layers, "1f1b", tiny_further.NUM_MICROBATCHES, **where)
        try:
            pipeline.step(**batch, target=labels)
        finally:
            assert all(each.grad is None for each in pipeline.parameters())

    with pytest.raises(ps.PenstockError) as caught:
        on_ranks(num_ranks, train)
    return str(caught.value)


@on_both
@pytest.mark.parametrize("name", SOME_MODELS)
def test_a_model_that_is_cut_with_its_tower_refuses_batches_without_images(name, num_ranks):
    batch, text, _ = batches_of(name)
    without_pixels = {key: value for key, value in batch.items() if key != PIXELS}

    for given in (text, without_pixels, {**batch, PIXELS: None}):
        message = refusal(name, num_ranks, given, example=batch)
        assert "no 'pixel_values', without which" in message
        assert "chains=" in message


@on_both
@pytest.mark.parametrize("name", SOME_MODELS)
def test_images_without_tokens_for_them_are_refused_with_the_words_of_the_model(name, num_ranks):
    batch, text, _ = batches_of(name)

    message = refusal(name, num_ranks, {**batch, **text}, example=batch)

    assert "mage" in message
    assert "token" in message


@on_both
@pytest.mark.parametrize("name", SOME_MODELS)
def test_a_model_that_is_cut_at_its_language_model_takes_batches_with_images_and_without(name, num_ranks):
    batch, text, _ = batches_of(name)

    trained(name, num_ranks, batch, text, batch, example=batch, chains=LANGUAGE_BY_NAME.get(name, LANGUAGE))
    trained(name, num_ranks, text, batch, text, example=text)


@on_both
@pytest.mark.parametrize("chains", [None, LANGUAGE])
def test_a_batch_that_goes_without_images_behind_one_with_them_leaves_the_weights(chains, num_ranks):
    batch, text, labels = batches_of("llava")
    model = tiny_further.model_of("llava").train()

    def train(transport):
        layers = ps.from_transformers(copy.deepcopy(model), example=batch, chains=chains)
        where = {"ranks": 1} if num_ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(layers, "1f1b", tiny_further.NUM_MICROBATCHES, **where)
        pipeline.step(**batch, target=labels)
        before = [each.grad.clone() for each in pipeline.parameters() if each.grad is not None]
        if chains is None:
            with pytest.raises(ps.StepRefused, match="no 'pixel_values'"):
                pipeline.step(**text, target=labels)
            after = [each.grad for each in pipeline.parameters() if each.grad is not None]
            assert all(map(torch.equal, before, after))
        else:
            pipeline.step(**text, target=labels)
        pipeline.step(**batch, target=labels)

    on_ranks(num_ranks, train)


def test_an_example_that_lacks_keywords_is_refused_with_their_names():
    batch, _, _ = batches_of("qwen3_vl")
    model = tiny_further.model_of("qwen3_vl")

    for absent in ("input_ids", "image_grid_thw", "mm_token_type_ids"):
        example = {key: value for key, value in batch.items() if key != absent}
        with pytest.raises(ps.ConfigError, match=rf"the example fails: .*absent: .*{absent}"):
            ps.from_transformers(model, example=example)
    with pytest.raises(ps.ConfigError, match=r"made-up batch does not come to 'model.visual.blocks.0'. Pass example="):
        ps.from_transformers(model)


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["input_ids", "image_grid_thw", "mm_token_type_ids"])
def test_a_batch_without_a_keyword_that_the_model_needs_is_refused_by_its_name(absent):
    batch, labels = tiny_further.batch_of("qwen3_vl")
    split, specs = tiny_further.split_batch("qwen3_vl", batch)
    layers = ps.from_transformers(tiny_further.model_of("qwen3_vl"), example=batch)
    pipeline = ps.Pipeline(layers, "1f1b", tiny_further.NUM_MICROBATCHES, specs=specs, ranks=1)

    with pytest.raises(ps.PenstockError, match=f"the batch has no '{absent}', which"):
        pipeline.step(**{key: value for key, value in split.items() if key != absent}, target=labels)
    assert all(each.grad is None for each in pipeline.parameters())
