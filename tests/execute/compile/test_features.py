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


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.carry, self.loss = Carry(), AuxiliaryLoss("a")


def composed(schedule, layer=None, *, skips=None, seed=None):
    stage = Stage(1, {"0": layer or nn.Linear(2, 2)})
    draws = Randomness(seed, [torch.default_generator])
    return compose_stages(lower(schedule), [stage], skips or {}, draws, {1: GradientStore(stage.parameters)})


def kinds(passes):
    return [type(part) for part in passes[1].begin_parts(step_of(), PLACE)]


def test_a_plain_stage_has_no_features():
    passes = composed(build("1f1b", ranks=2, microbatches=2))

    assert kinds(passes) == []
    assert type(passes[1]) is StagePasses


def test_features_come_in_the_order_of_autograds_roots():
    layer = Everything()
    skips = {1: StageSkips([layer], ["x"], ["x"])}

    passes = composed(build("seq1f1b", ranks=2, microbatches=2, slices=2), layer, skips=skips, seed=3)

    assert kinds(passes) == [AddedLossPart, CarryPart, SkipPart, RandomPart]


def test_nothing_is_carried_where_sequences_are_whole():
    assert kinds(composed(build("1f1b", ranks=2, microbatches=2), layer=Everything())) == [AddedLossPart]


@pytest.mark.parametrize("seed", [None, 3])
def test_forwards_that_run_again_draw_again(seed):
    schedule = ps.with_recompute(build("1f1b", ranks=2, microbatches=2), stages=[1])

    passes = composed(schedule, seed=seed)

    assert kinds(passes) == [RandomPart]


@pytest.mark.parametrize(("name", "is_split"), [("zb-h1", True), ("1f1b", False)])
def test_only_schedules_with_split_backwards_make_forwards_for_them(name, is_split):
    schedule = build(name, ranks=2, microbatches=2)

    options = [composed(each)[1].options for each in (schedule, schedule.forward_only())]

    assert [each.is_split for each in options] == [is_split, False]
    assert [each.is_training for each in options] == [True, False]
    assert [(each.is_first, each.is_last) for each in options] == [(False, True)] * 2
