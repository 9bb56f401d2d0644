"""A plan is a function of what walks have shown."""

from dataclasses import FrozenInstanceError

import pytest

from penstock.execute.split.graph_search import Survey
from penstock.execute.split.plan import Shown, SplitPlan, plan_from

BORDER = 100


class Asks:
    """A function that has asked."""

    _penstock_asks = True


class IsSilent:
    """One that has not."""


def shown(**options):
    return Shown(is_measured=True, sizes={1: 50, 2: 200, 3: 200}, **options)


def plan_of(found, *, covers=True):
    return plan_from(found, BORDER, lambda weights: covers)


def test_before_anything_is_shown_graphs_are_walked_and_all_weights_may_wait():
    assert plan_of(Shown()) == SplitPlan()


def test_a_plan_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SplitPlan().small = frozenset({1})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (shown(), {"small": {1}}),
        (shown(kept_elsewhere={1, 2}), {"in_forward": {2}, "watches_all": False}),
        (shown(kept_elsewhere={2}, missed={2}), {"in_forward": {2}, "watches_all": True}),
        (shown(kept_elsewhere={2, 3}, missed={2}, unsplittable={2}), {"in_forward": {3}, "watches_all": False}),
        (shown(kept_elsewhere={2}, has_failed=True), {"in_forward": set(), "watches_all": False}),
        (shown(functions={Asks, IsSilent}), {"asking": {Asks}, "finds_branches": True}),
        (shown(), {"finds_branches": False, "searches": True}),
        (shown(has_branches=True), {"finds_branches": True}),
        (shown(kept_elsewhere={2, 3}, has_failed=True), {"searches": False}),
        (shown(kept_elsewhere={2, 3}), {"searches": True}),
        (Shown(is_measured=True, sizes={1: 50}), {"searches": False, "finds_branches": False}),
        (Shown(sizes={1: 50}), {"searches": True, "finds_branches": True, "small": {1}}),
    ],
)
def test_a_plan_follows_from_what_was_shown(found, expected):
    plan = plan_of(found)

    assert {name: getattr(plan, name) for name in expected} == expected


def test_every_function_is_watched_where_torchs_own_layers_do_not_hold_a_weight():
    assert plan_of(shown(kept_elsewhere={2}), covers=False).watches_all


def test_what_was_not_split_is_noted_by_how_it_was_watched():
    survey, found = Survey(sizes={2: 1.0, 4: 5.0}, kept_elsewhere={2, 3, 4}), shown()

    found.add(survey, SplitPlan(in_forward=frozenset({2, 3})), {3})
    found.add(survey, SplitPlan(in_forward=frozenset({2, 3}), watches_all=True), set())

    assert (found.missed, found.unsplittable) == ({2}, {2, 3})
    assert found.sizes == {1: 50, 2: 200, 3: 200, 4: 5.0}  # the first size counts
    assert found.kept_elsewhere == {2, 3, 4}


def test_weights_that_are_not_held_any_more_are_forgotten():
    found = shown(kept_elsewhere={1, 2}, missed={2}, unsplittable={3})

    found.forget_others([1, 3, 5])

    assert (found.sizes, found.is_measured) == ({1: 50, 3: 200}, False)
    assert (found.kept_elsewhere, found.missed, found.unsplittable) == ({1}, set(), {3})
