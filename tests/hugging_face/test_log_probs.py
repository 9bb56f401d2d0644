"""Log-probabilities of a pipeline are those of the model to the bit, and gradients those of its own loss."""

import copy

import pytest
import torch

import penstock as ps
from penstock.errors import ConfigError, PipelineError
from tests.hugging_face.families import FAMILIES, accumulated, batch_of, config_of, furthest, model_of
from tests.support.local_pipelines import error_of, on_ranks, zero

pytest.importorskip("transformers")


def model_ending_by(end):
    """Return a Llama whose logits are `end(model, hidden, mask)`."""
    import transformers

    class Ended(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, use_cache=None):
            output = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
            logits = end(self, output.last_hidden_state, attention_mask)
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    torch.manual_seed(0)
    model = Ended(config_of("llama"))
    model.loss_type = "ForCausalLM"
    return model.train()


def sum_of(log_probs, target):
    return ps.LossOutput(-log_probs.sum(), (target[:, 1:] != -100).sum(), reported=log_probs)


def log_probs_of(model, tokens, labels, keywords):
    """Compute what a pipeline must report, microbatch by microbatch, in one process."""
    found = []
    for begin in range(0, len(tokens), 2):
        rows = slice(begin, begin + 2)
        with torch.no_grad():
            own = {name: value[rows] for name, value in keywords.items()}
            logits = model(tokens[rows], use_cache=False, **own).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[rows, 1:, None]).squeeze(-1)
        found.append(torch.where(labels[rows, 1:] != -100, chosen, 0))
    return found


QUICK = [("llama", "1f1b", 2, 5, "packed", {}), ("gemma2", "zbv", 2, 4, "padded", {"tie_word_embeddings": True})]
SLOW = [
    *((family, "interleaved-1f1b", 2, 7, "plain", {}) for family in FAMILIES),
    ("llama", "zb-h1", 4, "auto", "padded", {"tie_word_embeddings": True}),
    ("gpt2", "1f1b", 1, 4, "plain", {}),
]


@pytest.mark.feature("X56")
@pytest.mark.parametrize(
    ("family", "schedule", "ranks", "chunk", "kind", "changes"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_log_probs_are_those_of_the_model_and_gradients_too(family, schedule, ranks, chunk, kind, changes):
    model = model_of(family, "eager" if family == "gemma2" else "sdpa", **changes).train()
    tokens, labels, keywords = batch_of(kind)
    loss, gradients = accumulated(copy.deepcopy(model), tokens, labels, keywords)
    layers = ps.from_transformers(copy.deepcopy(model))

    def case(transport):
        function = layers.log_probs(sum_of, chunk=chunk)
        with ps.Pipeline(layers, schedule, 4, function, count=layers.count, transport=transport) as pipeline:
            result = pipeline.step(tokens, target=labels, **keywords)
            evaluated = pipeline.evaluate(tokens, target=labels, **keywords)
            own = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
            return result.loss.item(), own, result.reported, evaluated.reported

    found = on_ranks(ranks, case)

    expected = log_probs_of(model, tokens, labels, keywords)
    assert [rank_loss for rank_loss, *_ in found] == pytest.approx([loss] * ranks, rel=1e-6)
    assert max(furthest(own, gradients, model.all_tied_weights_keys) for _, own, *_ in found) < 1e-6
    (reported,) = [pair for *_, trained, evaluated in found if trained for pair in [(trained, evaluated)]]
    for values in reported:
        assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))


def test_the_chunked_cross_entropy_is_the_loss_of_the_model_with_its_count_and_its_shift():
    model = model_of("llama")
    tokens, labels, keywords = batch_of("padded")
    layers = ps.from_transformers(model)
    wanted = ps.Pipeline(layers, "1f1b", 4, ranks=1).step(tokens, target=labels, **keywords)
    pipeline = ps.Pipeline(layers, "1f1b", 4, ps.losses.chunked_cross_entropy, ranks=1)

    torch.testing.assert_close(pipeline.step(tokens, target=labels, **keywords).loss, wanted.loss)
    assert pipeline.options.count is not None
    assert pipeline.evaluate(tokens, return_outputs=True, **keywords).outputs.shape == (*tokens.shape, 64)


def test_a_frozen_head_is_left_alone_and_what_is_before_it_trains():
    layers = ps.from_transformers(model_of("llama"))
    layers.whole.lm_head.requires_grad_(False)
    tokens, labels, _ = batch_of("plain")
    pipeline = ps.Pipeline(layers, "1f1b", 4, layers.log_probs(sum_of), count=layers.count, ranks=1)
    pipeline.step(tokens, target=labels)

    assert layers.whole.lm_head.weight.grad is None
    assert layers.whole.model.norm.weight.grad.any()


def test_a_model_that_is_no_decoder_and_one_whose_last_layer_does_more_are_refused():
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    masked = ps.from_transformers(
        transformers.BertConfig(**sizes, num_attention_heads=2, architectures=["BertForMaskedLM"])
    )
    balanced = ps.from_transformers(model_of("mixtral", output_router_logits=True))

    for layers in (masked, balanced):
        error = error_of(ps.Pipeline, layers, "1f1b", 4, layers.log_probs(sum_of), ranks=1)
        assert isinstance(error, ConfigError)
        assert "does not say that it treats each position alone" in str(error)


def test_a_label_of_another_vocabulary_is_refused_on_all_ranks_and_the_next_step_runs():
    layers = ps.from_transformers(model_of("llama"))
    tokens, labels, _ = batch_of("plain")
    wrong = labels.clone()
    wrong[5, 5] = 64

    def case(transport):
        loss = layers.log_probs(sum_of)
        with ps.Pipeline(layers, "1f1b", 4, loss, count=layers.count, transport=transport) as pipeline:
            error = error_of(pipeline.step, tokens, target=wrong)
            zero(pipeline)
            return error, pipeline.step(tokens, target=labels).loss

    for error, loss in on_ranks(2, case):
        assert isinstance(error, PipelineError)
        assert "label 64, but the model has a vocabulary of 64; take the tokenizer of the model" in str(error)
        assert loss > 0


def test_a_cap_that_its_owner_changes_between_steps_counts_from_the_next_one():
    model = model_of("gemma2", "eager")
    tokens, labels, _ = batch_of("plain")
    layers = ps.from_transformers(model)
    pipeline = ps.Pipeline(layers, "1f1b", 4, layers.log_probs(sum_of, chunk=5), count=layers.count, ranks=1)
    for cap in (30.0, 0.05):
        model.config.final_logit_softcapping = cap
        loss, gradients = accumulated(copy.deepcopy(model), tokens, labels, {})
        result = pipeline.step(tokens, target=labels)

        assert result.loss.item() == pytest.approx(loss, rel=1e-6)
        own = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        assert furthest(own, gradients, model.all_tied_weights_keys) < 1e-6
        zero(pipeline)


def test_an_end_that_is_another_one_in_training_is_that_of_the_step():
    model = model_ending_by(lambda model, hidden, mask: model.lm_head(hidden) * (3 if model.training else 1))
    tokens, labels, _ = batch_of("plain")
    layers = ps.from_transformers(model)
    pipelines = [
        ps.Pipeline(layers, "1f1b", 4, loss, count=layers.count, ranks=1)
        for loss in (layers.loss, layers.log_probs(sum_of, chunk=5))
    ]

    wanted, found = ([call(tokens, target=labels).loss for call in (own.step, own.evaluate)] for own in pipelines)

    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_an_end_that_needs_a_tensor_of_the_model_itself_is_refused_when_the_pipeline_is_made(kind):
    model = model_ending_by(lambda model, hidden, mask: model.lm_head(hidden) * model.gain)
    if kind == "buffer":
        model.register_buffer("gain", torch.full((64,), 2.0))
    else:
        model.gain = torch.nn.Parameter(torch.full((64,), 2.0))
    tokens, labels, _ = batch_of("plain")
    layers = ps.from_transformers(model)

    def case(transport):
        return error_of(ps.Pipeline, layers, "1f1b", 4, layers.log_probs(sum_of), transport=transport)

    for error in on_ranks(2, case):
        assert isinstance(error, ConfigError)
        assert "computes with 'gain' of the model (Ended) beside its hidden state; put that into a submod" in str(error)
    assert ps.Pipeline(layers, "1f1b", 4, ranks=1).step(tokens, target=labels).loss > 0


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda model, hidden, mask: model.lm_head(hidden - hidden.mean(1, keepdim=True) / 2), "depends on other ones"),
        (
            lambda model, hidden, mask: model.lm_head(hidden if mask is None else hidden * mask[..., None]),
            "with a tensor of shape (1, 3, 1)",
        ),
    ],
    ids=["positions", "mask"],
)
def test_an_end_that_needs_more_than_a_position_is_refused_with_chunks_of_any_size(end, told):
    layers = ps.from_transformers(model_ending_by(end))
    tokens, labels, keywords = batch_of("padded")
    pipeline = ps.Pipeline(layers, "1f1b", 4, layers.log_probs(sum_of), count=layers.count, ranks=1)

    error = error_of(pipeline.step, tokens, target=labels, **keywords)

    assert isinstance(error, PipelineError)
    assert told in str(error)
