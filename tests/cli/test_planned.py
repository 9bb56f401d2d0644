"""A plan of a run as text."""

from dataclasses import replace

import pytest

from penstock.cli.planned import to_table
from penstock.tables import Screen
from tests.run_planning.cases import plan_of


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return plan_of(tmp_path_factory.mktemp("plan"))


def test_it_has_one_fact_a_line(plan):
    first, headings, _, best, *others = to_table(plan).splitlines()

    chosen = plan.chosen
    assert first == (
        f"fits: yes; {chosen.num_layouts} layouts, {chosen.num_may_fit} may fit, {chosen.num_evaluated} evaluated, "
        f"{chosen.num_cut_off} cut off by their bounds"
    )
    assert headings.split() == [
        "pipeline", "x", "data", "shard", "schedule", "micro", "recompute", "step", "ms", "(range)", "tok/s", "peak",
        "KiB", "of", "1.00", "MiB",
    ]  # fmt: skip
    assert best.startswith(f"1  {plan.best.pipeline} x {plan.best.data} ")
    assert f"2x{plan.best.planned.layout.microbatches}" in best
    assert best.rstrip().endswith(f"rank {plan.best.planned.fullest_rank}")
    assert [line.split()[0] for line in others[-4:]] == ["bound", "bytes", "time", "not"]


def test_shares_of_the_peak_are_told_where_they_are_known(plan):
    assert "MFU" not in to_table(plan)
    assert "MFU" in to_table(replace(plan, step_flops=1e9, device_flops_per_s=1e12))


def test_a_narrow_screen_leaves_out_what_matters_less(plan):
    assert "left out at 90 columns" in to_table(plan, Screen(90))
