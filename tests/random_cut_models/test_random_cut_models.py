"""Random modules in `ps.cut` are right, or refused by the name of a module, an attribute or an argument.

A sample runs; for more: `python -m tests.random_cut_models --seeds 0..2000 --processes 1`.
"""

import copy
import random
from dataclasses import replace

import pytest
import torch

from tests.random_cut_models.cases import FEATURES, Case, objective
from tests.random_cut_models.running import judge
from tests.support.cut_models import difference, outcome_of, plain_call, run_rank
from tests.support.local_pipelines import on_ranks
from tests.support.unsplit_pipeline import UnsplitPipeline

NUM_QUICK, NUM_SAMPLED, NUM_FULL = 12, 40, 1000
MOST_REFUSED = 0.5


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", ["few", pytest.param("more", marks=pytest.mark.slow)])
def test_random_modules_are_right_or_refused_by_name(share, is_full):
    first, number = (0, NUM_QUICK) if share == "few" else (NUM_QUICK, NUM_SAMPLED)
    if is_full and share == "more":
        first, number = random.SystemRandom().randrange(10**9), NUM_FULL

    verdicts = [judge(seed) for seed in range(first, first + number)]

    bad = [
        f"{verdict.command}\n{verdict.details}" for verdict in verdicts if verdict.outcome not in ("RIGHT", "REFUSED")
    ]
    assert not bad, "\n\n".join(bad)
    assert sum(verdict.outcome == "REFUSED" for verdict in verdicts) <= MOST_REFUSED * number + 3


@pytest.mark.parametrize("seed", range(0, 40, 13))
def test_a_seed_draws_one_case_and_one_model(seed):
    first, second = Case(seed), Case(seed)

    assert str(first) == str(second)
    states = [case.course(1).model.state_dict() for case in (first, second)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_seeds_draw_every_feature():
    assert {type(feature).__name__ for seed in range(400) for feature in Case(seed).features} == FEATURES.keys()


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_a_model_with_a_feature_runs_in_one_process(name):
    for seed in range(3):
        course = Case(seed, [name]).course(1)
        losses = [loss for call in course.calls for loss in plain_call(course.model, course, call).losses]
        assert torch.stack(losses).isfinite().all()


def test_a_plain_model_is_right():
    verdict = judge(2, ["Plain"])

    assert verdict.outcome == "RIGHT", verdict.details


def frozen(model):
    """Return a copy of a model that trains all but one bias."""
    model = copy.deepcopy(model)
    model.head.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "wrong",
    [
        lambda course: replace(course, loss=lambda output, target: objective(output, target) * (1 + 1e-9)),
        lambda course: replace(course, model=frozen(course.model)),
        lambda course: replace(course, calls=course.calls[1:] + course.calls[:1]),
    ],
)
def test_a_difference_is_seen(wrong):
    course = Case(2, ["Plain"]).course(1)
    ((traces, _),) = on_ranks(1, run_rank, course)

    assert difference(course, [traces]).kind == "RIGHT"
    assert difference(wrong(course), [traces]).kind == "WRONG"


@pytest.mark.parametrize(
    ("first", "number"), [(0, 10), pytest.param(10, 100, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_a_model_in_one_piece_is_right(first, number):
    verdicts = [judge(seed, ranks=(1,), make_pipeline=UnsplitPipeline) for seed in range(first, first + number)]

    assert [f"{each.command}: {each.details}" for each in verdicts if each.outcome != "RIGHT"] == []


def test_a_draw_that_ranks_make_alike_is_repeated():
    assert outcome_of(Case(2, ["BlockDropout"]).course(1)).kind == "RIGHT"
