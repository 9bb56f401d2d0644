"""Classifiers and other heads of transformers: the tokens that they pool by reach them, or they are refused by name."""

import copy
import re

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from tests.hugging_face.families import config_of
from tests.support.local_pipelines import on_ranks

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, LABELS, NUM_MICROBATCHES, LARGEST = 8, 7, 3, 4, 1e-6
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "gpt_neox")
QUICK = ("llama",)
WORDS = r"input_ids|pool|classif|Classification|ps\.cut|head"


def model_of(family, kind):
    """Return a tiny model with another head, in float64, or skip where the family has none."""
    torch.manual_seed(0)
    config = config_of(family, num_labels=LABELS, pad_token_id=0, classifier_dropout=0.0)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    if type(config) not in auto._model_mapping:
        pytest.skip(f"transformers has no {kind} of {family}")
    return auto.from_config(config).double().train()


def batch_of(is_padded):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([7, 3, 5, 1, 6, 7, 2, 4]) if is_padded else torch.full((ROWS,), LENGTH)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    tokens = torch.randint(3, 60, (ROWS, LENGTH), generator=generator).masked_fill(~mask, 0)
    return tokens, {"attention_mask": mask.long()} if is_padded else {}


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def accumulated(model, tokens, keywords, target):
    """Return the gradients of the model itself, and its logits."""
    model = copy.deepcopy(model)
    for rows in torch.arange(ROWS).chunk(NUM_MICROBATCHES):
        own = {name: value[rows] for name, value in keywords.items()}
        (loss_of(model(tokens[rows], **own).logits, target[rows]) / NUM_MICROBATCHES).backward()
    with torch.no_grad():
        logits = model.eval()(tokens, **keywords).logits
    return {name: parameter.grad for name, parameter in model.named_parameters()}, logits


def assert_right(model, tokens, keywords, target, num_ranks):
    """A pipeline has the gradients and the logits of the model itself; it may be refused by name."""
    wanted, logits = accumulated(model, tokens, keywords, target)
    largest = max(gradient.abs().max() for gradient in wanted.values())

    def train(transport):
        pipeline = ps.Pipeline(
            ps.from_transformers(copy.deepcopy(model)), "1f1b", NUM_MICROBATCHES, loss_of, transport=transport
        )
        pipeline.step(tokens, target=target, **keywords)
        outputs = pipeline.evaluate(tokens, return_outputs=True, **keywords).outputs
        return {name: parameter.grad for name, parameter in pipeline.named_parameters()}, outputs

    for gradients, outputs in on_ranks(num_ranks, train):
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).abs().max() <= LARGEST * largest, name
        if outputs is not None:
            outputs = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
            torch.testing.assert_close(outputs, logits, rtol=1e-6, atol=1e-6)


def check(model, is_padded, target, num_ranks):
    tokens, keywords = batch_of(is_padded)
    message = ""
    try:
        assert_right(model, tokens, keywords, target, num_ranks)
    except ps.PenstockError as error:
        message = str(error)
    assert not message or re.search(WORDS, message), message


CASES = [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("is_padded", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CASES)
def test_a_classifier_pools_by_the_last_token_of_each_row_or_is_refused(family, is_padded, num_ranks):
    target = torch.arange(ROWS) % LABELS

    check(model_of(family, "SequenceClassification"), is_padded, target, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_classifier_of_tokens_is_right_or_refused(family, is_padded):
    target = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % LABELS

    check(model_of(family, "TokenClassification"), is_padded, target, 2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_for_questions_which_returns_two_logits_is_right_or_refused(family):
    model = model_of(family, "QuestionAnswering")
    tokens, keywords = batch_of(True)
    try:
        pipeline = ps.Pipeline(
            ps.from_transformers(model), "1f1b", NUM_MICROBATCHES, lambda output, target: output[0].mean(), ranks=1
        )
        loss = pipeline.step(tokens, target=tokens, **keywords).loss
    except ps.PenstockError as error:
        loss = str(error)
    if isinstance(loss, str):
        assert re.search(WORDS + "|Question", loss)
    else:
        torch.testing.assert_close(loss, model(tokens, **keywords).start_logits.mean().detach())
