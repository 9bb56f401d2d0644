"""The written result of a search, and of one per limit of memory: a table, JSON, a picture."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest

import penstock as ps
from penstock.cli import searched as searched_module
from penstock.cli.searched import (
    FIGURES,
    LimitResult,
    combined,
    refusals,
    rows_to_json,
    rows_to_picture,
    rows_to_table,
    to_json,
    to_picture,
    to_table,
)
from penstock.proofs import Limit
from penstock.searching.bounds import Bound
from penstock.searching.noise import NoiseEffect
from penstock.show.pareto import LowerBound
from penstock.tables import Screen

UNITS = ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1)
SIZED = replace(UNITS, activation_bytes=(2**30,), parameter_bytes=(2**31,))
NO_ROOM = "no order was found that fits"
SHAPE = {"rank": 2, "microbatch": 4}


@cache
def searched(costs=UNITS, limit=None, **options):
    return ps.search(costs, 2, 4, memory_limit=limit, evaluations=200, **options)


def within(text, costs=UNITS, **options):
    limit = Limit.read(text)
    return LimitResult(limit, searched(costs, limit, **options))


@pytest.fixture(scope="module")
def rows():
    """A limit that nothing fits, one with a gap of 25 %, and one at which no order is shorter than what is found."""
    one = within("1 microbatches")
    bound = Bound("work", 0, {"work": one.result.makespan_s / 1.25})
    refused = LimitResult(Limit.read("0.5 microbatches"), reason=NO_ROOM)
    return [refused, replace(one, result=replace(one.result, bound=bound)), within("2 microbatches")]


def texts_of(picture):
    return re.findall(r"<text[^>]*>(.*?)</text>", picture.decode(), re.DOTALL)


def test_json_has_the_figures_of_a_search_and_for_a_limit_that_nothing_fits_says_why(rows):
    refused, one, two = json.loads(rows_to_json(rows))

    assert refused == {"memory_limit": "0.5 microbatches", **dict.fromkeys(FIGURES), "error": NO_ROOM}
    assert (one["memory_limit"], two["memory_limit"]) == ("1 microbatches", "2 microbatches")
    assert tuple(one)[1:] == FIGURES
    assert one["makespan_s"] > two["makespan_s"]
    found = searched()
    members = json.loads(to_json(found))
    assert tuple(members) == FIGURES
    assert (members["makespan_s"], members["bubble_rate"]) == (found.makespan_s, found.timeline.bubble_rate)
    assert sum(members["bound"]["terms"].values()) == members["lower_bound_s"] == found.lower_bound_s


def test_a_table_has_a_line_per_figure():
    lines = to_table(searched(SIZED)).splitlines()

    names = [line.split("  ")[0] for line in lines]
    assert names == [
        "schedule", "makespan", "span", "bubble", "lower bound", "gap", "peak memory", "peak activations", "searched",
    ]  # fmt: skip
    assert lines[0].endswith("line on 2 ranks")
    assert re.fullmatch(r"peak memory +\d\.00 GiB \d\.00 GiB", lines[6])
    assert "peak memory" not in to_table(searched())


def test_a_table_of_limits_has_a_row_per_limit_and_below_it_what_nothing_fits(rows):
    lines = rows_to_table(rows).splitlines()

    assert re.split(r"  +", lines[0]) == [
        "memory limit", "makespan s", "span s", "bubble", "lower bound s", "gap", "peak microbatches", "method",
    ]  # fmt: skip
    one, two = (re.split(r"  +", line) for line in lines[2:4])
    assert (one[0], one[1]) == ("1 microbatches", f"{rows[1].result.makespan_s:g}")
    assert (one[5], one[6]) == ("25.00%", "1")
    assert (two[0], two[1], two[5], two[6]) == ("2 microbatches", "13", "0", "2")
    assert lines[4:] == [
        "", "gap 0: no order is shorter", "", "nothing fits:", f"  0.5 microbatches: {NO_ROOM}",
    ]  # fmt: skip
    assert refusals(rows) == lines[-1:]
    narrow = rows_to_table(rows[1:], Screen(50))
    assert max(map(len, narrow.splitlines())) <= 50
    assert {"makespan", "bound", "gap"} <= set(narrow.split())


def test_limits_in_bytes_have_bytes_and_the_bound_of_a_span_is_called_so():
    sized = rows_to_table([within("5GiB", SIZED)])
    span = rows_to_table([within("2 microbatches", objective="span")])

    assert "peak memory" in sized.splitlines()[0]
    assert " 4.00 GiB" in sized.splitlines()[2]  # two activations, and the weights
    assert "bound of the span s" in span
    assert "lower bound" not in span
    row = within("2 microbatches", objective="span")
    assert "span (s)" in texts_of(rows_to_picture([row], SHAPE, costs_text="F=1", format="svg", theme=None))


def test_a_limit_has_what_was_found_within_a_smaller_one_if_that_is_shorter():
    short, long = within("2 microbatches"), within("1 microbatches")
    swapped = [replace(long, limit=Limit.read("4 microbatches")), short]

    first, second = combined(swapped)

    assert first.limit == swapped[0].limit
    assert first.result.makespan_s == short.result.makespan_s < long.result.makespan_s
    assert (first.result.plan, first.result.method) == (short.result.plan, short.result.method)
    assert second.result.makespan_s == short.result.makespan_s


def test_a_limit_has_the_bound_within_a_larger_one_if_that_is_larger():
    found = within("2 microbatches").result
    bounds = {1: 9.0, 2: 7.0, 4: 8.0, 8: 5.0}
    rows = [
        LimitResult(Limit.read(f"{most} microbatches"), replace(found, bound=Bound("work", 0, {"work": seconds})))
        for most, seconds in bounds.items()
    ]

    assert [row.result.lower_bound_s for row in combined(rows)] == [9.0, 8.0, 8.0, 5.0]


def test_of_equally_short_orders_a_limit_has_the_one_that_holds_least():
    large = within("4 microbatches")
    wasteful, thin = (ps.plan(ps.build(name, ranks=2, microbatches=4), UNITS) for name in ("gpipe", "1f1b"))
    assert thin.timeline.makespan_s == wasteful.timeline.makespan_s
    tied = replace(large, result=replace(large.result, plan=wasteful))
    lean = replace(tied, limit=Limit.read("3 microbatches"), result=replace(large.result, plan=thin))

    changed = combined([tied, lean, LimitResult(Limit.read("5 microbatches"), reason=NO_ROOM)])

    assert [max(row.result.timeline.peak_activations) for row in changed[:2]] == [2, 2]
    assert changed[2].reason == NO_ROOM


def test_the_picture_of_a_search_is_its_timeline_with_bound_and_gap():
    found = searched(SIZED, "5GiB")

    drawn = {"costs_text": "F=1,I=1,W=1", "limit": Limit.read("5GiB"), "theme": None}
    chart, page = (to_picture(found, format=format, **drawn).decode() for format in ("svg", "html"))

    title = ", 2 ranks, 4 microbatches, within 5GiB, predicted with F=1,I=1,W=1"
    assert any(text.endswith(title) for text in texts_of(chart.encode()))
    (figures,) = [text for text in texts_of(chart.encode()) if text.startswith("makespan")]
    assert figures.endswith("with static bytes 4.00 GiB  ·  lower bound 13.0 s  ·  gap 0: no order is shorter")
    assert "<dt>lower bound</dt><dd>13.0 s</dd>" in page
    assert "static" not in to_picture(searched(), format="svg", **drawn).decode()
    span = to_picture(searched(objective="span"), format="svg", **drawn).decode()
    assert "lower bound of the span 12.0 s" in span


def test_the_picture_of_limits_has_a_point_per_result_and_the_bounds(rows):
    picture = rows_to_picture(rows, SHAPE, costs_text="F=1", format="svg", theme="dark")

    texts = texts_of(picture)
    assert "Step time and memory of searched orders, 2 ranks, 4 microbatches, with F=1" in texts
    assert "peak activations of a rank, in those of one microbatch" in texts
    assert {"1 microbatches: gap 25 %", "2 microbatches: gap 0"} <= set(texts)
    assert b'id="bound"' in picture


@pytest.mark.parametrize(
    ("limit", "costs", "name", "memory", "bound"),
    [
        ("5GiB", SIZED, "peak memory of a rank, in GiB", "4", LowerBound(5.0, 13.0)),
        ("2 activations", UNITS, "peak activations of a rank", "2", LowerBound(2.0, 13.0)),
    ],
)
def test_memory_and_bounds_are_drawn_in_the_unit_of_the_limits(monkeypatch, limit, costs, name, memory, bound):
    drawn = {}
    draw = searched_module.pareto_picture
    monkeypatch.setattr(
        searched_module, "pareto_picture", lambda *rows, **given: drawn.update(given) or draw(*rows, **given)
    )

    page = rows_to_picture([within(limit, costs)], SHAPE, costs_text="F=1", format="html", theme=None).decode()

    assert re.findall(r"<td>(.*?)</td>", page) == [f"{limit}: gap 0", "13.0 s", memory]
    assert f"<th>{name}</th>" in page
    assert drawn["bounds"] == [bound]


def test_under_noise_a_larger_limit_takes_what_is_shorter_on_average():
    """The order within the smaller limit is longer by itself, and shorter with noise."""
    small, large = within("1 microbatch"), within("4 microbatches")
    assert small.result.makespan_s > large.result.makespan_s
    rows = [
        replace(row, result=replace(row.result, noise=NoiseEffect(mean_s, "", 0.0, 0.0)))
        for row, mean_s in ((small, 30.0), (large, 31.0))
    ]

    _, found = combined(rows)

    assert found.result.plan is small.result.plan
    assert found.result.noise.mean_s == 30.0
    assert found.result.seconds == large.result.seconds
