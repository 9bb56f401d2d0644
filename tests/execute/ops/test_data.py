"""A LOAD pulls its microbatch where a stream brings the data, and does nothing where they are there as a whole."""

from types import SimpleNamespace
from unittest.mock import Mock

from penstock.execute.batch.prefetcher import Prefetcher
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.ops.data import load
from penstock.execute.step import Step


def test_a_load_pulls_the_microbatch_that_it_names():
    prefetcher = Mock(Prefetcher)
    (bound,) = load(SimpleNamespace(place=lambda row: (3, 0)), 7)

    bound.call(Step([], StepLosses(0, 1), prefetcher=prefetcher))
    bound.call(Step([], StepLosses(0, 1)))

    assert bound.row == 7
    prefetcher.pull.assert_called_once_with(3)
