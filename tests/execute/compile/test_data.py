"""Data are pulled before the first call that needs them, as soon as the rank would wait, and dropped after the last."""

from unittest.mock import Mock

import pytest

from penstock.execute.batch.prefetcher import Prefetcher
from penstock.execute.compile.data import microbatch_of_data_row, with_data_calls
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Bound, Step
from penstock.lowering import lower
from penstock.schedules import build
from tests.acceptance.steps.test_streamed_steps import Masked


def woven(calls, needs, loads=None):
    """Run calls, `0w` a wait of row 0 and `0` its computation, and tell what ran and what happened to data."""
    log = []

    def noting(act):
        return lambda microbatch: log.append(f"{act} {microbatch}")

    def bound(text):
        row = int(text.rstrip("w"))
        return Bound(row, lambda step: log.append(text), 99 if text.endswith("w") else None)

    prefetcher = Mock(Prefetcher, pull=noting("pull"), arrive=noting("get"), release=noting("drop"))
    step = Step([], StepLosses(0, 1), prefetcher=prefetcher)
    for each in with_data_calls([bound(text) for text in calls.split()], needs, loads):
        each.call(step)
    return ", ".join(log)


@pytest.mark.parametrize(
    ("calls", "needs", "wanted"),
    [
        ("0 1 2", {0: 0, 2: 1}, "pull 0, get 0, 0, drop 0, 1, pull 1, get 1, 2, drop 1"),
        ("0 1 2w 2 3w 3 4", {0: 0, 4: 1}, "pull 0, get 0, 0, drop 0, 1, pull 1, 2w, 2, 3w, 3, get 1, 4, drop 1"),
        ("0w 0 1w 1", {0: 0, 1: 1}, "pull 0, get 0, 0w, 0, drop 0, pull 1, get 1, 1w, 1, drop 1"),
        ("0 1w 1 2", {0: 1, 2: 0}, "pull 1, get 1, 0, drop 1, pull 0, 1w, 1, get 0, 2, drop 0"),
        ("0 1 2", {0: 0, 1: 0, 2: 0}, "pull 0, get 0, 0, 1, 2, drop 0"),
        ("0 1", {}, "0, 1"),
    ],
    ids=["no wait", "a wait between", "its own wait", "out of order", "three slices", "nothing"],
)
def test_a_pull_comes_at_the_next_wait_and_at_the_latest_before_its_use(calls, needs, wanted):
    assert woven(calls, needs) == wanted


@pytest.mark.feature("B14", "G2")
@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ({0: 0, 2: 1}, "0, get 0, 1, drop 0, 2, get 1, 3w, 3, 4, drop 1"),
        ({2: 1}, "0, pull 0, get 0, 1, drop 0, 2, get 1, 3w, 3, 4, drop 1"),
        ({0: 0, 4: 1}, "0, get 0, 1, drop 0, 2, pull 1, get 1, 3w, 3, 4, drop 1"),
    ],
    ids=["all", "one of two", "behind its use"],
)
def test_what_a_row_has_loaded_before_its_use_is_not_pulled(loads, wanted):
    needs = {1: 0, 3: 1, 4: 1}

    assert woven("0 1 2 3w 3 4", needs, loads) == wanted


@pytest.mark.parametrize(
    ("rank", "layers", "takes"),
    [(0, {}, ["0F0", "0F1"]), (1, {}, []), (1, {"masked": Masked(0)}, ["1F0", "1F1"]), (2, {}, ["2F0", "2F1"])],
)
def test_forwards_of_end_stages_and_of_layers_that_take_keywords_take_data(rank, layers, takes):
    program = lower(build("1f1b", ranks=3, microbatches=2))
    rows = range(*map(int, program.offsets[rank : rank + 2]))

    found = microbatch_of_data_row(program, rows, {rank: Stage(rank, layers)})

    assert {str(program.instruction(row)): microbatch for row, microbatch in found.items()} == {
        text: microbatch for microbatch, text in enumerate(takes)
    }
