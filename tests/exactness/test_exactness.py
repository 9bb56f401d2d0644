"""Every family with every loss and every feature of a model computes what one process does, gradients and losses.

Few combinations run, in which any two values meet (family, loss, feature, ranks, microbatches): a fourth by default,
the others as slow tests. With the hypothesis profile `full` (`make test-full`) every family does with every loss and
every feature on 1 to 4 ranks.
"""

import sys
from functools import cache

import pytest

from penstock.pipeline import Pipeline
from tests.exactness.combinations import Combination, all_combinations, covering, thorough
from tests.exactness.features import LOSSES, MODELS, REFERENCES, batch, options
from tests.exactness.one_process import step_of_one_process
from tests.support.invariants import Invariants
from tests.support.local_pipelines import difference, gradients_of, named, on_ranks, outcome_of, visits_in_order

TOLERANCE = 1e-12
NUM_STEPS = 2

ALL = all_combinations()
COVERING = covering(ALL)
THOROUGH = thorough(ALL)
FAMILIES = sorted({each.family for each in ALL})

# In these, several gradients of one tensor are added up, and on several ranks in another order than on one.
SUMMED_OVER_RANKS = ("tied", "skip")
# Plain layers, compiled by the pipeline alone: their operations may be other ones than those of one process.
COMPILED = "compiled"


@pytest.fixture(scope="module")
def tally(request):
    """Per combination that ran, what was wrong; told at the end, also where tests run beside each other."""
    found = {}
    yield found
    num_right = sum(not wrong for wrong in found.values())
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nexactness: {num_right} of {len(found)} combinations", file=sys.stderr)


def num_layers_of(combination):
    # A layer or two for each stage, and more than one for a single stage.
    return max(4, len(combination.schedule.placement.routes[0]) + combination.num_microbatches % 3)


def run(wires, combination):
    """Run some steps without zeroing: the first on shapes that are still unknown, the others on known ones."""
    feature, loss = combination.feature, combination.loss
    pipeline = Pipeline(
        MODELS[feature](num_layers_of(combination)),
        combination.schedule,
        loss=LOSSES[loss][0],
        transport=wires,
        compile="aot_eager" if feature == COMPILED else False,
        observers=[Invariants()],
        **options(feature, loss),
    )
    found = []
    for step in range(NUM_STEPS):
        tokens, target = batch(feature, loss, combination.num_microbatches, step)
        result = pipeline.step(tokens, target=target)
        found.append(outcome_of(pipeline, result))
    pipeline.close()
    return found


@cache
def expected(feature, loss, num_layers, num_microbatches, num_slices):
    """The same steps on one process: the losses of each, and the gradients so far."""
    layers, found = REFERENCES.get(feature, MODELS[feature])(num_layers), []
    for step in range(NUM_STEPS):
        losses = step_of_one_process(
            layers,
            batch(feature, loss, num_microbatches, step),
            LOSSES[loss][0],
            num_microbatches=num_microbatches,
            num_slices=num_slices,
            step_number=step,
            options=options(feature, loss),
        )
        found.append((losses, gradients_of(named(layers))))
    return found


def listed(gradients, combination):
    """What a pipeline lists: a tied parameter under its first name alone where every rank of its last use has both."""
    placement = combination.schedule.placement
    first, last = ({placement.rank_of_stage[route[end]] for route in placement.routes} for end in (0, -1))
    hidden = {list(gradients)[-1]} if combination.feature == "tied" and last <= first else set()
    return {name: gradient for name, gradient in gradients.items() if name not in hidden}


def mistakes(combination):
    schedule, feature = combination.schedule, combination.feature
    is_bitwise = visits_in_order(schedule) and feature not in (*SUMMED_OVER_RANKS, COMPILED)
    tolerances = {
        "tolerance": None if is_bitwise else TOLERANCE,
        "loss_tolerance": None if schedule.num_slices == 1 and feature != COMPILED else TOLERANCE,
    }
    slices = schedule.num_slices if feature == "dropout" else 1  # elsewhere slices change nothing
    wanted = expected(feature, combination.loss, num_layers_of(combination), schedule.num_microbatches, slices)
    steps = zip(*on_ranks(schedule.num_ranks, run, combination), strict=True)
    found = []
    for outcomes, (losses, gradients) in zip(steps, wanted, strict=True):
        found += difference(outcomes, (losses, listed(gradients, combination)), **tolerances)
    return found


def quick_share(family):
    """Return a fourth of a family's covering combinations, other features for other families, none of them compiled."""
    plain = [each for each in COVERING if each.family == family and each.feature != COMPILED]
    return plain[FAMILIES.index(family) % 4 :: 4]


@pytest.mark.feature("D5", "H6", "X32")
@pytest.mark.timeout(1200)  # of hundreds of combinations, dozens of them compiled
@pytest.mark.filterwarnings("ignore::penstock.errors.PenstockWarning")
@pytest.mark.parametrize("share", ["a fourth", pytest.param("the others", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_with_every_loss_and_feature(family, share, tally, is_full):
    own = quick_share(family)
    if share == "the others":
        own = [each for each in (THOROUGH if is_full else COVERING) if each.family == family and each not in own]

    found = {each: mistakes(each) for each in own}

    tally |= found
    assert len(found) > 2
    assert {str(each): wrong for each, wrong in found.items() if wrong} == {}


def test_any_family_loss_and_feature_runs_by_default():
    quick = [each for family in FAMILIES for each in quick_share(family)]

    assert {each.feature for each in quick} == MODELS.keys() - {COMPILED}
    assert {each.loss for each in quick} == LOSSES.keys()


def test_any_two_values_of_the_product_meet_in_the_combinations_that_run():
    met = set().union(*(each.pairs for each in COVERING))

    assert met == set().union(*(each.pairs for each in ALL))
    assert len(COVERING) < len(ALL) / 50


def test_in_a_full_run_every_family_meets_every_loss_and_feature_on_every_number_of_ranks():
    thorough_shapes, shapes = (
        {(each.family, each.loss, each.feature, each.num_ranks) for each in combinations}
        for combinations in (THOROUGH, ALL)
    )

    assert thorough_shapes == shapes
    assert {each.num_microbatches for each in THOROUGH} == set(range(1, 9))
    assert Combination("dualpipe", "mean", "plain", 4, 2).schedule is None, "refused, and so left out"
