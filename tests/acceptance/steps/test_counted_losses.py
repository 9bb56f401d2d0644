"""Named losses with counts of their own train and report, on every rank, what torch alone does with the whole batch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import PipelineError
from tests.support.local_pipelines import (
    IGNORED,
    VOCABULARY,
    Task,
    assert_errors,
    error_of,
    gradients_of,
    named,
    on_pipelines,
    outcome_of,
    token_layers,
)
from tests.support.mesh_pipelines import Job, assert_near, on_mesh, train, whole
from tests.support.sharded_pipelines import ONE

FLOAT64 = torch.float64
ROWS, NUM_TOKENS = 16, 4
MAKE_LAYERS = partial(token_layers, FLOAT64, 6)


def tokens(rows=ROWS):
    return torch.randint(VOCABULARY, (rows, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def labels(rows=ROWS):
    """[rows, length, 2]: the next token, and the one after it; of some rows only one of them is known, or none."""
    target = torch.randint(VOCABULARY, (rows, NUM_TOKENS, 2), generator=torch.Generator().manual_seed(2))
    target[::2, 1:, 1] = IGNORED
    target[:4, :, 1] = IGNORED
    target[2:6, :, 0] = IGNORED
    return target


def count(target):
    return {name: (target[..., index] != IGNORED).sum() for index, name in enumerate(("next", "after"))}


def losses(output, target):
    """Two means over different tokens, each NaN where there are none."""
    entropies = [
        F.cross_entropy(logits.flatten(0, -2), target[..., index].flatten(), ignore_index=IGNORED)
        for index, logits in enumerate((output, output.square()))
    ]
    return {"next": entropies[0], "after": 0.3 * entropies[1]}


def alone(rows=ROWS):
    """The named losses and the gradients by name of torch alone, with the batch in one piece."""
    layers = MAKE_LAYERS()
    loss_by_name = losses(nn.Sequential(*layers)(tokens(rows)), labels(rows))
    sum(loss_by_name.values()).backward()
    return {name: loss.item() for name, loss in loss_by_name.items()}, gradients_of(named(layers))


def assert_reported(result, loss_by_name):
    assert {name: loss.item() for name, loss in result.named_losses.items()} == pytest.approx(loss_by_name, abs=1e-12)
    assert result.loss.item() == result.total.item() == pytest.approx(sum(loss_by_name.values()), abs=1e-12)


def task(loss=losses, count=count):
    return Task(MAKE_LAYERS, (tokens(),), labels(), loss, {"count": count})


@pytest.mark.feature("E13")
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("zbv", {}),
        ("dualpipe", {}),
        ("seq1f1b", {"slices": 2}),
        ("1f1b", {"scale_loss": 8.0}),
        ("interleaved-1f1b", {"stages_per_rank": 2, "recompute": True}),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_each_named_loss_is_the_mean_over_its_own_count(schedule, options):
    loss_by_name, gradients = alone()

    def steps(pipeline):
        evaluated = pipeline.evaluate(tokens(), target=labels())
        return evaluated, outcome_of(pipeline, pipeline.step(tokens(), target=labels()))

    for evaluated, outcome in on_pipelines(2, task(), steps, schedule, 8, **options):
        assert_reported(evaluated, loss_by_name)
        assert_reported(outcome.result, loss_by_name)
        for name, gradient in outcome.gradients.items():
            wanted = gradients[name] * options.get("scale_loss", 1.0)
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)
        # Of a microbatch that has no token of a name, the other loss alone is its loss.
        of_second = {name: part[1] for name, part in outcome.result.named_microbatch_losses.items()}
        assert of_second["after"].isnan() or "slices" in options
        assert not outcome.result.losses[1].isnan()


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_loss_of_a_microbatch_is_the_same_whether_it_is_cut_into_slices(replicas):
    job = Job([ROWS // replicas] * replicas, MAKE_LAYERS, tokens, labels, losses, {"count": count})

    cut = on_mesh(2, replicas, lambda places: train(places, job, "seq1f1b", slices=2))
    uncut = on_mesh(2, replicas, lambda places: train(places, job, "1f1b"))

    for rank, expected in zip(cut, uncut, strict=True):
        assert list(map(float, rank.result.losses)) == pytest.approx(
            list(map(float, expected.result.losses)), abs=1e-12
        )


@pytest.mark.feature("E13")
@pytest.mark.parametrize("options", [{}, ONE], ids=["replicas", "shards"])
def test_replicas_count_together(options):
    rows = [5, 11]
    loss_by_name, gradients = alone()
    job = Job(rows, MAKE_LAYERS, tokens, labels, losses, {"count": count, "allow_ragged": True})

    ranks = on_mesh(2, len(rows), lambda places: train(places, job, "zb-h1", **options))

    for rank in ranks:
        assert_reported(rank.result, loss_by_name)
    assert_near(whole(ranks, len(rows)), gradients)


def test_nothing_counted_anywhere_trains_nothing():
    nothing = torch.full((ROWS, NUM_TOKENS, 2), IGNORED)

    def step(pipeline):
        return outcome_of(pipeline, pipeline.step(tokens(), target=nothing))

    for outcome in on_pipelines(2, task(), step):
        assert_reported(outcome.result, {"next": 0.0, "after": 0.0})
        assert not any(gradient.any() for gradient in outcome.gradients.values())


def test_a_loss_function_is_told_the_factor_of_each_name():
    factors = []

    def loss(output, target, *, weight):
        factors.append(weight)
        return losses(output, target)

    on_pipelines(1, task(loss), lambda pipeline: pipeline.step(tokens(), target=labels()), "gpipe", 4)

    totals = {name: sum(factor[name] for factor in factors) for name in ("next", "after")}
    assert totals == pytest.approx({"next": 1.0, "after": 1.0})


def unnamed(output, target):
    return sum(losses(output, target).values())


@pytest.mark.parametrize(
    ("loss", "texts"),
    [
        (unnamed, ["returned a Tensor, but count a dict with the names ['next', 'after']"]),
        (lambda *pair: {"next": losses(*pair)["next"]}, ["losses named ['next'], but count a dict with the names"]),
        (lambda *pair: ps.LossOutput(losses(*pair), 3), ["with a weight, but count a dict"]),
    ],
    ids=["no names", "fewer names", "a weight"],
)
def test_a_loss_function_that_does_not_fit_the_count_is_refused(loss, texts):
    errors = on_pipelines(2, task(loss), lambda pipeline: error_of(pipeline.step, tokens(), target=labels()))

    assert_errors(errors, PipelineError, *texts, "return a dict with these names")


MARK = -7


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({}, "microbatch 1: count returned an empty dict"),
        ({0: 1, 1: 1}, "microbatch 1: count returned a dict with the names [0, 1] for its target; expected the names"),
        ({"": 1, "after": 1}, "microbatch 1: count returned a dict with the names ['', 'after'] for its target"),
        ({"next": 1, "after": -1}, "microbatch 1: count returned -1.0 for its target as 'after'"),
        ({"next": 1}, "microbatch 1: count returned numbers for 'next' for its target or a slice of it, but numbers"),
        (7, "microbatch 1: count returned a number for its target or a slice of it, but numbers for 'next', 'after'"),
    ],
    ids=["empty", "no texts", "an empty name", "negative", "a name less", "a number"],
)
def test_wrong_counts_are_refused_and_the_next_step_is_right(wrong, text):
    loss_by_name, _ = alone()
    marked = labels()
    marked[5] = MARK

    def steps(pipeline):
        error = error_of(pipeline.step, tokens(), target=marked)
        return error, pipeline.step(tokens(), target=labels())

    marked_count = task(count=lambda target: wrong if (target == MARK).any() else count(target))
    for error, result in on_pipelines(2, marked_count, steps):
        assert isinstance(error, PipelineError)
        assert text in str(error)
        assert_reported(result, loss_by_name)


@pytest.mark.parametrize("other", [{"next": 1}, 1], ids=["a name less", "a number"])
def test_replicas_that_count_under_other_names_all_fail(other):
    job = Job([8, 4], MAKE_LAYERS, tokens, labels, losses)
    job.options = {"count": lambda target: count(target) if target.shape[0] > 1 else other}

    errors = on_mesh(2, 2, lambda places: error_of(train, places, job, "1f1b"))

    assert_errors(errors, PipelineError, "count returned ", " for the targets of this replica, but numbers for 'next'")
