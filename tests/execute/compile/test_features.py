"""A stage has the features that its layers and the program ask for, in the order of autograd's roots."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.execute.compile.features import compose_stages
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.stages.auxiliary import AddedLossPart
from penstock.execute.stages.carried import CarryPart
from penstock.execute.stages.passes import StagePasses
from penstock.execute.stages.randomness import Randomness, RandomPart
from penstock.execute.stages.skips import SkipPart, StageSkips
from penstock.execute.stages.stage import Stage
from penstock.lowering import lower
from penstock.models import AuxiliaryLoss, Carry
from penstock.schedules import build
from tests.support.one_stage import PLACE, step_of


def carrying_layer():
    layer = nn.Module()
    layer.carry, layer.loss = Carry(), AuxiliaryLoss("a")
    return layer


PLAIN = build("1f1b", ranks=2, microbatches=2)
SLICED = build("seq1f1b", ranks=2, microbatches=2, slices=2)
AGAIN = ps.with_recompute(PLAIN, stages=[1])


def composed(schedule, layer, *, skip=None, seed=None):
    stage, skips = Stage(1, {"0": layer}), {1: StageSkips([layer], [skip], [skip])} if skip else {}
    draws = Randomness(seed, [torch.default_generator])
    return compose_stages(lower(schedule), [stage], skips, draws, {1: GradientStore(stage.parameters)})


@pytest.mark.parametrize(
    ("schedule", "make", "options", "kinds"),
    [
        (PLAIN, nn.Identity, {}, []),
        (SLICED, carrying_layer, {"skip": "x", "seed": 3}, [AddedLossPart, CarryPart, SkipPart, RandomPart]),
        (PLAIN, carrying_layer, {}, [AddedLossPart]),
        (AGAIN, nn.Identity, {}, [RandomPart]),
        (AGAIN, nn.Identity, {"seed": 3}, [RandomPart]),
    ],
    ids=["a plain stage", "everything", "whole sequences", "forwards that run again", "with a seed"],
)
def test_features_come_in_the_order_of_autograds_roots(schedule, make, options, kinds):
    passes = composed(schedule, make(), **options)[1]

    assert type(passes) is StagePasses
    assert [type(part) for part in passes.begin_parts(step_of(), PLACE)] == kinds


@pytest.mark.parametrize(("name", "is_split"), [("zb-h1", True), ("1f1b", False)])
def test_only_schedules_with_split_backwards_make_forwards_for_them(name, is_split):
    schedule = build(name, ranks=2, microbatches=2)

    options = [composed(each, nn.Identity())[1].options for each in (schedule, schedule.forward_only())]

    assert [each.is_split for each in options] == [is_split, False]
    assert [each.is_training for each in options] == [True, False]
    assert [(each.is_first, each.is_last) for each in options] == [(False, True)] * 2
