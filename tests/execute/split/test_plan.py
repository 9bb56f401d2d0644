"""A plan is a function of what walks have shown."""

import pytest

from penstock.execute.split.graph_search import Survey
from penstock.execute.split.plan import Shown, plan_from

BORDER = 100


ASKS, SILENT = type("Asks", (), {"_penstock_asks": True}), type("Silent", (), {})
"""Functions of which one has asked."""


def shown(**options):
    return Shown(is_measured=True, sizes={1: 50, 2: 200, 3: 200}, **options)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (shown(), {"small": {1}}),
        (shown(functions={ASKS, SILENT}), {"asking": {ASKS}, "finds_branches": True}),
        (shown(), {"finds_branches": False, "searches": True}),
        (shown(has_branches=True), {"finds_branches": True}),
        (Shown(is_measured=True, sizes={1: 50}), {"searches": False, "finds_branches": False}),
        (Shown(sizes={1: 50}), {"searches": True, "finds_branches": True, "small": {1}}),
    ],
)
def test_a_plan_follows_from_what_was_shown(found, expected):
    plan = plan_from(found, BORDER)

    assert {name: getattr(plan, name) for name in expected} == expected


def test_the_first_size_of_a_weight_counts():
    found = shown()

    found.add(Survey(sizes={2: 1.0, 4: 5.0}))

    assert found.sizes == {1: 50, 2: 200, 3: 200, 4: 5.0}


def test_weights_that_are_not_held_any_more_are_forgotten():
    found = shown()

    found.forget_others([1, 3, 5])

    assert (found.sizes, found.is_measured) == ({1: 50, 3: 200}, False)
