"""Each planted fault of ordering or lifetime is reported with operations and lines; without it nothing is."""

import re
from pathlib import Path

import pytest

from tests.emulated.planted import FOUND, MISSED, run_planted
from tests.emulated.planting import HOST_WAITS, RECORDED, num_ranks_of

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

LAZY, SEEDS = ("lazy", 0), [("random", 1), ("random", 2)]
SCENARIOS = sorted({fault.scenario for fault in [*FOUND, *MISSED]})
SOURCE = Path(__file__).resolve().parents[2] / "src" / "penstock"
EVENT_WAIT_OR_PINNED = re.compile(
    r"make_event\(|\.(record|query|is_completed)\(\)|synchronize\(|wait_(stream|event)\(|record_stream\("
    r"|pin_memory|non_blocking|(transport|work|ticket|pending)\.wait\("
)
WITHOUT_FAULT = {
    "penstock.execute.control.collectives": "its messages go between CPUs",
    "penstock.train.measuring.exchanges": "it waits to read a clock, and reads no memory behind the wait",
}
"""Files that have such a wait, and in which a fault could do no harm, with the reason."""
PLACE = re.compile(r"[\w/]+\.py:\d+ |backward of ")
"""Memory that autograd uses or frees has the name of its node."""


def run(emulated, scenario, fault, policy, seed):
    options = {"num_ranks": num_ranks_of(scenario), "policy": policy, "seed": seed, "timeout_s": 60}
    return emulated.attempt(run_planted, scenario, fault, **options)


_host_waits = {}


def waits_without_fault(emulated, scenario, policy, seed):
    """Return the host's waits in the control, which is run once for each policy."""
    key = scenario, policy, seed
    if key not in _host_waits:
        _host_waits[key] = run(emulated, scenario, None, policy, seed).host_waits
    return _host_waits[key]


def is_found(emulated, fault, policy, seed):
    """Whether a report, or a wait of the host that the control does not have, is the expected one."""
    outcome = run(emulated, fault.scenario, fault.name, policy, seed)
    if fault.kind == HOST_WAITS:
        (why,) = fault.operations
        control = waits_without_fault(emulated, fault.scenario, policy, seed)
        has_place = any(each == why and PLACE.search(stack) for each, stack in outcome.places_of_waits)
        return has_place and outcome.host_waits[why] > control[why]
    return any(is_expected(fault, report) for report in outcome.reports)


def is_expected(fault, report):
    if report.kind != fault.kind or len(report.operations) < len(fault.operations):
        return False
    begins = zip(report.operations, fault.operations, strict=False)
    num_places = 1 if fault.kind == RECORDED else 2
    return all(name.startswith(begin) for name, begin in begins) and len(PLACE.findall(report.text)) >= num_places


@pytest.mark.parametrize(("policy", "seed"), [LAZY, *SEEDS])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_without_fault_is_silent(emulated, scenario, policy, seed):
    outcome = run(emulated, scenario, None, policy, seed)

    _host_waits[scenario, policy, seed] = outcome.host_waits
    assert list(map(str, outcome.reports)) == []
    assert outcome.tracebacks == {}


@pytest.mark.parametrize("fault", FOUND, ids=lambda fault: fault.name)
def test_a_fault_is_reported_with_operations_and_lines(emulated, fault):
    assert is_found(emulated, fault, *LAZY)
    assert any(is_found(emulated, fault, *seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", MISSED, ids=lambda fault: fault.name)
def test_a_fault_that_the_checker_cannot_see_is_listed_as_such(emulated, fault):
    assert not is_found(emulated, fault, *LAZY)


def test_every_file_with_an_event_a_wait_or_a_pinned_copy_has_a_fault():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    found = {module_of(path) for path, text in texts.items() if EVENT_WAIT_OR_PINNED.search(text)}
    with_fault = {fault.place.split(":")[0] for fault in FOUND}

    assert len(found) > len(WITHOUT_FAULT)
    assert sorted(found - with_fault) == sorted(WITHOUT_FAULT)


def module_of(path):
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


def test_the_table_has_forty_faults_most_of_them_in_penstock():
    assert len(FOUND) >= 40
    assert sum(fault.place.startswith("penstock.") for fault in FOUND) >= 25
