"""Trees come apart and together again."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.execute.values.tree import LEAF, flatten, map_leaves


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclass(frozen=True)
class State:
    hidden: Any
    extra: Any = None
    late: Any = field(default=0, init=False)


CONTAINERS = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(State, inner, inner),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(CONTAINERS)
def test_unflatten_undoes_flatten(value):
    leaves, spec = flatten(value)

    rebuilt = spec.unflatten(leaves)

    assert rebuilt == value
    assert flatten(rebuilt)[1] == spec
    assert len(leaves) == spec.num_leaves == len(spec.places("value"))


def test_a_single_tensor_is_the_leaf_itself():
    tensor = torch.ones(2)

    leaves, spec = flatten(tensor)

    assert leaves[0] is tensor
    assert spec is LEAF
    assert spec.unflatten(leaves) is tensor


def test_specs_can_be_compared_and_hashed():
    first, same, other = (flatten(value)[1] for value in ({"a": [1]}, {"a": [2]}, {"a": (1,)}))

    assert first == same
    assert {first: 1}[same] == 1
    assert first != other


def test_the_order_of_a_dict_is_part_of_its_shape():
    backwards = {"b": 1, "a": 2}

    assert flatten(backwards)[0] == [1, 2]
    assert list(map_leaves(lambda leaf: leaf + 1, backwards).items()) == [("b", 2), ("a", 3)]
    assert flatten(backwards)[1] != flatten({"a": 1, "b": 2})[1]


def test_none_is_no_leaf():
    assert flatten([None, 1])[0] == [1]
    assert map_leaves(str, (None, 1)) == (None, "1")


def test_other_objects_are_leaves():
    size, values = torch.Size([2]), {1, 2}

    assert flatten([size, values, Point])[0] == [size, values, Point]


def test_fields_outside_the_constructor_are_kept():
    state = State(1)
    object.__setattr__(state, "late", 5)

    assert map_leaves(lambda leaf: leaf * 2, state).late == 10


def test_text_shows_the_form():
    value = ((1,), [2, None], {"a": 3, 4: OrderedDict(b=5)}, Point(6), State(7))

    text = flatten(value)[1].to_text()

    assert text == (
        "((*,), [*, None], {'a': *, 4: OrderedDict{'b': *}}, Point(x=*, y=None), State(hidden=*, extra=None, late=*))"
    )


def test_places_are_what_python_would_write():
    spec = flatten({"mask": [1, 2], 3: Point(4, State(5))})[1]

    assert spec.places("kwargs") == [
        "kwargs['mask'][0]",
        "kwargs['mask'][1]",
        "kwargs[3].x",
        "kwargs[3].y.hidden",
        "kwargs[3].y.late",
    ]


def test_a_wrong_number_of_leaves_is_an_error():
    with pytest.raises(PipelineError, match=r"\(\*, \*\): got 1 leaves, expected 2"):
        flatten((1, 2))[1].unflatten([1])


def test_a_key_that_cannot_travel_is_an_error():
    with pytest.raises(PipelineError, match=r"key \(1, 2\) of type tuple"):
        flatten({(1, 2): 3})
    with pytest.raises(PipelineError, match="key True of type bool"):
        flatten({True: 3})


def test_marks_spread_to_the_leaves_below_them():
    spec = flatten(({"a": 1, "b": (2, 3)}, 4, State(5, 6), None))[1]
    marks = ({"b": "m"}, None, {"extra": "n"}, {"never": "looked at"})

    assert spec.spread(marks, lambda mark: isinstance(mark, str), "args") == [None, "m", "m", None, None, "n", None]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"maks": "m"}, r"value\[0\]: the spec names 'maks'.*Did you mean 'mask'\?"),
        ({"mask": ("m", "m")}, r"value\[0\]\['mask'\]: the spec \('m', 'm'\) does not fit a value of the form \*"),
        (("m",), r"value\[0\]: the spec \('m',\) does not fit"),
        (5, r"value\[0\]: the spec 5 does not fit"),
    ],
)
def test_marks_that_do_not_fit_are_an_error(marks, message):
    spec = flatten(({"mask": 1},))[1]

    with pytest.raises(PipelineError, match=message):
        spec.spread((marks,), lambda mark: isinstance(mark, str), "value")
