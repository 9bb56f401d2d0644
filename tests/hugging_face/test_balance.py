"""The balance of experts is one loss over all layers, whatever the split."""

import pytest
import torch

import penstock as ps
from penstock.errors import ConfigError
from penstock.hugging_face.balance import Balance
from tests.hugging_face.families import NUM_MICROBATCHES, accumulated, batch_of, furthest, model_of
from tests.hugging_face.test_from_transformers import LARGEST, trained

pytest.importorskip("transformers")

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def reference(model, tokens, labels, keywords):
    """Return gradients and the mean balance loss of the model itself, one microbatch after another."""
    losses = []

    def loss_of(output):
        losses.append(output.aux_loss.item())
        balance = BALANCED["router_aux_loss_coef"] * output.aux_loss
        return output.loss - balance + balance / NUM_MICROBATCHES

    _, gradients = accumulated(model, tokens, labels, keywords, loss_of)
    return gradients, sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("family", "kind", "schedule", "ranks"),
    [
        pytest.param("mixtral", "plain", "1f1b", 2, marks=pytest.mark.slow),
        ("mixtral", "padded", "zbv", 2),
        ("qwen3_moe", "padded", "interleaved-1f1b", 1),
        pytest.param("qwen3_moe", "packed", "1f1b", 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_model_with_its_balance_loss(family, kind, schedule, ranks):
    model = model_of(family, **BALANCED)
    tokens, labels, keywords = batch_of(kind)
    wanted, _ = reference(model, tokens, labels, keywords)

    layers = ps.from_transformers(model)

    for _, found, _ in trained(layers, schedule, ranks, tokens, labels, keywords, num_steps=1):
        assert furthest(found, wanted, {}) < LARGEST


def test_the_loss_is_reported_under_its_name_and_recomputing_changes_nothing():
    model = model_of("mixtral", **BALANCED)
    tokens, labels, keywords = batch_of("padded")
    wanted, balance = reference(model, tokens, labels, keywords)
    layers = ps.from_transformers(model)
    options = {"recompute": True, "count": layers.count, "ranks": 1}
    pipeline = ps.Pipeline(layers, "1f1b", NUM_MICROBATCHES, layers.loss, **options)

    result = pipeline.step(tokens, target=labels, **keywords)

    assert result.named_losses["experts"].item() == pytest.approx(balance, rel=1e-6)
    found = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    assert furthest(found, wanted, {}) < LARGEST


def test_layers_that_are_built_later_balance_too():
    model = model_of("mixtral", **BALANCED)
    layers = ps.from_transformers(model.config)
    tokens, labels, keywords = batch_of("plain")

    (_, found, _), *_ = trained(layers, "1f1b", 2, tokens, labels, keywords, num_steps=1)

    assert found["model.layers.0.mlp.gate.weight"].abs().max() > 0


def test_sums_and_loss_are_those_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = model_of("mixtral", **BALANCED)
    balance = Balance(model, [f"model.layers.{number}" for number in range(6)])
    logits = [torch.randn(24, 4) for _ in range(3)]
    mask = (torch.rand(2, 12) > 0.3).long()

    for given in (None, mask):
        found = balance.loss(sum(balance.sums(each, given) for each in logits))
        torch.testing.assert_close(found, load_balancing_loss_func(tuple(logits), 4, 2, given))


def test_a_model_whose_rule_is_not_known_is_refused(monkeypatch):
    model = model_of("mixtral", **BALANCED)
    monkeypatch.setattr(type(model), "_can_record_outputs", {})

    with pytest.raises(ConfigError, match=r"has no load_balancing_loss_func.*set it to False"):
        ps.from_transformers(model)
