"""A run beside the plan that it was started with."""

from penstock.train.settings.sections import PlanSection
from penstock.train.watching.against_plan import AgainstPlan

MIB = 1 << 20
PLAN = PlanSection(step_s=2.0, step_range_s=(1.9, 2.2), peak_bytes=(100 * MIB, 80 * MIB))
ROWS = [{"step": step, "duration_s": 9.0 if step < 4 else 2.1} for step in range(1, 8)]
MEASURED = {"step": 8, "duration_s": 2.1, "peak_bytes_rank0": 101 * MIB, "peak_bytes_rank1": 88 * MIB}


def test_the_median_step_and_the_rank_that_differs_most_are_told():
    compared = AgainstPlan.of(PLAN, [*ROWS, MEASURED])

    assert compared.lines() == [
        "planned:    step 2.00 s, measured 2.10 s (+5.0%), within 1.90 s to 2.20 s",
        "planned:    peak 80.0 MiB on rank 1, measured 88.0 MiB (+10.0%)",
    ]
    assert compared.to_dict()["measured_peak_bytes"] == [101 * MIB, 88 * MIB]


def test_a_step_outside_of_its_range_says_so():
    slow = [{"step": 1, "duration_s": 3.0}]

    assert "measured 3.00 s (+50.0%), outside 1.90 s to 2.20 s" in AgainstPlan.of(PLAN, slow).lines()[0]


def test_memory_of_whole_processes_is_left_out():
    assert len(AgainstPlan.of(PLAN, [MEASURED], counts_memory=False).lines()) == 1


def test_without_a_plan_or_a_step_there_is_nothing_to_compare():
    assert AgainstPlan.of(PlanSection(), ROWS) is None
    assert AgainstPlan.of(PLAN, []) is None
