"""Text after a prompt: what the model gives its next token by itself, the same on any ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import penstock as ps
from penstock.checkpoints.weight_files import save_weights
from penstock.errors import CheckpointError, ConfigError
from penstock.models import DecoderConfig, decoder_layers
from penstock.pipeline import Pipeline
from penstock.train.data.tokenizer import Tokenizer, load_tokenizer
from penstock.train.generation import as_text, generate, load_trained, prompt_tokens
from penstock.train.settings.config import config_from_table
from penstock.train.settings.sections import SampleSection
from tests.hugging_face.families import model_of
from tests.support.local_pipelines import on_ranks
from tests.train.tiny_runs import tiny_table

BYTES = load_tokenizer("bytes")
ENDLESS = replace(BYTES, end_of_document=None)
LENGTH = 8
SHAPE = DecoderConfig(width=16, layers=6, heads=2, key_value_heads=1, hidden=16, vocabulary=256, length=LENGTH)
GREEDY, DRAWN = SampleSection(tokens=12, temperature=0), SampleSection(tokens=12)
PROMPT = list(b"pipe")


def layers():
    return decoder_layers(SHAPE, seed=3)


def one_process(num_tokens):
    """The likeliest tokens, from the modules alone, one after another, without any padding."""
    modules = [layer() for layer in layers()]
    text = list(PROMPT)
    for _ in range(num_tokens):
        values = torch.tensor([text[-LENGTH:]])
        for module in modules:
            values = module(values)
        text.append(int(values[0, -1].argmax()))
    return text[len(PROMPT) :]


def generated(wires, schedule, microbatches, section, options, seed=0):
    pipeline = Pipeline(layers(), schedule, microbatches, transport=wires, **options)
    return list(generate(pipeline, PROMPT, ENDLESS, section, length=LENGTH, seed=seed))


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "microbatches", "options"),
    [
        (1, "gpipe", 1, {}),
        (3, "1f1b", 4, {}),
        (2, "zbv", 4, {}),
        (2, "dualpipe", 4, {}),
        (2, "seq1f1b", 2, {"slices": 4}),
    ],
)
def test_the_likeliest_tokens_are_those_of_the_modules_alone_beyond_the_models_length_too(
    num_ranks, schedule, microbatches, options
):
    found = on_ranks(num_ranks, generated, schedule, microbatches, GREEDY, options)

    assert found == [one_process(12)] * num_ranks


def test_draws_are_the_same_on_any_ranks_and_others_with_another_seed():
    [alone] = on_ranks(1, generated, "gpipe", 1, DRAWN, {}, 1)

    assert on_ranks(2, generated, "1f1b", 4, DRAWN, {}, 1) == [alone, alone]
    assert on_ranks(1, generated, "gpipe", 1, DRAWN, {}, 2) != [alone]


# ---- a model of transformers


def llama(**changes):
    return model_of("llama", vocab_size=256, **changes).eval()


@pytest.mark.parametrize(("length", "reads_once"), [(64, True), (15, False)])
def test_a_model_of_transformers_reads_each_token_once_where_it_has_positions_for_the_text(length, reads_once):
    model = llama(max_position_embeddings=length)
    text, shapes = list(PROMPT), []
    for _ in range(GREEDY.tokens):
        text.append(int(model(torch.tensor([text[-LENGTH:]] if not reads_once else [text])).logits[0, -1].argmax()))
    layers, evaluate = ps.from_transformers(model), Pipeline.evaluate

    def noted(pipeline, rows, **keywords):
        shapes.append(tuple(rows.shape))
        return evaluate(pipeline, rows, **keywords)

    def case(wires):
        pipeline = Pipeline(layers, "1f1b", 2, transport=wires)
        pipeline.evaluate = partial(noted, pipeline)
        return list(generate(pipeline, PROMPT, ENDLESS, GREEDY, length=LENGTH))

    assert on_ranks(2, case) == [text[len(PROMPT) :]] * 2
    assert set(shapes) == ({(1, len(PROMPT)), (1, 1)} if reads_once else {(1, LENGTH)})


def test_a_model_of_which_layers_keep_nothing_is_read_as_a_whole_again():
    model = llama()
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, past_key_values=None, **kwargs: forward(*args, past_key_values=None, **kwargs)
    section = SampleSection(tokens=2, temperature=0)

    with Pipeline(ps.from_transformers(model), "gpipe", 1, ranks=1) as pipeline:
        found = list(generate(pipeline, PROMPT, ENDLESS, section, length=LENGTH))

    text = list(PROMPT)
    for _ in found:
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert found == text[len(PROMPT) :]


# ---- tokens and text


class Likes(torch.nn.Module):
    def __init__(self, token):
        super().__init__()
        self.token = token

    def forward(self, tokens):
        return torch.nn.functional.one_hot(torch.full_like(tokens, self.token), 6).double()


@pytest.mark.parametrize(("token", "end", "expected"), [(2, 2, []), (2, None, [2, 2, 2]), (5, None, [0, 0, 0])])
def test_the_end_of_a_document_ends_the_text_and_a_token_that_the_tokenizer_lacks_is_never_taken(token, end, expected):
    pipeline, tokenizer = Pipeline([Likes(token)], "gpipe", 1), Tokenizer("of a test", 4, None, None, end)

    found = list(generate(pipeline, [1], tokenizer, SampleSection(tokens=3, temperature=0), length=4))

    assert found == expected


def test_a_character_of_several_tokens_is_shown_when_it_is_whole():
    pieces = list(as_text("né…".encode(), BYTES.decode))

    assert "".join(pieces) == "né…"
    assert pieces[:2] == ["n", "é"]
    # What never becomes one, and what would move the cursor, is shown as unknown.
    assert "".join(as_text(b"a\xff\x1b[2J\tb\n\xc3", BYTES.decode)) == "a\ufffd\ufffd[2J\tb\n\ufffd"


def test_a_prompt_without_tokens_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"^--prompt: '' has no tokens"):
        prompt_tokens(BYTES, "", key="--prompt")

    assert prompt_tokens(BYTES, "né", key="--prompt") == [110, 195, 169]


# ---- the model of a run


def config_of(folder, *, tied):
    model = {"layers": 2, "tied_head": tied}
    return config_from_table(tiny_table(folder, "text.txt", model=model, batch={"length": LENGTH}))


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_a_run_are_loaded_by_their_names_tied_ones_under_both(tmp_path, tied):
    config = config_of(tmp_path, tied=tied)
    shape = config.model.model_copy(update={"vocabulary": 256, "length": LENGTH})
    trained = Pipeline(decoder_layers(shape, seed=5), "gpipe", 1)
    save_weights(tmp_path, trained)

    with load_trained(config) as pipeline:
        found = pipeline.state_dict()

    expected = trained.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(found["head.weight"], found["embedding.weight"]) is tied


def test_weights_that_are_missing_broken_or_another_models_are_refused_with_the_folder(tmp_path):
    path = tmp_path / "weights.safetensors"
    others = {"layers": 3, "width": 16, "heads": 2, "key_value_heads": 1, "hidden": 16, "vocabulary": 256, "length": 8}
    cases = {
        "holds neither weights nor a checkpoint": lambda: None,
        "cannot be read": lambda: path.write_bytes(b"\x01\x02"),
        "is of another model": lambda: save_weights(
            tmp_path, Pipeline(decoder_layers(DecoderConfig(**others)), "gpipe", 1)
        ),
    }
    for text, prepare in cases.items():
        prepare()
        with pytest.raises(CheckpointError, match=text) as caught, load_trained(config_of(tmp_path, tied=False)):
            pass
        assert str(tmp_path) in str(caught.value)
