"""Trees come apart and together again, and their layout travels without pickle."""

import json
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.execute.tree import (
    LEAF,
    TensorInfo,
    decode_layout,
    encode_layout,
    flatten,
    map_leaves,
)


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclass(frozen=True)
class State:
    hidden: Any
    extra: Any = None
    late: Any = field(default=0, init=False)


Late = namedtuple("Renamed", ["x"])  # found under no module-level name: Renamed

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


@given(CONTAINERS)
def test_a_layout_survives_the_journey(value):
    layout = decode_layout(encode_layout(value))

    assert layout.spec == flatten(value)[1]
    assert repr(layout.fill([])) == repr(value)
    assert encode_layout(layout.fill([])) == encode_layout(value)


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


def test_a_layout_holds_what_the_receiver_needs_to_rebuild_the_tree():
    sent = Point({"h": torch.ones(2, 0, dtype=torch.bfloat16, requires_grad=True), 7: 2.5}, [torch.ones(3) > 0, "x"])

    layout = decode_layout(encode_layout(sent))
    buffers = [torch.zeros(info.shape, dtype=info.dtype) for info in layout.tensors]
    received = layout.fill(buffers)

    assert layout.tensors == (
        TensorInfo((2, 0), torch.bfloat16, True),
        TensorInfo((3,), torch.bool, False),
    )
    assert isinstance(received, Point)
    assert received.x["h"] is buffers[0]
    assert received.x[7] == 2.5
    assert received.y == [buffers[1], "x"]


def test_a_layout_tells_how_dimensions_lie_in_memory_and_is_equal_where_they_do_not():
    pictures = torch.ones(2, 3, 4, 5)
    last = pictures.to(memory_format=torch.channels_last)

    (info,) = decode_layout(encode_layout(last)).tensors

    assert info.order == (0, 2, 3, 1)
    assert info == TensorInfo.of(pictures)
    assert TensorInfo.of(pictures).order == ()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.1, -0.0, 1e-320, 2**200, True, 1])
def test_numbers_travel_exactly(number):
    received = decode_layout(encode_layout(number)).fill([])

    assert type(received) is type(number)
    assert repr(received) == repr(number)


def test_layouts_differ_where_anything_differs():
    trees = [1, 1.0, True, "1", [1], (1,), {"a": 1}, None, Point(1), State(1), torch.ones(1), torch.ones(1, 1)]
    trees += [torch.ones(1).double(), torch.ones(1, requires_grad=True)]

    assert len({encode_layout(tree) for tree in trees}) == len(trees)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.Size([1]), r"value\['a'\]\[0\] is a torch.Size.*Take it apart"),
        (torch.eye(2).to_sparse(), r"value\['a'\]\[0\] is a tensor of layout torch.sparse_coo"),
        (b"bytes", "builtins.bytes"),
    ],
)
def test_a_leaf_that_cannot_travel_is_an_error_naming_its_type(leaf, message):
    with pytest.raises(PipelineError, match=message):
        encode_layout({"a": [leaf]})


def test_a_class_that_no_peer_could_find_is_an_error():
    @dataclass
    class Hidden:
        x: int

    for value in (Hidden(1), Late(1)):
        with pytest.raises(PipelineError, match="cannot be found by its name"):
            encode_layout(value)


def message(tree, leaves):
    return json.dumps({"tree": tree, "leaves": leaves}).encode()


@pytest.mark.parametrize(
    "path", ["os:system", "builtins:int", "subprocess:Popen", "json.no_such:Class", f"{__name__}:missing", "x"]
)
def test_only_imported_dataclasses_and_named_tuples_are_looked_up(path):
    with pytest.raises(PipelineError, match=r"no dataclass or named tuple"):
        decode_layout(message([path, ["x"], ["*"]], [1]))


def test_looking_a_class_up_runs_no_code(monkeypatch):
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail(f"the module was asked for {name}")
    monkeypatch.setitem(sys.modules, "lazy", lazy)

    with pytest.raises(PipelineError, match="lazy:Point"):
        decode_layout(message(["lazy:Point", ["x", "y"], ["*", "*"]], [1, 2]))


def test_a_layout_imports_nothing():
    assert "this" not in sys.modules

    with pytest.raises(PipelineError):
        decode_layout(message(["this:Class", [], []], []))

    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        message("+", [1]),
        message("*", []),
        message("*", [1, 2]),
        message(["tuple", [1], ["*"]], [1]),
        message(["dict", ["a", "a"], ["*", "*"]], [1, 2]),
        message(["dict", [True], ["*"]], [1]),
        message(["list", [0], []], []),
        message([f"{__name__}:Point", ["x"], ["*"]], [1]),
        message("*", [[[2], "no_such_dtype", True]]),
        message("*", [[[2], "ones", True]]),
        message("*", [[[-1], "float32", True]]),
        message("*", [[[True], "float32", True]]),
        message("*", [{"float": "x"}]),
        message("*", [1.5]),
        b'{"tree":' + b"[" * 100_000,
    ],
)
def test_damaged_layouts_are_one_kind_of_error(data):
    with pytest.raises(PipelineError, match="run the same version"):
        decode_layout(data)


def test_filling_a_layout_takes_one_tensor_for_each_info():
    with pytest.raises(PipelineError, match="got 0 tensors, expected 1"):
        decode_layout(encode_layout(torch.ones(1))).fill([])
