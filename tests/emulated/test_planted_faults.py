"""A planted fault of ordering or lifetime is reported with operations and lines; without it nothing is."""

import re

import pytest

from tests.emulated.planted import FAULTS, HOST_WAITS, run_planted
from tests.emulated.planted_scenarios import SCENARIOS, measured_layers

pytestmark = pytest.mark.emulated

PLACE = re.compile(r"[\w/]+\.py:\d+ |backward of ")
"""Matches a place in a report; memory that autograd uses or frees has the name of its node."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), pytest.param("random", 1, marks=pytest.mark.slow)])
def test_a_scenario_without_fault_is_silent(emulated, policy, seed, scenario):
    emulated.run(scenario, num_ranks=1 if scenario is measured_layers else 2, policy=policy, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_with_operations_and_lines(emulated, name):
    fault = FAULTS[name]

    outcome = emulated.attempt(run_planted, name, num_ranks=2, timeout_s=60)

    if fault.kind == HOST_WAITS:
        expected = emulated.attempt(run_planted, name, False, num_ranks=2).host_waits
        (reason,) = fault.operations
        assert outcome.host_waits[reason] > expected.get(reason, 0)
    else:
        assert any(is_expected(fault, report) for report in outcome.reports), list(map(str, outcome.reports))


def is_expected(fault, report):
    beginnings = zip(report.operations, fault.operations, strict=False)
    is_of_operations = len(report.operations) >= len(fault.operations)
    is_of_operations &= all(name.startswith(beginning) for name, beginning in beginnings)
    return report.kind == fault.kind and is_of_operations and len(PLACE.findall(report.text)) >= 2
