"""Curves of runs: every number of every run is in the picture."""

import re

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.show.run_curves import RunCurve, _running_mean, run_curves

STEPS = list(range(1, 101))
LOSSES = [5.0 - 0.03 * step for step in STEPS]
NOTHING = ([], [])


def curve(name, losses=LOSSES):
    steps = STEPS[: len(losses)]
    return RunCurve(name, (steps, losses), ([50], [4.0]), (steps, [100.0] * len(losses)))


def test_an_svg_names_the_runs_and_the_axes():
    svg = run_curves([curve("first"), curve("<second>", LOSSES[:40])], "Runs in here").decode()

    texts = re.findall(r">([^<>]+)</text>", svg)
    assert {"first", "&lt;second&gt;", "Runs in here", "loss (nats per token)", "tokens per second", "step"} <= set(
        texts
    )


def test_runs_have_different_colours_and_the_same_runs_give_the_same_bytes():
    runs = [curve("a"), curve("b"), curve("c")]

    svg = run_curves(runs, "").decode()

    assert all(colour in svg for colour in ("#0b3c68", "#d98200"))
    assert run_curves(runs, "").decode() == svg != run_curves(runs, "", theme="dark").decode()
    assert run_curves(runs, "", format="png").startswith(b"\x89PNG")


def test_the_mean_is_over_a_part_of_the_curve_and_shorter_at_its_begin():
    values = np.arange(80.0)  # a window of two

    assert _running_mean(values)[:3].tolist() == [0.0, 0.5, 1.5]
    assert _running_mean([3.0, 5.0]).tolist() == [3.0, 5.0]
    assert _running_mean([]).tolist() == []


def test_a_run_that_has_just_begun_is_left_empty_but_not_all_may_be():
    begun = RunCurve("begun", NOTHING, NOTHING, NOTHING)

    assert b"begun" in run_curves([begun, curve("a")], "")
    with pytest.raises(ConfigError, match=r"no run has finished a step with metrics.jsonl = true"):
        run_curves([begun], "")
