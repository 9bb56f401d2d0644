"""Curves of runs: every number of every run is in the picture."""

import re
from dataclasses import replace
from itertools import pairwise

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

    texts = set(re.findall(r">([^<>]+)</text>", svg))
    assert {"first", "&lt;second&gt;", "Runs in here", "loss (nats per token)", "tokens per second", "step"} <= texts


def drawn(svg, gid):
    """The colour and the dashes of a curve."""
    [style] = re.findall(rf'<g id="{gid}">\s*<path [^>]*style="([^"]*)"', svg)
    return re.findall(r"stroke: (#\w+)", style)[0], re.findall(r"stroke-dasharray: ([\d.,]+)", style)


def test_runs_that_follow_each_other_differ_in_colour_and_dash_and_twenty_in_both_together():
    svg = run_curves([curve(f"run {number}") for number in range(20)], "").decode()

    styles = [drawn(svg, f"loss-{number}") for number in range(20)]
    assert all(first[0] != second[0] and first[1] != second[1] for first, second in pairwise(styles))
    assert len({str(style) for style in styles}) == 20


def test_the_curve_that_is_drawn_last_has_gaps_for_an_equal_one_below_it():
    svg = run_curves([curve("a"), curve("b")], "").decode()

    assert svg.index('id="loss-0"') < svg.index('id="loss-1"')
    assert [bool(drawn(svg, f"loss-{number}")[1]) for number in (0, 1)] == [False, True]
    assert [bool(drawn(svg, f"held-out-{number}")[1]) for number in (0, 1)] == [False, True]


def test_the_legend_has_the_settings_of_each_run_and_is_below_the_plots():
    runs = [replace(curve("_a"), settings="batch.size=8"), replace(curve("b$x$"), settings="batch.size=16")]

    svg = run_curves(runs, "").decode()

    height = float(re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[0])
    places = {text: float(y) for y, text in re.findall(r'y="([\d.]+)"[^>]*>([^<>]+)</text>', svg)}
    assert places["step"] < places[" _a   batch.size=8"] < places["b$x$   batch.size=16"] < height


def test_a_long_legend_is_written_smaller():
    def size_of(settings):
        svg = run_curves([replace(curve("a"), settings=settings), curve("b")], "").decode()
        return float(re.findall(r"font-size: ([\d.]+)px;[^>]*>a   x", svg)[0])

    assert size_of("x=" + "1" * 300) < 0.6 * size_of("x=1")


def test_the_same_runs_give_the_same_bytes():
    runs = [curve("a"), curve("b"), curve("c")]

    svg = run_curves(runs, "").decode()

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
