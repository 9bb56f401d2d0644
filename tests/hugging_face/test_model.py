"""The loss of a model: shifted labels, their number, and shapes that do not fit."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import NotSaved, PenstockError
from tests.hugging_face.families import batch_of, model_of
from tests.support.local_pipelines import error_of, on_ranks

pytest.importorskip("transformers")


@pytest.fixture
def model():
    return model_of("llama")


def test_the_loss_is_that_of_the_model_and_counts_all_labels_but_the_first_and_those_of_minus_100(model):
    tokens, labels, _ = batch_of("plain")
    layers = ps.from_transformers(model)
    output = model(tokens, labels=labels)
    unlabeled = torch.full_like(labels, -100)

    torch.testing.assert_close(layers.loss(output.logits, labels), output.loss)
    assert layers.count(labels) == 8 * 11 - 2 * 3
    assert (layers.loss(output.logits, unlabeled).item(), layers.count(unlabeled)) == (0, 0)
    assert layers.config is model.config
    assert layers[-2:] == [*layers][-2:]


def test_labels_of_another_length_are_refused_by_both_shapes(model):
    tokens, labels, _ = batch_of("plain")
    layers = ps.from_transformers(model)
    pipeline = ps.Pipeline(layers, "1f1b", 4, layers.loss, count=layers.count, ranks=1)

    with pytest.raises(PenstockError, match=r"need labels of shape \(2, 12\), but they have \(2, 11\).*not shifted"):
        pipeline.step(tokens, target=labels[:, 1:])


def test_a_pipeline_takes_the_loss_and_the_count_of_the_model(model):
    tokens, labels, keywords = batch_of("padded")
    layers = ps.from_transformers(model)
    wanted = ps.Pipeline(layers, "1f1b", 4, layers.loss, count=layers.count, ranks=1).step(
        tokens, target=labels, **keywords
    )
    pipeline = ps.Pipeline(layers, "1f1b", 4, ranks=1)

    assert pipeline.step(tokens, target=labels, **keywords).loss == wanted.loss
    evaluated = pipeline.evaluate(tokens, return_outputs=True, **keywords)
    assert evaluated.loss is None
    assert evaluated.outputs.shape == (*tokens.shape, 64)
    own = ps.Pipeline(layers, "1f1b", 4, lambda logits, labels: logits.mean() * 0 + 3, ranks=1)
    assert own.step(tokens, target=labels, **keywords).loss == 3
    assert own.options.count is None


def test_what_ranks_have_trained_is_what_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    model_of("mixtral").save_pretrained(tmp_path / "from")
    tokens, labels, _ = batch_of("plain")
    layers = ps.from_transformers(tmp_path / "from")

    def train(transport):
        pipeline = ps.Pipeline(layers, "1f1b", 4, layers.loss, count=layers.count, transport=transport)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        pipeline.step(tokens, target=labels)
        optimizer.step()
        layers.save_pretrained(pipeline, tmp_path / "to")
        return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}

    trained = {name: value for part in on_ranks(2, train) for name, value in part.items()}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "to", output_loading_info=True)

    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert trained.keys() == dict(loaded.named_parameters()).keys()
    assert all(torch.equal(trained[name], parameter) for name, parameter in loaded.named_parameters())
    assert not torch.equal(loaded.model.norm.weight, model_of("mixtral").model.norm.weight)


class Adapted(nn.Module):
    """A linear layer with low-rank matrices beside it, as an adapter wraps it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_a = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden):
        return self.base_layer(hidden) + self.lora_b(self.lora_a(hidden))


def test_a_model_with_adapters_trains_and_is_not_saved_as_its_class(model, tmp_path):
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    layers = ps.from_transformers(model)
    tokens, labels, _ = batch_of("plain")

    def train(transport):
        pipeline = ps.Pipeline(layers, "1f1b", 4, transport=transport)
        pipeline.step(tokens, target=labels)
        return error_of(layers.save_pretrained, pipeline, tmp_path / "to")

    for error in on_ranks(2, train):
        assert type(error) is NotSaved
        assert "the model has 'model.layers.0.self_attn.q_proj.base_layer.weight', " in str(error)
        assert "which LlamaForCausalLM does not have" in str(error)
        assert "merge_and_unload" in str(error)
    assert not (tmp_path / "to").exists()
