"""Losses are those that the models of transformers compute themselves when they are given labels."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.hugging_face.losses import ClassLoss, TokenLoss, loss_of
from tests.hugging_face import tiny_further
from tests.hugging_face.families import config_of

pytest.importorskip("transformers")

OWN = ("t5", "bart", "mbart", "marian", "bert", "roberta", "bert-tokens", "bert-rows")
"""Models that compute a loss in the type of their logits; the loss functions of all others do it in float32."""


@pytest.mark.parametrize("name", [*OWN, "llama-tokens", "modernbert", "llama-rows", "vit", "dinov2", "siglip"])
def test_a_loss_is_that_of_the_model(name):
    model = tiny_further.model_of(name).double().eval()
    batch, labels = tiny_further.batch_of(name)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    with torch.no_grad():
        output = model(**batch, labels=labels)

    loss = loss_of(model)

    tolerance = 1e-12 if name in OWN else 1e-6
    torch.testing.assert_close(loss.mean(output.logits, labels), output.loss, rtol=tolerance, atol=0, check_dtype=False)
    assert loss.count(labels) == (labels != -100).sum()


@pytest.mark.parametrize(
    ("num_labels", "problem_type", "labels"),
    [
        (1, None, torch.randn(4)),
        (1, "regression", torch.randn(4, 1)),
        (3, "regression", torch.randn(4, 3)),
        (3, None, torch.tensor([0, 2, 1, 1])),
        (3, "single_label_classification", torch.tensor([[0], [2], [1], [1]])),
        (3, None, torch.tensor([[0.0, 1, 1]] * 4)),
        (3, "multi_label_classification", torch.tensor([[0.0, 1, 0]] * 4)),
    ],
)
def test_classifiers_have_the_loss_of_their_problem(num_labels, problem_type, labels):
    model = tiny_further.model_of("bert-rows", num_labels=num_labels, problem_type=problem_type).double().eval()
    batch, _ = tiny_further.batch_of("bert-rows")
    labels = labels.double() if labels.is_floating_point() else labels
    loss = loss_of(model)  # before the model notes a problem_type itself
    logits = model(**batch).logits

    found = loss.mean(logits, labels)

    assert model.config.problem_type == problem_type
    torch.testing.assert_close(found, model(**batch, labels=labels).loss, rtol=1e-12, atol=0)
    assert loss.count(labels) == labels.numel()


def test_labels_that_do_not_count_are_left_out_and_none_that_count_is_no_division_by_zero():
    logits, labels = torch.randn(2, 3, 5, dtype=torch.bfloat16), torch.tensor([[1, -100, 2], [-100, 4, 0]])

    found = TokenLoss().mean(logits, labels)

    expected = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found, expected)
    assert (TokenLoss().mean(logits, labels * 0 - 100).item(), TokenLoss().count(labels)) == (0, 4)


def test_labels_and_outputs_that_do_not_fit_are_refused():
    config = SimpleNamespace(problem_type="regression", num_labels=3)

    with pytest.raises(PenstockError, match=r"\(2, 3, 5\) need labels of shape \(2, 3\), but they have \(2, 4\)"):
        TokenLoss().mean(torch.randn(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(PenstockError, match=r"\(2, 3\) need labels of the same shape, but they have \(2,\)"):
        ClassLoss(config).mean(torch.randn(2, 3), torch.zeros(2))
    with pytest.raises(PenstockError, match="the output of the model is a dict without logits; pass Pipeline a loss"):
        TokenLoss().mean({}, torch.zeros(2))


def test_labels_that_are_no_classes_are_refused_by_one_message():
    import transformers

    shifted = loss_of(transformers.LlamaForCausalLM(config_of("llama")))
    for loss, size in ((TokenLoss(), 5), (shifted, 64)):
        logits, labels = torch.randn(1, 3, size), torch.tensor([[0, -7, 2]])
        with pytest.raises(
            PenstockError, match=rf"^label -7; expected one from 0 to {size - 1}, or -100 where nothing"
        ):
            loss.mean(logits, labels)
        with pytest.raises(
            PenstockError, match=f"^label {size}, but the model has a vocabulary of {size}; take the to"
        ):
            loss.mean(logits, labels.clamp(0) + size - 2)
        with pytest.raises(PenstockError, match=r"labels are of torch.int32; expected torch.int64"):
            loss.mean(logits, labels.clamp(0).int())
    shifted.mean(logits, torch.tensor([[-7, 1, 2]]))  # no position is compared with the first label


def test_a_model_without_labels_has_no_loss():
    import transformers

    assert loss_of(transformers.BertModel(tiny_further.config_of("bert"))) is None
