"""Random models, as users write them, train as in plain torch on one process, whatever the schedule.

A sample runs, always the same, most of it as a slow test; with the hypothesis profile `full` (`make test-full`) other
ones every time.
For more: `python -m tests.random_models --cases 2000 --jobs 2`.
"""

import os
import random
import sys
from dataclasses import replace

import pytest
import torch

import penstock as ps
from tests.random_models.__main__ import summary
from tests.random_models.cases import draw_case
from tests.random_models.comparison import compare
from tests.random_models.layers import KINDS
from tests.random_models.models import make_batch, make_listed, make_plain
from tests.random_models.workers import run_cases

SAMPLE_SEED, NUM_QUICK, NUM_SAMPLED, NUM_FULL = 4000, 8, 17, 400
MOST_NOT_RUN = 0.05
"""The share of cases that Penstock may refuse, or that plain torch cannot run."""


@pytest.mark.feature("X52")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", ["few", pytest.param("more", marks=pytest.mark.slow)])
def test_random_models_train_as_on_one_process(share, is_full, request):
    seed, num_cases = (SAMPLE_SEED, NUM_QUICK) if share == "few" else (SAMPLE_SEED + NUM_QUICK, NUM_SAMPLED)
    if is_full and share == "more":
        seed, num_cases = random.SystemRandom().randrange(10**9), NUM_FULL

    verdicts = run_cases(range(seed, seed + num_cases))

    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nrandom models: {num_cases} cases from seed {seed}: {summary(verdicts)}", file=sys.stderr)
    wrong = [f"{verdict.command}\n{verdict.reason}" for verdict in verdicts if verdict.outcome == "wrong"]
    assert not wrong, "\n\n".join(wrong)
    assert len(verdicts) == num_cases
    assert sum(verdict.outcome != "equal" for verdict in verdicts) <= MOST_NOT_RUN * num_cases + 2


def test_a_seed_draws_one_case_and_one_batch():
    first, second = draw_case(3), draw_case(3)

    assert first == second
    assert first != draw_case(4)
    batches = make_batch(first, 0), make_batch(second, 0)
    assert all(
        torch.equal(*pair) for pair in zip(*([each[0] for each in b.microbatches] for b in batches), strict=True)
    )


@pytest.mark.slow
def test_every_layer_of_the_vocabulary_is_drawn():
    cases = [draw_case(seed) for seed in range(300)]

    assert {entry.kind for case in cases for entry in case.entries} == set(KINDS)
    assert {tie.how for case in cases for tie in case.ties} == {"parameter", "module", "option", "spec"}
    assert sum(any("OFFLOAD" in str(row) for order in moved(case) for row in order) for case in cases[:100]) > 10


def moved(case):
    return ps.lower(case.schedule, offload=case.offloaded)


def test_both_sides_begin_with_the_same_values():
    cases = [case for case in map(draw_case, range(40)) if not case.is_specs]

    for case in cases:
        plain, listed = make_plain(case).named_parameters(), make_listed(case).named_parameters()
        tied = {name for pair in make_listed(case).tied for name in pair}
        assert plain.keys() == listed.keys()
        assert all(torch.equal(plain[name], listed[name]) for name in plain.keys() - tied)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (torch.tensor([1.0, 2.0 + 1e-6]), "not equal bit for bit"),
        (torch.tensor([1.0, 2.1]), "different"),
        (None, "None, expected a tensor"),
        (torch.zeros(2), "different"),
        (torch.ones(3), "(3,), expected"),
        (torch.tensor([1.0, float("nan")]), "different"),
    ],
)
def test_a_difference_is_seen(found, what):
    (problem,) = compare({"weight": found}, {"weight": torch.tensor([1.0, 2.0])}, set(), 1e-12, "gradient of")

    assert what in problem


def test_what_may_round_may_round_by_little_alone():
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    rounded, wrong = ({"weight": weight + difference} for difference in (1e-13, 1e-11))

    assert compare(rounded, {"weight": weight}, {"weight"}, 1e-12, "gradient of") == []
    (problem,) = compare(wrong, {"weight": weight}, {"weight"}, 1e-12, "gradient of")
    assert problem.endswith("by 1e-11 of 2, 2e-12 allowed")


@pytest.mark.slow
def test_a_batch_norm_over_rows_that_are_alike_makes_more_of_rounding():
    """Three gradients of this case differ by up to 5e-12, where MKL computes with AVX-512; none does by its 3e-10."""
    from tests.random_models.running import judge

    assert judge(397657167).outcome == "equal"


class _DiesAtOnce:
    def __reduce__(self):
        return os._exit, (7,)


@pytest.mark.slow
def test_a_process_that_dies_is_a_verdict_and_the_next_case_runs():
    died, after = run_cases([_DiesAtOnce(), SAMPLE_SEED])

    assert "died with exit code 7" in died.reason
    assert died.outcome == "wrong"
    assert after.seed == SAMPLE_SEED


def test_a_wrong_case_is_wrong():
    """The judge of a case must not be blind: a pipeline of another loss does not pass for this one."""
    from tests.random_models import running

    case = next(case for case in map(draw_case, range(100)) if not case.is_on_processes and not case.keywords)
    wanted = running.run_plain(case)
    found = running.run_plain(replace(case, scale=case.scale * 1.0001))
    found.stages = [range(len(case.entries))]
    found.repeated = []

    assert running.differences(case, [found], wanted) != []
