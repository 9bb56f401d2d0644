"""Models that follow one another, as an encoder and a decoder, train under a chain of schedules as in one process."""

from functools import partial

import pytest
import torch
from hypothesis import given
from torch import nn

import penstock as ps
from penstock.errors import StepRefused
from penstock.ir.chain import chain
from penstock.schedules import build
from tests.support.local_pipelines import (
    LENGTH,
    NEARLY,
    VOCABULARY,
    WIDTH,
    Outcome,
    Task,
    assert_errors,
    block,
    difference,
    differences_on_gloo,
    errors_before_a_right_step,
    float_layers,
    float_task,
    mistakes,
    on_pipelines,
    second_step,
    settle,
    token_loss,
    values,
)
from tests.support.mesh_pipelines import Job
from tests.support.reference import reference_evaluate
from tests.support.sharded_pipelines import NONE, ONE, compared, ways
from tests.support.strategies import feasible_schedules

FLOAT64 = torch.float64
MICROBATCHES = 4


def chained(*names, ranks=2, **options):
    return chain(*(build(name, ranks=ranks, microbatches=MICROBATCHES) for name in names), **options)


def deep_task(num_layers=16, rows=8):
    task = float_task(rows, FLOAT64)
    task.make_layers = partial(float_layers, FLOAT64, num_layers)
    return task


def mistakes_in_bits(task, schedule, **options):
    """How a second step, on known shapes, differs from the unsplit model in any bit."""
    outcomes = on_pipelines(schedule.num_ranks, task, lambda own: second_step(own, task), schedule, None, **options)
    return difference(outcomes, task.reference(schedule.num_microbatches))


@pytest.mark.feature("X25")
@pytest.mark.parametrize(
    ("encoder", "decoder", "ranks"),
    [
        ("1f1b", "zb-h1", 2),
        ("zbv", "interleaved-1f1b", 2),
        pytest.param("zb-h1", "zbv", 4, marks=pytest.mark.slow),
        pytest.param("v-half", "gpipe", 4, marks=pytest.mark.slow),
        pytest.param("dualpipe-v", "looped-bfs", 2, marks=pytest.mark.slow),
    ],
)
def test_two_models_train_bit_for_bit_as_in_one_process(encoder, decoder, ranks):
    assert mistakes_in_bits(deep_task(), chained(encoder, decoder, ranks=ranks)) == []


@pytest.mark.feature("X25", "X46")
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[1, 0], [0, 1]], [[2], [0, 1]], [[0], [0, 1]]])
def test_models_on_ranks_of_their_own_train_bit_for_bit(ranks):
    schedules = [build("zb-h1", ranks=len(own), microbatches=MICROBATCHES) for own in ranks]

    assert mistakes_in_bits(deep_task(4), chain(*schedules, ranks=ranks)) == []


@pytest.mark.parametrize("messages", ["coalesced", "rendezvous"])
def test_messages_may_travel_in_other_ways(messages):
    assert mistakes_in_bits(deep_task(8), chained("zbv", "interleaved-1f1b"), messages=messages) == []


def test_forwards_of_the_first_model_may_run_again():
    first, second = (build(name, ranks=2, microbatches=MICROBATCHES) for name in ("zb-h1", "1f1b"))

    assert mistakes_in_bits(deep_task(4), chain(ps.with_recompute(first), second)) == []


def test_two_routes_train_nearly_as_one_process():
    assert mistakes(deep_task(8), chained("dualpipe", "chimera")) == []


@pytest.mark.slow
@given(feasible_schedules())
def test_any_schedule_trains_in_front_of_itself(schedule):
    if not schedule.is_forward_only:
        task = deep_task(2 * len(schedule.placement.routes[0]), 2 * schedule.num_microbatches)
        task.inputs = (values(1, 2 * schedule.num_microbatches, 4, WIDTH, dtype=FLOAT64),)
        task.target = values(2, 2 * schedule.num_microbatches, 4, WIDTH, dtype=FLOAT64)

        assert mistakes(task, chain(schedule, schedule)) == []


# ---- an encoder and a decoder that reads its output in every layer


class Memory(nn.Module):
    """The end of the encoder, which hands its output to all layers of the decoder, and a dict to the first one."""

    def __init__(self):
        super().__init__()
        self.norm, self.memory = nn.LayerNorm(WIDTH, dtype=FLOAT64), ps.Skip("memory")

    def forward(self, x):
        x = self.norm(x)
        self.memory.put(x)
        return {"mean": x.mean(1, keepdim=True), "factor": 0.1}


class Start(nn.Module):
    """The begin of the decoder: tokens of its own in place of the encoder's output."""

    def __init__(self):
        super().__init__()
        self.embedding = settle(nn.Embedding(VOCABULARY, WIDTH, dtype=FLOAT64), 7)

    def forward(self, encoded, *, decoder_tokens):
        return self.embedding(decoder_tokens) + encoded["factor"] * encoded["mean"]


class Attending(nn.Module):
    """A layer of the decoder."""

    def __init__(self, seed):
        super().__init__()
        self.inner, self.memory = block(seed, FLOAT64), ps.Skip("memory")

    def forward(self, x):  # [batch, seq, width]
        memory = self.memory.get()
        return x + self.inner((x @ memory.transpose(1, 2)).softmax(-1) @ memory)


def translator(*, is_tied=False):
    encoder = [settle(nn.Embedding(VOCABULARY, WIDTH, dtype=FLOAT64), 6), *float_layers(FLOAT64, 2), Memory()]
    decoder = [Start(), Attending(1), Attending(2), settle(nn.Linear(WIDTH, VOCABULARY, dtype=FLOAT64), 8)]
    if is_tied:
        decoder[0].embedding.weight = decoder[-1].weight = encoder[0].weight
    return [*encoder, *decoder]


def translation(rows=8, **options):
    generator = torch.Generator().manual_seed(3)
    source, tokens, target = torch.randint(VOCABULARY, (3, rows, LENGTH), generator=generator)
    return Task(partial(translator, **options), (source,), target, token_loss, keywords={"decoder_tokens": tokens})


@pytest.mark.feature("X25")
@pytest.mark.parametrize(
    ("encoder", "decoder", "ranks"),
    [("1f1b", "zb-h1", 2), pytest.param("zb-h1", "1f1b", 4, marks=pytest.mark.slow), ("zbv", "1f1b", 2)],
)
def test_a_decoder_reads_the_encoders_output_in_every_layer(encoder, decoder, ranks):
    assert mistakes(translation(), chained(encoder, decoder, ranks=ranks)) == []


@pytest.mark.feature("X25")
@pytest.mark.parametrize(("encoder", "decoder"), [("1f1b", "1f1b"), ("zb-h1", "zbv")])
def test_encoder_and_decoder_may_share_an_embedding(encoder, decoder):
    task = translation(is_tied=True)

    found = on_pipelines(2, task, lambda own: second_step(own, task), chained(encoder, decoder), None)

    # On the rank of the first embedding, others are that one.
    names = {name for outcome in found for name in outcome.gradients}
    result, gradients = task.reference(MICROBATCHES)
    assert gradients.keys() - names <= {"4.embedding.weight", "7.weight"}
    assert difference(found, (result, {name: gradients[name] for name in names}), **NEARLY) == []


def test_an_evaluation_is_that_of_one_process():
    task = translation()

    def evaluate(own):
        return Outcome(own.evaluate(*task.inputs, target=task.target, return_outputs=True, **task.keywords), {})

    found = on_pipelines(2, task, evaluate, chained("zb-h1", "zbv"), None)

    expected = reference_evaluate(
        task.make_layers(), task.inputs, task.keywords, task.target, loss=token_loss, num_microbatches=MICROBATCHES
    )
    assert difference(found, (expected, {})) == []
    assert torch.equal(found[0].result.outputs, torch.cat(expected.outputs))  # where the last stage of zbv is


def test_a_frozen_encoder_gets_no_gradients():
    def layers():
        frozen = float_layers(FLOAT64, 8)
        nn.ModuleList(frozen[:4]).requires_grad_(False)
        return frozen

    task = deep_task()
    task.make_layers = layers

    assert mistakes_in_bits(task, chained("1f1b", "zb-h1")) == []


def test_a_step_may_follow_one_that_failed():
    task, schedule = translation(), chained("1f1b", "zbv")

    def wrong(own):
        own.step(*task.inputs, target=task.target[:, :2], **task.keywords)

    errors = errors_before_a_right_step(2, task, wrong, schedule)

    assert_errors(errors, ps.PipelineError, "rank 0", "5F0", "Expected input batch_size (6) to match")


def test_a_batch_without_the_decoders_tokens_is_refused():
    task = translation()

    def wrong(own):
        return own.step(*task.inputs, target=task.target, tokens=task.keywords["decoder_tokens"])

    errors = errors_before_a_right_step(2, task, wrong, chained("1f1b", "zb-h1"))

    assert_errors(errors, StepRefused, "no layer's forward names 'tokens'", "decoder_tokens")


@pytest.mark.feature("X25")
@ways("setting", (NONE,), slow=[(ONE,)])
def test_replicas_train_as_one_process(setting):
    assert compared(2, 2, Job([8, 8]), chained("1f1b", "zb-h1"), **setting) == []


def cases_on_gloo():
    return [
        (deep_task(), chained("zb-h1", "interleaved-1f1b"), MICROBATCHES, {}),
        (translation(), chained("1f1b", "zb-h1"), MICROBATCHES, {}),
    ]


@pytest.mark.feature("X25")
@pytest.mark.slow
def test_two_models_train_between_processes(two_ranks):
    assert differences_on_gloo(two_ranks, cases_on_gloo, second_step, **NEARLY) == [[], []]
