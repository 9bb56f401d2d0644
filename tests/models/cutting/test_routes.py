"""What is carried, and which parts need no forward, from what a run without values noted."""

import pytest
import torch

from penstock.errors import PenstockError
from penstock.models.cutting.label_table import LabelTable
from penstock.models.cutting.routes import (
    ArgumentForms,
    LeafRef,
    PointRoute,
    Routes,
    are_equal,
    carry,
    form_of,
    have_equal_values,
    short_points,
)


def route(name, value, table, *args, outputs=()):
    forms = form_of(value, table), form_of((args, {}), table)
    return PointRoute(name, *forms, True, output_labels=outputs, input_labels=(table.leaf_label(value),))


def three_points():
    """A chain a -> b -> c, of which c also takes what a returned beside its output."""
    table = LabelTable()
    leaves = {label: torch.empty(2, device="meta") for label in ("w#0.0", "a#0.0", "a#0.1", "b#0.0")}
    for label, leaf in leaves.items():
        table.add_leaf(leaf, label)
    return [
        route("a", leaves["w#0.0"], table, outputs=("a#0.0", "a#0.1")),
        route("b", leaves["a#0.0"], table, torch.ones(1), outputs=("b#0.0",)),
        route("c", leaves["b#0.0"], table, leaves["a#0.1"]),
    ]


MADE_IN = {"w#0.0": 0, "a#0.0": 1, "a#0.1": 1, "b#0.0": 2}


def test_a_leaf_travels_from_where_it_is_made_to_the_last_part_that_needs_it():
    points = three_points()
    carry(points, {3: {"a#0.1"}}, MADE_IN, set())

    assert [point.carried for point in points] == [(), ("a#0.1",), ("a#0.1",)]
    assert short_points(points, set(), set()) == {"a", "b"}
    assert short_points(points, {"a#0.1"}, set()) == set()
    assert short_points(points, set(), {"b"}) == {"a"}


def test_the_input_of_a_part_is_not_carried_beside_it_unless_it_is_changed_in_place():
    points = three_points()
    carry(points, {2: {"a#0.0"}}, MADE_IN, set())
    assert [point.carried for point in points] == [(), (), ()]
    carry(points, {2: {"a#0.0"}}, MADE_IN, {"a#0.0"})
    assert points[1].carried == ("a#0.0",)


@pytest.mark.parametrize(
    ("needs", "words"),
    [({2: {"x.weight"}}, "needs 'x.weight' behind 'b'"), ({0: {"a#0.0"}}, "needs 'a#0.0' before its first point")],
)
def test_what_no_layer_has_yet_is_refused(needs, words):
    with pytest.raises(PenstockError, match=words):
        carry(three_points(), needs, MADE_IN, set())


def test_a_form_has_references_in_the_place_of_leaves_and_is_filled_with_them():
    table, leaf, constant = LabelTable(), torch.empty(2, device="meta"), torch.ones(2)
    table.add_leaf(leaf, "a#0.0")
    form = form_of({"x": [leaf], "y": constant, "z": None}, table)

    assert form.is_whole
    assert form.tree["x"] == [LeafRef("a#0.0")]
    filled = form.fill({"a#0.0": constant})
    assert filled["x"][0] is constant
    assert filled["y"] is constant
    assert not form_of(leaf[0], table).is_whole
    assert not form_of(constant.clone().requires_grad_(), table).is_whole
    constant.add_(1)
    assert not form.is_unchanged


def test_routes_are_equal_where_their_constants_are():
    routes = [
        Routes([route("a", torch.full((2,), value), LabelTable())], frozenset(), {}, {}, {}, {}) for value in (1, 1, 2)
    ]

    assert are_equal(routes[0], routes[1])
    assert not are_equal(routes[0], routes[2])
    nan = torch.tensor([1.0, float("nan")])
    assert have_equal_values([nan, 3], [nan.clone(), 3])
    assert not have_equal_values([nan, 3], [nan, 3.0])
    assert not have_equal_values([nan], [nan.double()])


def test_blocks_that_get_the_same_objects_have_one_form_until_one_is_changed():
    table, forms, mask = LabelTable(), ArgumentForms(), torch.ones(2)
    pair = (mask, None)
    first = forms.form((pair,), {"scale": 1}, table)

    assert forms.form((pair,), {"scale": 1}, table) is first
    assert forms.form((pair,), {"size": 1}, table) is not first
    again = forms.form((pair,), {"scale": 1}, table)
    mask.add_(1)
    assert forms.form((pair,), {"scale": 1}, table) is not again
    values = [1]
    assert forms.form((values,), {}, table).tree == (([1],), {})
    values.append(2)
    assert forms.form((values,), {}, table).tree == (([1, 2],), {})
