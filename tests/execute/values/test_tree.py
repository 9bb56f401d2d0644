"""Trees come apart and together again."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
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


def test_specs_are_equal_where_forms_are_of_which_the_order_of_a_dict_is_a_part_and_none_is_no_leaf():
    first, same, other = (flatten(value)[1] for value in ({"a": [1]}, {"a": [2]}, {"a": (1,)}))
    assert first == same != other
    assert {first: 1}[same] == 1
    others = [torch.Size([2]), {1, 2}, Point]
    assert flatten([None, *others])[0] == others
    assert map_leaves(str, (None, 1)) == (None, "1")
    backwards = {"b": 1, "a": 2}

    assert flatten(backwards)[0] == [1, 2]
    assert list(map_leaves(lambda leaf: leaf + 1, backwards).items()) == [("b", 2), ("a", 3)]
    assert flatten(backwards)[1] != flatten({"a": 1, "b": 2})[1]


class Settings(UserDict):
    """A mapping with attributes of its own, of which number and length follow from the entries."""

    scale = 1.0

    def __init__(self, entries):
        super().__init__(entries)
        self.factor = 2.0
        self.number = len(entries["x"]) if "x" in entries else 0

    @cached_property
    def length(self):
        return len(self["x"])


class Attributes(dict):
    """A dict whose entries are its attributes."""

    def __init__(self, entries):
        super().__init__(entries)
        self.__dict__ = self


class Counted(dict):
    """A dict that cannot be made of a dict."""

    def __init__(self, *, number):
        super().__init__(number=number)


@pytest.mark.parametrize("container", [UserDict, Attributes, Settings])
def test_a_mapping_is_rebuilt_by_its_class(container):
    value = container({"ids": torch.ones(2), "masks": [torch.zeros(1), None], "length": 3})

    leaves, spec = flatten([value])
    (rebuilt,) = spec.unflatten([5, 6, 7])

    assert spec.places("args") == ["args[0]['ids']", "args[0]['masks'][0]", "args[0]['length']"]
    assert spec.to_text() == f"[{container.__qualname__}{{'ids': *, 'masks': [*, None], 'length': *}}]"
    assert len(leaves) == 3
    assert type(rebuilt) is container
    assert dict(rebuilt) == {"ids": 5, "masks": [6, None], "length": 7}


def test_a_mapping_keeps_the_attributes_that_do_not_follow_from_its_entries():
    value = Settings({"x": torch.ones(4)})
    value.scale, value.factor = 0.5, 3.0
    assert value.length == 4

    rebuilt = map_leaves(lambda leaf: leaf[:2], value)

    assert (rebuilt.scale, rebuilt.factor, rebuilt.number, rebuilt.length) == (0.5, 3.0, 2, 2)
    assert rebuilt["x"].tolist() == [1.0, 1.0]


def test_a_default_dict_keeps_its_factory_and_names_its_entries():
    leaves, spec = flatten(defaultdict(list, a=torch.ones(1)))

    assert spec.places("args") == ["args['a']"]
    assert repr(spec.unflatten([1])) == repr(defaultdict(list, a=1))
    assert len(leaves) == 1


@pytest.mark.parametrize(
    "value",
    [
        UserDict(depth=2, name="small", dtype=torch.half),
        defaultdict(float, loss=torch.tensor(1.0)),
        defaultdict(list),
        Counted(number=1),
        UserDict({(1, 2): object()}),
    ],
)
def test_a_mapping_of_constants_is_handed_on_as_it_is(value):
    assert map_leaves(lambda leaf: leaf, value) is value


def test_a_mapping_that_its_class_cannot_rebuild_is_an_error():
    with pytest.raises(PipelineError, match=r"Counted cannot be rebuilt.*TypeError.*plain dict"):
        map_leaves(lambda leaf: leaf, Counted(number=torch.ones(1)))


@dataclass
class Prepared:
    """A dataclass that changes a tensor, a number and a text whenever it is built, and keeps a number in bounds.

    It counts in a field that its constructor does not take, as it does not take the scale.
    """

    x: Any
    percent: float = 50.0
    name: str = "left"
    limit: int = 9
    number: int = field(init=False)
    scale: float = field(init=False, default=1.0)

    def __post_init__(self):
        self.number = len(self.x)
        self.x = self.x * 2
        self.total = self.x.sum().item()
        self.percent = self.percent / 100
        self.name = f"{self.name} padded"
        self.limit = min(self.limit, len(self.x))


def test_what_a_dataclass_would_change_once_more_stays_as_it_is_and_what_it_derives_follows_its_tensors():
    value = Prepared(torch.ones(4))
    value.scale = 0.5

    rebuilt = map_leaves(lambda leaf: leaf[:2] if isinstance(leaf, torch.Tensor) else leaf, value)
    value.number = 7
    changed = map_leaves(lambda leaf: leaf[:2] if isinstance(leaf, torch.Tensor) else leaf, value)

    assert rebuilt.x.tolist() == [2.0, 2.0]
    assert (rebuilt.percent, rebuilt.name, rebuilt.limit) == (0.5, "left padded", 2)
    assert (rebuilt.number, rebuilt.scale) == (2, 0.5)
    assert (changed.number, changed.scale) == (7, 0.5)  # a field that was changed later is not counted anew


@dataclass(frozen=True, slots=True)
class Seeded:
    """A dataclass that is not built from its fields alone."""

    seed: InitVar[int]
    x: Any
    noise: Any = field(init=False)

    def __post_init__(self, seed):
        object.__setattr__(self, "noise", seed * 10)


def test_a_dataclass_that_takes_more_than_its_fields_is_rebuilt_without_its_constructor():
    rebuilt = map_leaves(lambda leaf: leaf + 1, Seeded(7, 1))

    assert (rebuilt.x, rebuilt.noise) == (2, 71)


@dataclass
class Checked:
    """A dataclass that refuses some values."""

    x: Any

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x is negative")


def test_a_dataclass_that_refuses_its_fields_is_an_error_that_says_so():
    with pytest.raises(PipelineError, match=r"Checked cannot be rebuilt.*ValueError: x is negative"):
        map_leaves(lambda leaf: -leaf, Checked(1))


def test_text_and_places_show_the_form_and_leaves_fill_it():
    tensor = torch.ones(2)
    value = ((1,), [2, None], {"a": 3, 4: OrderedDict(b=5)}, Point(6, State(tensor)))

    leaves, spec = flatten(value)

    assert spec.to_text() == (
        "((*,), [*, None], {'a': *, 4: OrderedDict{'b': *}}, Point(x=*, y=State(hidden=*, extra=None, late=*)))"
    )
    places = ["[0][0]", "[1][0]", "[2]['a']", "[2][4]['b']", "[3].x", "[3].y.hidden", "[3].y.late"]
    assert spec.places("args") == [f"args{place}" for place in places]
    assert spec.unflatten(leaves) == value
    assert spec.unflatten(leaves)[3].y.hidden is tensor
    assert (flatten(tensor)[1], LEAF.unflatten([tensor])) == (LEAF, tensor)
    with pytest.raises(PipelineError, match="got 1 leaves, expected 7"):
        spec.unflatten([1])


@pytest.mark.parametrize(("key", "text"), [((1, 2), r"key \(1, 2\) of type tuple"), (True, "key True of type bool")])
def test_a_key_that_cannot_travel_is_an_error(key, text):
    with pytest.raises(PipelineError, match=text):
        flatten({key: 3})


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
